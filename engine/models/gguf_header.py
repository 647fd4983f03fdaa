"""Is the header of a .gguf file possible? Asked before the gguf library reads it, which believes every length it finds.

    magic, version | counts of tensors and keys | key, kind, value … | tensor: name, dims, type, offset … | data

The walk reads no value and takes no memory. Each length is held against what is left of the file, so it ends after at
most as many rounds as the file has bytes, whatever the counts say.
"""

from __future__ import annotations

from pathlib import Path

_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # by the number of the kind
_STRING, _ARRAY = 8, 9
MOST_DIMS = 4


class GGUFError(ValueError):
    """A .gguf file that cannot be used; the message is a sentence that names the file and the reason."""


def check_header(path: Path) -> None:
    """Raises GGUFError where the file is none, ends inside its header, or describes what does not fit into it."""
    with open(path, "rb") as file:
        magic = file.read(4)
        if magic != b"GGUF":
            raise GGUFError(f"{path.name} is not a GGUF file: it begins with {magic!r}, not b'GGUF'.")
        _Walk(path, file).header()


class _Walk:
    def __init__(self, path: Path, file):
        self._path, self._file = path, file
        self._left = path.stat().st_size - 4

    def header(self) -> None:
        self._skip(4)
        num_tensors, num_keys = self._number(8), self._number(8)
        for _ in range(num_keys):
            self._string()
            self._value(self._number(4))
        for _ in range(num_tensors):
            self._string()
            num_dims = self._number(4)
            if num_dims > MOST_DIMS:
                raise self._damaged(f"describes a tensor of {num_dims} dimensions")
            self._skip(8 * num_dims + 4 + 8)

    def _value(self, kind: int) -> None:
        if kind == _STRING:
            self._string()
        elif kind == _ARRAY:
            kind, count = self._number(4), self._number(8)
            if kind != _STRING:
                self._skip(count * self._scalar_bytes(kind))
                return
            for _ in range(count):
                self._string()
        else:
            self._skip(self._scalar_bytes(kind))

    def _scalar_bytes(self, kind: int) -> int:
        if kind not in _SCALAR_BYTES:
            raise self._damaged(f"holds a value of kind {kind}, which is none that is read there")
        return _SCALAR_BYTES[kind]

    def _string(self) -> None:
        self._skip(self._number(8))

    def _number(self, num_bytes: int) -> int:
        self._take(num_bytes)
        return int.from_bytes(self._file.read(num_bytes), "little")

    def _skip(self, num_bytes: int) -> None:
        self._take(num_bytes)
        self._file.seek(num_bytes, 1)

    def _take(self, num_bytes: int) -> None:
        if num_bytes > self._left:
            raise self._damaged(f"describes {num_bytes:,} bytes where {self._left:,} are left")
        self._left -= num_bytes

    def _damaged(self, how: str) -> GGUFError:
        return GGUFError(f"{self._path.name} is cut short or damaged: its header {how}.")
