"""What the threads of a parallel kernel share: a counter from which they take work, and the memory of one call."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numba import int64

from .simd import I64, operation


@operation(int64, int64)
def take(builder, counter):
    """The int64 at address `counter`, which then grows by one; no two threads get the same."""
    address = builder.inttoptr(counter, I64.as_pointer())
    return builder.atomic_rmw("add", address, I64(1), "monotonic")


_local = threading.local()  # .memory: this thread's scratch, which grows to the largest call


def scratch(num_bytes: int) -> int:
    """The address of at least `num_bytes` bytes that belong to the calling thread, at a cache line. The next call may give
    the same ones."""
    memory = getattr(_local, "memory", None)
    if memory is None or memory[-1].nbytes < num_bytes + 64:
        grown = np.empty(num_bytes + num_bytes // 4 + 64, np.uint8)
        _local.address = (grown.ctypes.data + 63) // 64 * 64
        if getattr(_local, "keeps", False):
            memory.append(grown)
        else:
            _local.memory = [grown]
    return _local.address


@contextmanager
def own_scratch() -> Iterator[list[np.ndarray]]:
    """Inside, `scratch` gives this thread addresses that stay valid, and nobody else's, as long as the yielded list lives."""
    before = vars(_local).copy()
    vars(_local).update(memory=[np.empty(64, np.uint8)], keeps=True)
    try:
        yield _local.memory
    finally:
        vars(_local).clear()
        vars(_local).update(before)
