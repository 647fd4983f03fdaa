"""The compiler: flags before code, a cache that notices every edit, calls from any thread, progress at the first run.

What has to happen once in a fresh process is done in a child process; the functions it compiles are small.
"""

import os
import subprocess
import sys
import threading

import numba
import pytest
import torch
from kvscope.kernels.cpu import compiler, machine
from kvscope.kernels.cpu.compiler import array_at, kernel
from numba import prange

HEAD = """
import numba, numpy as np, os, sys, threading
from numba import prange
from kvscope.kernels.cpu import compiler
from kvscope.kernels.cpu.compiler import array_at, kernel

@kernel("void(int64, int64, int64)", parallel=True, group="story")
def count(address, n, parts):
    values = array_at(address, n, numba.float64)
    for part in prange(parts):
        for i in range(part * n // parts, (part + 1) * n // parts):
            values[i] += 1
"""


def child(script, **environment):
    """The lines that `script`, after HEAD, prints in a fresh process; fails if it does not end well."""
    done = subprocess.run(
        [sys.executable, "-c", HEAD + script], env=os.environ | environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@kernel("void(int64, int64, int64, float32, int64)", parallel=True)
def scale(out, x, n, factor, parts):
    to, values = array_at(out, n, numba.float32), array_at(x, n, numba.float32)
    for part in prange(parts):
        for i in range(part * n // parts, (part + 1) * n // parts):
            to[i] = values[i] * factor


def test_arguments_convert_to_the_one_signature():
    x = torch.arange(7.0)
    for factor in (2, 2.0, True + 1):
        out = torch.zeros(8)
        scale(out.data_ptr(), x.data_ptr(), 7, factor, 3)
        assert torch.equal(out[:7], x * 2) and out[7] == 0
    with pytest.raises(TypeError):
        scale("out", x.data_ptr(), 7, 2.0, 3)
    assert len(scale.dispatcher.signatures) == 1


def test_two_threads_call_at_once():
    n, calls = 10_000, 50
    outs = [torch.zeros(n) for _ in range(2)]
    xs = [torch.full((n,), 1.0 + i) for i in range(2)]

    def work(i):
        for _ in range(calls):
            outs[i].zero_()
            scale(outs[i].data_ptr(), xs[i].data_ptr(), n, 3.0, 2)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert torch.equal(outs[0], xs[0] * 3) and torch.equal(outs[1], xs[1] * 3)


def test_two_threads_under_workqueue_take_turns():
    """Without the lock Numba ends the process: `Terminating: Nested parallel kernel launch detected` or a crash."""
    lines = child(
        """
arrays = [np.zeros(200_000) for _ in range(2)]
def work(a):
    for _ in range(200):
        count(a.ctypes.data, a.size, 2)
threads = [threading.Thread(target=work, args=(a,)) for a in arrays]
for t in threads: t.start()
for t in threads: t.join()
print(compiler.threading_layer(), *[int(v) for a in arrays for v in (a.min(), a.max())])
""",
        NUMBA_THREADING_LAYER="workqueue",
        NUMBA_NUM_THREADS="2",
    )
    assert lines == ["workqueue 200 200 200 200"]


@pytest.mark.skipif(not compiler._pause_functions(), reason="only GNU OpenMP keeps a team for every calling thread")
def test_a_resting_thread_gives_its_helpers_back():
    lines = child(
        """
a = np.zeros(10)
alone = len(os.listdir("/proc/self/task"))
for _ in range(2):
    count(a.ctypes.data, a.size, 2)
    helped = len(os.listdir("/proc/self/task"))
    compiler.release_threads()
    print(helped - alone, len(os.listdir("/proc/self/task")) - alone, a[0])
""",
        NUMBA_NUM_THREADS="2",
        OMP_NUM_THREADS="2",
    )
    assert lines == ["1 0 1.0", "1 0 2.0"]


CACHE_STORY = """
a = np.zeros(10)
print(count.is_cached())
compiler.warm_up(groups=["story"], progress=lambda done, total, name: print(done, total, name))
count(a.ctypes.data, a.size, 2)
print(a.sum(), numba.config.CACHE_DIR == "")
"""


def test_the_second_process_loads_what_the_first_compiled(tmp_path):
    environment = {"XDG_CACHE_HOME": str(tmp_path)}
    assert child(CACHE_STORY, **environment) == ["False", "0 1 count", "1 1 ", "10.0 True"]
    assert child(CACHE_STORY, **environment) == ["True", "10.0 True"]
    code, index = ((tmp_path / "kvscope" / "kernels").glob(f"*/count-*.{kind}") for kind in ("nbc", "nbi"))
    for (entry,) in (code, index):  # the machine lost power: load, fail, compile again
        whole = entry.stat().st_size
        entry.write_bytes(entry.read_bytes()[: whole // 2])
        assert child(CACHE_STORY, **environment)[-1] == "10.0 True"
        assert entry.stat().st_size > whole // 2


def test_no_cache_folder_costs_the_compile_time_only():
    assert child(CACHE_STORY, XDG_CACHE_HOME="/dev/null") == ["False", "0 1 count", "1 1 ", "10.0 True"]


def test_the_folder_is_named_by_every_source(tmp_path):
    (tmp_path / "a.py").write_text("one")
    (tmp_path / "b.py").write_text("two")
    before = compiler._digest(tmp_path, "versions")
    assert compiler._digest(tmp_path, "versions") == before
    assert compiler._digest(tmp_path, "newer versions") != before
    (tmp_path / "b.py").write_text("three")
    assert compiler._digest(tmp_path, "versions") != before


def test_old_folders_are_removed_and_others_kept(tmp_path):
    root = tmp_path / "kvscope" / "kernels"
    for name, age_days in (("old", 31), ("recent", 29)):
        (root / name).mkdir(parents=True)
        (root / name / "entry").write_text("")
        now = (root / name).stat().st_mtime
        os.utime(root / name, (now - age_days * 86400,) * 2)
    (current,) = child("print(compiler.cache_folder().name)", XDG_CACHE_HOME=str(tmp_path))
    assert {f.name for f in root.iterdir()} == {"recent", current}


def test_flags_follow_the_target():
    read = "print(compiler.CPU.name, compiler.CPU.avx2, compiler.CPU.avx512, compiler.CPU.avx512_bf16)"
    assert child(read, NUMBA_CPU_NAME="haswell")[0].split()[2:] == ["False", "False"]
    assert child(read, NUMBA_CPU_NAME="generic")[0].split()[1:] == ["False", "False", "False"]
    features = "+avx2,+fma,+avx512f,+avx512bw,+avx512dq,+avx512vl"
    expected = ["skylake-avx512", "True", "True", "False"]
    if compiler.CPU.avx2:  # the features are an x86 machine's
        assert child(read, NUMBA_CPU_NAME="skylake-avx512", NUMBA_CPU_FEATURES=features)[0].split() == expected


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"cpu.max": "200000 100000\n"}, 2.0),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "150000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1.5),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({}, None),
    ],
)
def test_the_quota_of_a_container(tmp_path, files, quota):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert machine._cgroup_quota(tmp_path) == quota


def test_the_number_of_threads_is_bounded():
    assert 1 <= compiler.num_threads() <= compiler.available_cpus()
    for wrong in (0, numba.config.NUMBA_NUM_THREADS + 1):
        with pytest.raises(ValueError, match=f"num_threads={wrong} must lie between 1 and"):
            compiler.set_num_threads(wrong)
