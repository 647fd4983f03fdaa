"""Runs the cases of `triton_*.py` in processes where Triton interprets, which must be said before its import."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def run(cases, marks, seconds):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--noconftest", "-p", "no:cacheprovider", "-m", marks, HERE / cases],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def test_the_kernels_are_the_reference():
    run("triton_interpreted.py", "not full", 540)


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_the_kernels_are_the_reference_over_the_larger_grid():
    run("triton_interpreted.py", "full", 3500)


def test_the_gpu_bench_checks_what_it_runs():
    run("triton_bench.py", "not full", 540)


def test_the_gpu_bench_needs_few_packages():
    """It is run where only torch, Triton, transformers, numpy and safetensors are."""
    refused = ["numba", "gguf", "panel", "bokeh", "ipywidgets", "platformdirs", "filelock", "psutil", "tqdm"]
    code = f"import sys; sys.modules.update(dict.fromkeys({refused})); import kvscope.engine.bench.gpu"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
