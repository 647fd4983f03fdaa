"""Memory on huge pages: at cache lines, shared by small tensors, and gone with the last of them."""

import gc
import mmap
import sys

import pytest
import torch
from kvscope.kernels import huge_pages
from kvscope.kernels.huge_pages import empty

MIB = 1 << 20


@pytest.mark.parametrize("shape", [(3, 5), (70_000,), (3, 50_001), (9, 3 * MIB)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.bfloat16])
def test_a_tensor_has_memory_of_its_own(shape, dtype):
    tensors = [empty(shape, dtype) for _ in range(3)]
    for value, tensor in enumerate(tensors, 1):
        assert tensor.shape == shape and tensor.dtype == dtype and tensor.is_contiguous()
        tensor.fill_(value)
    assert all((tensor == value).all() for value, tensor in enumerate(tensors, 1))
    if tensors[0].nbytes >= huge_pages._SMALLEST:
        assert not any(tensor.data_ptr() % 64 for tensor in tensors)


def kib(name):
    with open("/proc/self/smaps_rollup") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(name))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self")
def test_memory_comes_with_the_first_write_and_goes_with_the_last_tensor():
    gc.collect()
    before = kib("Rss")
    tensors = [empty((2 * MIB + 4096,), torch.uint8) for _ in range(60)]
    assert kib("Rss") - before < 4 * 1024
    for tensor in tensors:
        tensor.fill_(1)
    assert 120 * 1024 < kib("Rss") - before < 150 * 1024
    del tensors[:-1], tensor
    assert kib("Rss") - before < 40 * 1024  # one mapping of 32 MiB is left, and what is in it
    assert (tensors[0] == 1).all()
    tensors.clear()
    assert kib("Rss") - before < 4 * 1024


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="needs Linux")
def test_the_system_is_asked_for_huge_pages():
    with open("/sys/kernel/mm/transparent_hugepage/enabled") as choices:
        if "[never]" in choices.read():
            pytest.skip("this system gives none")
    before = kib("AnonHugePages")
    tensor = empty((64 * MIB,), torch.uint8).fill_(1)
    assert kib("AnonHugePages") - before > 32 * 1024, tensor.shape


def test_a_system_without_them_gives_a_tensor_all_the_same(monkeypatch):
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    assert empty((300, 1000), torch.float32).fill_(1).sum() == 300_000
