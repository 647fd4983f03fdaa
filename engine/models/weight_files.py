"""The safetensors files of a model folder: which they are, and what their headers say. Reads no weight, needs no torch.

A file is 8 bytes of length, a JSON table {name: dtype, shape, offsets}, then the data; every tensor is one run of bytes.
Headers come from anywhere, so nothing in one is believed before it has been held against the size of the file: a table
that lies about lengths, offsets or shapes is one sentence, and no memory is taken for it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INDEX = "model.safetensors.index.json"
MOST_HEADER_BYTES = 100_000_000  # the format's own limit
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a tensor lies, row-major."""

    file: Path
    start: int  # byte in the file
    stop: int
    dtype: str  # safetensors' name: "BF16"
    shape: tuple[int, ...]


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder: the shards that its index names, or model.safetensors, or the only one.

    Raises ValueError, saying what is there instead, where that rule finds none; a pickle is never read.
    """
    index, single = folder / INDEX, folder / "model.safetensors"
    if index.is_file():
        return [_shard(folder, name) for name in _shard_names(index)]
    if single.is_file():
        return [single]
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return found
    if found:
        raise ValueError(
            f"{folder} holds {len(found)} safetensors files and no {INDEX} that says how they belong together"
        )
    pickles = sorted(path.name for path in folder.glob("*") if path.suffix in _PICKLES)
    if pickles:
        raise ValueError(
            f"{folder} holds {pickles[0]} and no safetensors: loading a pickle can run code from the file, "
            f"so it is refused; convert the model with save_pretrained()"
        )
    raise ValueError(f"{folder} holds no weights: it needs model.safetensors, shards with {INDEX}, or one .gguf file")


def _shard_names(index: Path) -> list[str]:
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{index} is not an index of shards: {error!r}") from error
    if not names:
        raise ValueError(f"{index} is not an index of shards: it names none")
    return names


def _shard(folder: Path, name: str) -> Path:
    if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
        raise ValueError(f"{folder / INDEX} names the shard {name!r}: must be a .safetensors file of the same folder")
    if not (folder / name).is_file():
        raise ValueError(f"{INDEX} names the shard {name}, which is not in {folder}; fetch the model again")
    return folder / name


def fingerprint(folder: Path) -> tuple[Hashable, ...]:
    """Changes whenever the configuration or a weight file of the folder is replaced."""
    folder = folder.resolve()
    stats = [(file.name, file.stat()) for file in (folder / "config.json", *weight_files(folder))]
    return (str(folder), *((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats))


def read_header(file: Path) -> dict[str, Entry]:
    """{name: where it lies} of one file. Raises ValueError, naming the file and the tensor, where it cannot be true."""
    size = file.stat().st_size
    with file.open("rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
        if size < 8 or length > size - 8:
            raise ValueError(f"{file} is cut off or no safetensors file: it ends inside its header ({size} bytes)")
        if length > MOST_HEADER_BYTES:
            raise ValueError(f"{file} has a header of {length:,} bytes: at most {MOST_HEADER_BYTES:,} are read")
        try:
            table = json.loads(handle.read(length))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{file} is no safetensors file: its header does not parse ({error})") from error
    if not isinstance(table, dict):
        raise ValueError(f"{file} is no safetensors file: its header is no table of tensors")
    table.pop("__metadata__", None)
    entries = {name: _entry(file, 8 + length, name, tensor) for name, tensor in table.items()}
    last = None
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if last is not None and entry.start < entries[last].stop:
            raise ValueError(f"{file} is damaged: its header puts {last} and {name} over each other")
        last = name
    end = max((entry.stop for entry in entries.values()), default=0)
    if end > size:
        raise ValueError(f"{file} is cut off: its header describes {end} bytes and it holds {size}; fetch it again")
    return entries


def _entry(file: Path, origin: int, name: str, tensor: Any) -> Entry:
    try:
        dtype, shape, (start, stop) = tensor["dtype"], tensor["shape"], tensor["data_offsets"]
        plain = all(type(number) is int and number >= 0 for number in (*shape, start, stop))
    except (TypeError, KeyError, ValueError):
        plain = False
    if not plain or not isinstance(dtype, str) or stop < start:
        raise ValueError(
            f"{file} is damaged: its header describes {name} as {str(tensor)[:200]}, which is no tensor with a dtype, a "
            f"shape and two offsets"
        )
    if dtype in ITEM_BYTES and stop - start != math.prod(shape) * ITEM_BYTES[dtype]:
        raise ValueError(
            f"{file} is damaged: its header gives {name} {stop - start} bytes, and {dtype} {shape} takes "
            f"{math.prod(shape) * ITEM_BYTES[dtype]}"
        )
    return Entry(file, origin + start, origin + stop, dtype, tuple(shape))


def stated_config(folder: Path) -> dict[str, Any]:
    """config.json as it stands. Raises ValueError where it is no table."""
    file = folder / "config.json"
    try:
        config = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"config.json in {folder} does not parse: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"config.json in {folder} is no table of options")
    return config


def stored_dtype(folder: Path) -> str:
    """The dtype that config.json states, else that of most tensors of the first weights file: "bfloat16"."""
    config = stated_config(folder)
    if stated := config.get("dtype") or config.get("torch_dtype"):
        return str(stated)
    dtypes = [entry.dtype for entry in read_header(weight_files(folder)[0]).values()]
    most = max(sorted(set(dtypes)), key=dtypes.count, default="F32")
    return {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}.get(most, most)
