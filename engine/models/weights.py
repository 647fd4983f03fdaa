"""Reading weights: a folder of safetensors, one tensor at a time, and sharing what was loaded.

`Checkpoint(folder)` knows the name, shape and element type of every tensor in the folder (one file, or shards with an
index) and reads each straight into the memory it is wanted in, a few megabytes at a time. Files are read, not mapped:
a mapped file counts as memory of the process, and loading would peak at two copies. Nothing is ever unpickled.

`shared(key, build)` gives engines of one process the same object for the same key, for as long as one of them holds it.
"""

from __future__ import annotations

import json
import math
import threading
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_PIECE_BYTES = 8 << 20  # read and converted at a time
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class _Entry:
    """Where a tensor lies: safetensors stores each as one run of bytes, row-major."""

    file: Path
    start: int
    stop: int
    dtype: str
    shape: tuple[int, ...]


class Checkpoint:
    """The tensors of a model folder. Use as a context manager: the files stay open while it is.

    Raises ValueError, saying which file or tensor and why, for anything that is missing, cut off or of another shape.
    """

    def __init__(self, folder: Path | str):
        self.folder = Path(folder)
        self._entries: dict[str, _Entry] = {}
        self._open: dict[Path, BinaryIO] = {}
        self._read: set[str] = set()
        for file in weight_files(self.folder):
            self._entries |= _header(file)

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
        out = torch.empty(shape, dtype=dtype)
        self.read_into(name, out)
        return out

    def read_into(self, name: str, out: torch.Tensor) -> None:
        """One tensor, converted into `out`, a contiguous tensor on the CPU of the shape that the model needs."""
        entry = self._entry(name, tuple(out.shape))
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

    def _entry(self, name: str, shape: tuple[int, ...]) -> _Entry:
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


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder: the shards that its index names, or model.safetensors, or the only one."""
    index, single = folder / _INDEX, folder / "model.safetensors"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise ValueError(f"{index} is not an index of shards: {error}") from error
        for name in names:
            if not (folder / name).is_file():
                raise ValueError(f"{_INDEX} names the shard {name}, which is not in {folder}; fetch the model again")
        return [folder / name for name in names]
    if single.is_file():
        return [single]
    found = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    if len(found) == 1:
        return found
    if found:
        raise ValueError(
            f"{folder} holds {len(found)} safetensors files and no {_INDEX} that says how they belong together"
        )
    pickles = sorted(p.name for p in folder.iterdir() if p.suffix in _PICKLES) if folder.is_dir() else []
    if pickles:
        raise ValueError(
            f"{folder} holds {pickles[0]} and no safetensors: loading a pickle can run code from the file, "
            f"so it is refused; convert the model to safetensors"
        )
    raise ValueError(f"{folder} holds no weights: a model folder needs model.safetensors or shards with {_INDEX}")


def fingerprint(folder: Path | str) -> tuple[Hashable, ...]:
    """Changes whenever the configuration or a weight file of the folder is replaced."""
    folder = Path(folder).resolve()
    stats = [(file.name, file.stat()) for file in (folder / "config.json", *weight_files(folder))]
    return (str(folder), *((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats))


def _header(file: Path) -> dict[str, _Entry]:
    """The table at the head of a safetensors file: 8 bytes of length, then JSON, then the data."""
    size = file.stat().st_size
    with file.open("rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
        if size < 8 or length > size - 8:
            raise ValueError(f"{file} is cut off or no safetensors file: it ends inside its header ({size} bytes)")
        try:
            table: dict[str, Any] = json.loads(handle.read(length))
        except ValueError as error:
            raise ValueError(f"{file} is no safetensors file: its header does not parse ({error})") from error
    table.pop("__metadata__", None)
    entries = {}
    for name, tensor in table.items():
        start, stop = (8 + length + offset for offset in tensor["data_offsets"])
        entries[name] = _Entry(file, start, stop, tensor["dtype"], tuple(tensor["shape"]))
    end = max((entry.stop for entry in entries.values()), default=0)
    if end > size:
        raise ValueError(f"{file} is cut off: its header describes {end} bytes and it holds {size}; fetch it again")
    return entries


def _fill(handle: BinaryIO, part: torch.Tensor, entry: _Entry, name: str) -> None:
    if entry.stop - entry.start != math.prod(entry.shape) * _DTYPES[entry.dtype].itemsize:
        raise ValueError(f"parameter {name} of {entry.file} has another size than its shape {list(entry.shape)} says")
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
