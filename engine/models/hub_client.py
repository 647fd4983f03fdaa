"""The Hugging Face hub: is it there, and the files of one model, no more than are needed.

A hub counts as there only when it describes the model within 3 seconds: a proxy's error page, a captive portal or a
name server that never answers are not a hub. With HF_HUB_OFFLINE nothing is asked and its local cache is used.
Fetched are the config, the tokenizer and the safetensors; never pickled weights, never code.
"""

from __future__ import annotations

import contextlib
import fnmatch
import logging
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path

from .weight_files import weight_files

ANSWER_SECONDS = 3.0
_PLAIN_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja",
    "chat_template.json", "model.safetensors.index.json",
)  # fmt: skip
_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/)?[A-Za-z0-9_][\w.-]*")
_LONGEST_NAME = 96  # the hub's own limit


class HubUnavailable(RuntimeError):
    """The hub did not answer in time, or has no such model, or not in a form that is safe to read."""


def download_snapshot(repo: str, *, endpoint: str, progress: bool, only: str | None = None) -> tuple[Path, str]:
    """(folder, commit) of `repo` in the hub's local cache, fetched if need be; of one file, if `only` names it."""
    if "/" not in repo or not is_hub_name(repo):
        raise HubUnavailable(f"{shortened(repo)} is not a Hugging Face id (org/name).")
    if is_offline():
        return _local(repo, only, "HF_HUB_OFFLINE is set")
    try:
        files = _describe(repo, endpoint)
    except HubUnavailable as error:
        return _local(repo, only, str(error))
    wanted = [only] if only is not None else _wanted(repo, files)
    if only is not None and only not in files:
        raise HubUnavailable(f"{repo} on {endpoint} has no file {only}.")
    from huggingface_hub import snapshot_download

    with _quiet(progress):
        try:
            folder = snapshot_download(repo, allow_patterns=wanted, endpoint=endpoint)  # by branch: offline finds it so
        except Exception as error:
            raise HubUnavailable(f"{repo} could not be downloaded from {endpoint}: {first_line(error)}") from error
    missing = [name for name in wanted if not (Path(folder) / name).exists()]
    if missing:
        raise HubUnavailable(f"{repo} from {endpoint} lacks {missing[0]} after its download.")
    return Path(folder), Path(folder).name


def is_hub_name(text: str) -> bool:
    """Whether a repository of the hub can be called so: org/name, or a bare name as its oldest ones have."""
    return len(text) <= _LONGEST_NAME and _NAME.fullmatch(text) is not None


def shortened(text: str) -> str:
    """What a user wrote, quoted, no longer than a message can bear."""
    return repr(text if len(text) <= 120 else text[:117] + "…")


def is_offline() -> bool:
    """HF_HUB_OFFLINE (or TRANSFORMERS_OFFLINE), read now and as the hub's own library reads it."""
    asked = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return asked.upper() in ("1", "ON", "YES", "TRUE")


def _describe(repo: str, endpoint: str) -> list[str]:
    """File names of the model, within ANSWER_SECONDS of the wall clock.

    In a thread, because a timeout of a socket covers each wait alone: a slow name server or a trickle of bytes would
    go on for minutes.
    """
    from huggingface_hub import HfApi

    answer: list = []

    def ask() -> None:
        try:
            info = HfApi(endpoint=endpoint).model_info(repo, timeout=ANSWER_SECONDS)
            answer.append((info.sha, [file.rfilename for file in info.siblings or []]))
        except Exception as error:
            answer.append(error)

    thread = threading.Thread(target=ask, name="kvscope-hub", daemon=True)
    thread.start()
    thread.join(ANSWER_SECONDS)
    if not answer:
        raise HubUnavailable(f"{endpoint} did not answer within {ANSWER_SECONDS:g} s.")
    if isinstance(answer[0], Exception):
        raise HubUnavailable(f"{endpoint} gave no answer about {repo}: {first_line(answer[0])}")
    commit, files = answer[0]
    if not commit or not files:
        raise HubUnavailable(f"{endpoint} answered, but not with a description of {repo}.")
    return files


def _wanted(repo: str, files: list[str]) -> list[str]:
    """Exactly the files to fetch out of a model's list."""
    if "config.json" not in files:
        ggufs = [name for name in files if name.endswith(".gguf")]
        if ggufs:
            raise HubUnavailable(f"{repo} holds GGUF files; name one of them: {repo}/{ggufs[0]}")
        raise HubUnavailable(f"{repo} has no config.json, so it is not a model that transformers can describe.")
    if "model.safetensors.index.json" in files:
        weights = fnmatch.filter(files, "model-*-of-*.safetensors")
    elif "model.safetensors" in files:
        weights = ["model.safetensors"]
    else:
        weights = [
            name for name in files if name.endswith(".safetensors") and "/" not in name and "adapter" not in name
        ]
    if not weights:
        raise HubUnavailable(f"{repo} has no safetensors weights; kvscope does not read pickled ones.")
    return [name for name in files if name in _PLAIN_FILES] + weights


def _local(repo: str, only: str | None, why: str) -> tuple[Path, str]:
    """The model as the hub's local cache holds it, complete, or HubUnavailable with `why` and this."""
    from huggingface_hub import try_to_load_from_cache

    # by a file, because the library calls a snapshot whole only when it holds what we never fetch
    found = try_to_load_from_cache(repo, only or "config.json")
    if not isinstance(found, str):
        raise HubUnavailable(f"{why.rstrip('.')}, and the hub's local cache does not hold {repo}.")
    folder = Path(found).parent
    if only is None and not _weights_complete(folder):
        raise HubUnavailable(f"{why.rstrip('.')}, and the hub's local cache holds only a part of {repo}.")
    return folder, folder.name


def _weights_complete(folder: Path) -> bool:
    try:
        return bool(weight_files(folder))
    except ValueError:
        return False


@contextlib.contextmanager
def _quiet(progress: bool) -> Iterator[None]:
    """Keep the hub's bars only where progress is wanted, and its advice (tokens, symlinks) out of the way."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    logger, was_disabled = logging.getLogger("huggingface_hub"), are_progress_bars_disabled()
    level = logger.level
    logger.setLevel(logging.ERROR)
    if not progress:
        disable_progress_bars()
    try:
        yield
    finally:
        logger.setLevel(level)
        if not progress and not was_disabled:
            enable_progress_bars()


def first_line(error: BaseException) -> str:
    """What a library says first, without its full stop: the rest of such a message is advice about the library."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__).rstrip(".")
