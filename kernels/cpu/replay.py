"""The kernel calls of a computation, recorded once and made again: what a CUDA graph is to a GPU.

A decode step is three hundred kernel calls. Around each of them Python checks shapes, makes the tensor of the result and
asks tensors for their addresses; in a small batch that takes a fifth of the step. All of it comes out the same whenever
shapes are the same. So:

    memory = ReusedMemory()
    graph = KernelGraph(memory)
    hidden = graph.capture(lambda: model.layers(residual, batch))    # computes as always, and notes every call
    ...                                                              # other values in the same tensors
    graph.replay()                                                   # the same calls again: hidden holds the new result

Between kernels a captured computation may make views and empty tensors, nothing else: what torch computes would be missing
from a replay, and so it raises `NotCapturable`. A kernel's scratch and what `torch.empty` gives live in memory that the
graphs hold.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar
from weakref import ref

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .compiler import Kernel, recording_calls
from .shared import own_scratch

T = TypeVar("T")
_LINE = 64  # bytes of a cache line


class NotCapturable(RuntimeError):
    """The computation does something beside kernels, views and empty tensors."""


class ReusedMemory:
    """Gives out memory that nobody refers to any more. Graphs that never run at once may share one."""

    def __init__(self) -> None:
        self._arrays: list[np.ndarray] = []
        self._lent: dict[int, ref[np.ndarray]] = {}  # by the id of an array: the view of it that tensors refer to
        self.scratch: list[np.ndarray] = []  # of kernels, one at a time

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self._arrays + self.scratch)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor without values. Its memory stays taken while any tensor that shares it lives."""
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        room = max(_LINE, num_bytes)
        for array in self._arrays:
            if room <= array.nbytes <= 2 * room and self._lent[id(array)]() is None:
                break
        else:
            array = torch.empty(room, dtype=torch.uint8).numpy()  # torch begins at a cache line
            self._arrays.append(array)
        view = array[:num_bytes]
        self._lent[id(array)] = ref(view)
        return torch.from_numpy(view).view(dtype).view(shape)


class _OnlyKernels(TorchDispatchMode):
    """Lets views through, makes empty tensors in `memory`, and refuses all else."""

    def __init__(self, memory: ReusedMemory):
        super().__init__()
        self._memory = memory

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch's hook: nothing here is ever compiled, and to tell torch._dynamo so would import it, for a second or two."""
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        options = kwargs or {}
        if func is torch.ops.aten.empty.memory_format:
            return self._memory.empty(tuple(args[0]), options.get("dtype") or torch.get_default_dtype())
        if not func.is_view:
            raise NotCapturable(f"{func} is no kernel of ours")
        result = func(*args, **options)
        for each in result if isinstance(result, list | tuple) else (result,):
            if each.untyped_storage().data_ptr() != args[0].untyped_storage().data_ptr():
                raise NotCapturable(f"{func} copies")
        return result


class KernelGraph:
    """One computation. Captured and replayed by whoever owns the tensors that it reads and writes, one call at a time."""

    def __init__(self, memory: ReusedMemory):
        self._memory = memory
        self._calls: list[tuple[Kernel, tuple]] = []
        self._result: object = None  # whose memory is taken as long as the graph lives

    def capture(self, compute: Callable[[], T]) -> T:
        """What `compute` returns; its kernel calls are noted. Raises NotCapturable, after which the graph is of no use."""
        calls: list[tuple[Kernel, tuple]] = []
        with own_scratch(self._memory.scratch), recording_calls(calls), _OnlyKernels(self._memory):
            result = compute()
        self._calls, self._result = calls, result
        return result

    def replay(self) -> bool:
        """Compute again, from what the same tensors hold now. False when a kernel found a value that lies outside its tables;
        what was to be computed is then undefined."""
        return not any(kernel(*arguments) for kernel, arguments in self._calls)
