"""Every kernel on a CPU without AVX-512, whatever the CPU of the test: the same tests, run again with the flags turned off.

LLVM ends the process when code asks for an instruction that its target lacks, so a forgotten check shows as a dead child.
"""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
AVX2 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "NUMBA_CPU_NAME": "haswell"}
# About processes, the cache, or another machine's instructions: nothing that this CPU's flags change.
NOT_AGAIN = ["test_portable.py", "test_compiler.py", "test_triton.py", "test_triton_compile.py"]


def run(*arguments):
    return subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | AVX2,
        capture_output=True,
        text=True,
        timeout=540,
        cwd=HERE.parents[1],
    )


def test_no_flag_of_avx512_is_reported():
    flags = "from kvscope.kernels.cpu.compiler import CPU; print(CPU.avx512, CPU.avx512_bf16)"
    assert run("-c", flags).stdout.split() == ["False"] * 2


def test_the_kernel_tests_pass_without_avx512():
    done = run(
        "-m",
        "pytest",
        "-x",
        "-p",
        "no:cacheprovider",
        "-m",
        "not full",
        *(f"--ignore={HERE / n}" for n in NOT_AGAIN),
        str(HERE),
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "passed" in done.stdout
