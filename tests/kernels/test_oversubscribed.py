"""More threads than CPUs: the same bits, and no collapse (threads that spin at a barrier would keep those from it that work)."""

import json
import os
import subprocess
import sys

import pytest

MEASURE = """
import json, os, time
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
import torch
from kvscope.kernels.cpu.compiler import set_num_threads
from kvscope.kernels.cpu.linear import linear, pack_linear
torch.set_num_threads(1)
torch.manual_seed(0)
packed = [pack_linear(torch.randn(1024, 512), None, torch.float32) for _ in range(20)]
x = torch.randn(3, 512)
seconds, results = {2: [], 4: []}, {}
for _ in range(15):
    for threads in seconds:
        set_num_threads(threads)
        linear(x, packed[0])
        start = time.perf_counter()
        made = [linear(x, each) for each in packed]
        seconds[threads].append(time.perf_counter() - start)
        results[threads] = torch.cat(made)
print(json.dumps([min(seconds[2]), min(seconds[4]), torch.equal(results[2], results[4])]))
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="binds a process to two CPUs")
def test_four_threads_on_two_cpus_give_the_same_bits_and_do_not_collapse():
    environment = os.environ | {"NUMBA_NUM_THREADS": "4"}
    done = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    two, four, equal = json.loads(done.stdout.splitlines()[-1])
    assert equal
    assert four < 6 * two, f"{1e3 * two:.2f} ms with two threads, {1e3 * four:.2f} ms with four"
