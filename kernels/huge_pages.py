"""Memory that is read in long streams, on huge pages where the system has them: weights and the KV pool.

On pages of 4 KiB a decode step looks up 70,000 addresses of pages for a model of 270 MB, more than a CPU remembers, and in a
virtual machine each costs two walks. Linux gives 2 MiB at once to whoever asks (`madvise`), where whole aligned 2 MiB are
mapped. Tensors of one model are smaller than that, so they share mappings; a mapping goes with the last tensor in it.
"""

from __future__ import annotations

import math
import mmap
import threading
import weakref
from collections.abc import Sequence

import numpy as np
import torch

HUGE = 2 << 20  # bytes of a huge page
_SMALLEST = 64 << 10  # bytes from which a tensor is worth it
_MAPPING = 16 * HUGE  # bytes that small tensors share
_LINE = 64  # bytes of a cache line, at which every tensor begins

_lock = threading.Lock()
_shared: weakref.ref[np.ndarray] | None = None  # the mapping that tensors are put into now
_taken = 0  # bytes of it


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
    """A tensor without values, on a CPU at a cache line. What is not written takes no memory, but for the rest of its page."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if torch.device(device).type != "cpu" or num_bytes < _SMALLEST or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(*shape, dtype=dtype, device=device)
    return torch.from_numpy(_room(num_bytes)).view(dtype).view(*shape)


def _room(num_bytes: int) -> np.ndarray:
    global _shared, _taken
    if num_bytes > _MAPPING // 2:
        mapping, start = _map(num_bytes)
        return mapping[start : start + num_bytes]
    with _lock:
        mapping = None if _shared is None else _shared()
        if mapping is None or _taken + num_bytes > len(mapping):
            mapping, _taken = _map(_MAPPING)
            _shared = weakref.ref(mapping)
        room = mapping[_taken : _taken + num_bytes]
        _taken += -(-num_bytes // _LINE) * _LINE
    return room


def _map(num_bytes: int) -> tuple[np.ndarray, int]:
    """Fresh memory, and where in it `num_bytes` begin at a huge page. Slices refer to the whole, which refers to the mapping."""
    memory = mmap.mmap(-1, num_bytes + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, np.uint8)
    return whole, -whole.ctypes.data % HUGE
