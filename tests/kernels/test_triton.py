"""Runs the cases of `triton_interpreted.py` in a process where Triton interprets, which must be said before its import."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("triton_interpreted.py")


def run(marks, seconds):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--noconftest", "-p", "no:cacheprovider", "-m", marks, CASES],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def test_the_kernels_are_the_reference():
    run("not full", 540)


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_the_kernels_are_the_reference_over_the_larger_grid():
    run("full", 3500)
