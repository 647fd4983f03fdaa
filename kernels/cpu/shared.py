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


_local = threading.local()  # .own: this thread's scratch, the last of it in use; .kept: the same inside `own_scratch`


def scratch(num_bytes: int) -> int:
    """The address of at least `num_bytes` bytes that belong to the calling thread, at a cache line. The next call may give
    the same ones."""
    kept = getattr(_local, "kept", None)
    memory = vars(_local).setdefault("own", []) if kept is None else kept
    if not memory or memory[-1].nbytes < num_bytes + 64:
        if kept is None:
            memory.clear()
        memory.append(np.empty(num_bytes + num_bytes // 4 + 64, np.uint8))
    return (memory[-1].ctypes.data + 63) // 64 * 64


@contextmanager
def own_scratch(memory: list[np.ndarray]) -> Iterator[None]:
    """Inside, `scratch` gives this thread addresses in `memory`, which grows where it has to, and they stay valid as long as
    that list lives. Those that share one must not run at once."""
    _local.kept = memory
    try:
        yield
    finally:
        _local.kept = None
