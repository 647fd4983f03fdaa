"""Reading weights: a folder of safetensors, one tensor at a time, and sharing what was loaded.

`Checkpoint(folder)` knows the name, shape and element type of every tensor in the folder (one file, or shards with an
index) and reads each straight into the memory it is wanted in, a few megabytes at a time. Files are read, not mapped:
a mapped file counts as memory of the process, and loading would peak at two copies. Nothing is ever unpickled.

`shared(key, build)` gives engines of one process the same object for the same key, for as long as one of them holds it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, BinaryIO

import torch

from .weight_files import Entry, read_header, weight_files

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_PIECE_BYTES = 8 << 20  # read and converted at a time


class Checkpoint:
    """The tensors of a model folder. Use as a context manager: the files stay open while it is.

    Raises ValueError, saying which file or tensor and why, for anything that is missing, cut off or of another shape.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._entries: dict[str, Entry] = {}
        self._open: dict[Path, BinaryIO] = {}
        self._read: set[str] = set()
        for file in weight_files(self.folder):
            found = read_header(file)
            if twice := sorted(found.keys() & self._entries.keys()):
                raise ValueError(
                    f"{self.folder} holds {twice[0]} twice: in {self._entries[twice[0]].file.name} and {file.name}"
                )
            self._entries |= found

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        for handle in self._open.values():
            handle.close()
        self._open.clear()

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    @property
    def unread(self) -> list[str]:
        """Tensors that nobody asked for: maths that the model does not do, if they are weights."""
        return sorted(self._entries.keys() - self._read)

    def read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """One tensor, converted to `dtype`."""
        self.require(name, shape)
        out = torch.empty(shape, dtype=dtype)
        self.read_into(name, out)
        return out

    def read_into(self, name: str, out: torch.Tensor) -> None:
        """One tensor, converted into `out`, a contiguous tensor on the CPU of the shape that the model needs."""
        entry = self.require(name, tuple(out.shape))
        handle = self._open.get(entry.file)
        if handle is None:
            handle = self._open[entry.file] = entry.file.open("rb", buffering=0)
        handle.seek(entry.start)
        dtype = _DTYPES[entry.dtype]
        flat = out.view(-1)
        if dtype == out.dtype:
            _fill(handle, flat, entry, name)
        else:
            piece = torch.empty(min(len(flat), _PIECE_BYTES // dtype.itemsize), dtype=dtype)
            for start in range(0, len(flat), max(len(piece), 1)):
                part = piece[: len(flat) - start]
                _fill(handle, part, entry, name)
                flat[start : start + len(part)] = part
        self._read.add(name)

    def require(self, name: str, shape: tuple[int, ...]) -> Entry:
        """Where a tensor lies that must have this shape; asked before memory is taken, since config.json may be wrong."""
        entry = self._entries.get(name)
        if entry is None:
            raise ValueError(f"parameter {name} {list(shape)} is in no file of {self.folder}")
        if entry.shape != shape:
            raise ValueError(
                f"parameter {name} is {list(entry.shape)} in {entry.file.name}; config.json makes it {list(shape)}"
            )
        if entry.dtype not in _DTYPES:
            raise ValueError(
                f"parameter {name} is stored as {entry.dtype} in {entry.file.name}; "
                f"the element types that are read are {', '.join(_DTYPES)}"
            )
        return entry


def _fill(handle: BinaryIO, part: torch.Tensor, entry: Entry, name: str) -> None:
    view = memoryview(part.view(torch.uint8).numpy()) if len(part) else memoryview(b"")
    while view:  # an unbuffered read may return less than was asked for
        got = handle.readinto(view)
        if not got:
            raise ValueError(f"{entry.file} was cut off while parameter {name} was being read")
        view = view[got:]


_shared: weakref.WeakValueDictionary[Hashable, Any] = weakref.WeakValueDictionary()
_shared_lock = threading.RLock()


def shared(key: Hashable, build: Callable[[], Any]) -> Any:
    """The living object under `key`, or a new one from `build()`; it lives as long as someone holds it.

    Two threads that ask for the same key at once get one object: the second waits for the first.
    """
    with _shared_lock:
        value = _shared.get(key)
        if value is None:
            value = _shared[key] = build()
        return value
