"""Runs `triton_compiled.py` in a process of its own and reads what the cubins use: nothing may spill, and all must fit."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("triton_compiled.py")
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # bytes that the threads of one program may share
REGISTERS = 65_536  # of a multiprocessor


def compiled(*options, seconds):
    done = subprocess.run([sys.executable, SCRIPT, *options], capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def judge(rows):
    """Every row as a sentence, printed; fails on the first that spills or does not fit."""
    for row in rows:
        print(
            f"sm_{row['sm']} {row['kernel']}: {row['REG']} registers, {row['DYNAMIC']} B shared, {row['STACK']} B spilt"
        )
    assert {row["sm"] for row in rows} == set(SHARED_LIMIT)
    for row in rows:
        assert row["STACK"] == row["LOCAL"] == 0, f"{row['kernel']} spills on sm_{row['sm']}: {row}"
        assert row["SHARED"] + row["DYNAMIC"] <= SHARED_LIMIT[row["sm"]], f"{row['kernel']} does not fit: {row}"
        assert row["REG"] * row["warps"] * 32 <= REGISTERS, f"{row['kernel']} does not fit: {row}"


def test_small_models_configurations_compile_and_do_not_spill():
    judge(compiled("--few", seconds=540))


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_every_shipped_configuration_compiles_and_does_not_spill():
    rows = compiled(seconds=3500)
    kernels = {row["kernel"].split()[0] for row in rows}
    assert kernels >= {"attend", "join", "write", "copy", "rms_norm", "rotary", "silu_mul", "int8_linear", "sample"}
    judge(rows)


def test_a_spill_is_found():
    row = {"kernel": "k", "warps": 4, "REG": 255, "SHARED": 0, "DYNAMIC": 0, "LOCAL": 0}
    with pytest.raises(AssertionError, match="spills on sm_90"):
        judge([row | {"sm": 80, "STACK": 0}, row | {"sm": 90, "STACK": 8}, row | {"sm": 100, "STACK": 0}])
