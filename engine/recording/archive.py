"""One file of named arrays and one JSON page: a zip, so that any tool can look inside, with no pickle in it.

Each column of an array is a member of its own, its bytes sorted by significance before they are deflated: neighbours in a
column differ little, so most of them become runs. Reading is bounded before anything is allocated, since anybody may have
written the file.
"""

from __future__ import annotations

import json
import os
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

MAX_BYTES = 256 << 20  # of the whole content, unpacked
PAGE = "recording.json"
_MEMBERS = frozenset({zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED})


class Damaged(ValueError):
    """What the file holds contradicts itself."""


def write(path: Path, page: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    """As a whole or not at all: what was at `path` stays until the new file is complete. Arrays of one or two dimensions."""
    shapes = {name: [array.dtype.str, *array.shape] for name, array in arrays.items()}
    beside = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with zipfile.ZipFile(beside, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as file:
            file.writestr(PAGE, json.dumps(page | {"arrays": shapes}, separators=(",", ":")))
            for name, array in arrays.items():
                for i, column in enumerate(array.T if array.ndim == 2 else [array]):
                    file.writestr(f"{name}/{i}", _sorted_bytes(np.ascontiguousarray(column)))
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def read(path: Path, kind: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """(page, arrays) of a file whose page says that it is a `kind`. Raises Damaged, FileNotFoundError, and ValueError for a
    file of another kind."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file")
    try:
        file = zipfile.ZipFile(path)
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
        raise ValueError(f"{path}: is no {kind}") from None
    with file:
        if PAGE not in file.namelist():
            raise ValueError(f"{path}: is no {kind}")
        if sum(member.file_size for member in file.infolist()) > MAX_BYTES:
            raise ValueError(f"{path}: holds more than {MAX_BYTES >> 20} MB, which no {kind} does")
        page = _page(_member(file, PAGE), path, kind)
        arrays, expected = {}, page.get("arrays")
        if not isinstance(expected, dict):
            raise Damaged("it does not list its arrays")
        for name, shape in expected.items():
            arrays[name] = _array(file, name, shape)
    return page, arrays


def _page(text: bytes, path: Path, kind: str) -> dict[str, Any]:
    try:
        page = json.loads(text)
    except (ValueError, RecursionError):
        raise Damaged("its first page cannot be read") from None
    if not isinstance(page, dict) or page.get("kind") != kind:
        raise ValueError(f"{path}: is no {kind}")
    return page


def _member(file: zipfile.ZipFile, name: str) -> bytes:
    try:
        member = file.getinfo(name)
        if member.compress_type not in _MEMBERS:
            raise Damaged(f"{name} is packed in a way that kvscope does not use")
        with file.open(member) as stream:
            return stream.read(member.file_size)
    except (KeyError, zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError, NotImplementedError):
        raise Damaged(f"{name} is missing or cut off") from None


def _array(file: zipfile.ZipFile, name: str, shape: Any) -> np.ndarray:
    dtype, rows, columns = _shape(name, shape)
    if rows * max(1, columns) * dtype.itemsize > MAX_BYTES:
        raise Damaged(f"{name} claims {rows} rows")
    array = np.empty((rows, max(1, columns)), dtype)
    for i in range(max(1, columns)):
        data = _member(file, f"{name}/{i}")
        if len(data) != rows * dtype.itemsize:
            raise Damaged(f"{name} has {len(data)} bytes in column {i}, not {rows * dtype.itemsize}")
        array[:, i] = np.frombuffer(data, np.uint8).reshape(dtype.itemsize, rows).T.copy().view(dtype)[:, 0]
    return array if columns else array[:, 0]


def _shape(name: str, shape: Any) -> tuple[np.dtype, int, int]:
    """(dtype, rows, columns; 0 of an array with one dimension)."""
    try:
        dtype, *dimensions = shape
        plain = np.dtype(dtype)
        rows, columns = (*dimensions, 0) if len(dimensions) == 1 else dimensions
    except (TypeError, ValueError, SyntaxError):
        raise Damaged(f"{name} has no readable shape") from None
    numbers = type(rows) is int and type(columns) is int and rows >= 0 and 0 <= columns <= 64
    if not numbers or plain.kind not in "iuf" or plain.itemsize > 8:
        raise Damaged(f"{name} has no readable shape")
    return plain, rows, columns


def _sorted_bytes(column: np.ndarray) -> bytes:
    return column.view(np.uint8).reshape(len(column), column.itemsize).T.tobytes()
