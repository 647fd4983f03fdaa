"""One file over HTTP, whole or not at all: resumed where it was cut, and kept only if its checksum is right.

A download lives beside its destination as `<name>.part` until its sha256 has been checked; then it is renamed in one
step. A cut connection is taken up again with a range request, in the same process or in the next one. A file whose
checksum is wrong is deleted and said so; it is never used. Callers hold a lock around `fetch` (see `locked`), so that
two processes after one file wait for each other instead of writing into each other's part.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import hashlib
import http.client
import os
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

from filelock import FileLock, Timeout
from kvscope import __version__
from tqdm.auto import tqdm

CHUNK_BYTES = 1 << 20
TIMEOUT_SECONDS = 20.0  # without a single byte, not for the whole file
ATTEMPTS = 4  # connections that brought nothing new before a download is given up


class FetchError(RuntimeError):
    """A file could not be had; the message is a sentence that says from where and why."""


@contextlib.contextmanager
def locked(path: Path, waiting_for: str) -> Iterator[None]:
    """Hold the file lock `path`; says once, on stderr, when another process holds it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path)
        lock.acquire(timeout=1.0)
    except Timeout:
        tqdm.write(f"kvscope: another process is at work on {waiting_for}; waiting for it", file=sys.stderr)
        lock.acquire()
    except OSError as error:
        raise ValueError(f"kvscope's cache {path.parent} cannot be written ({error.strerror}).") from error
    try:
        yield
    finally:
        lock.release()


def sha256_of(path: Path, progress: Callable[[int], object] | None = None) -> str:
    """Hex sha256 of a file, read in pieces."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(4 * CHUNK_BYTES):
            digest.update(piece)
            if progress is not None:
                progress(len(piece))
    return digest.hexdigest()


def open_url(url: str, *, headers: dict[str, str] | None = None, timeout: float = TIMEOUT_SECONDS):
    """GET `url` as urllib does it (proxies from the environment); credentials inside the URL become a header."""
    parts = urllib.parse.urlsplit(url)
    sent = {"User-Agent": f"kvscope/{__version__}", **(headers or {})}
    if parts.username is not None:
        plain = f"{urllib.parse.unquote(parts.username)}:{urllib.parse.unquote(parts.password or '')}"
        sent["Authorization"] = "Basic " + base64.b64encode(plain.encode()).decode()
        url = urllib.parse.urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
    return urllib.request.urlopen(urllib.request.Request(url, headers=sent), timeout=timeout)


def without_credentials(url: str) -> str:
    """The URL as it may be shown in a message."""
    parts = urllib.parse.urlsplit(url)
    return urllib.parse.urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def fetch(url: str, destination: Path, *, size: int, sha256: str, progress: bool = True) -> Path:
    """Download `url` to `destination`, resuming `<destination>.part` if it is there.

    Raises FetchError when the connection keeps failing (the part stays, for the next try) or when the file that
    came is not the one that was asked for (the part is deleted; a resumed part is tried once more from zero).
    """
    part = destination.with_name(destination.name + ".part")
    resumed = part.exists() and part.stat().st_size > 0
    for _ in range(2):
        _download(url, part, size, progress)
        found = sha256_of(part)
        if found == sha256:
            os.replace(part, destination)
            return destination
        part.unlink()
        if not resumed:
            break
        resumed = False  # the old part may be what was bad
    raise FetchError(
        f"{without_credentials(url)} is corrupt: its sha256 is {found}, not {sha256}. The download was deleted."
    )


def _download(url: str, part: Path, size: int, progress: bool) -> None:
    """Append to `part` until it has `size` bytes."""
    part.parent.mkdir(parents=True, exist_ok=True)
    have = part.stat().st_size if part.exists() else 0
    if have > size:
        part.unlink()
        have = 0
    bar = tqdm(
        total=size,
        initial=have,
        unit="B",
        unit_scale=True,
        unit_divisor=1000,
        desc=part.name.removesuffix(".part"),
        disable=not progress,
    )
    failures = 0
    with bar:
        while have < size:
            reason, start = "the connection closed early", have
            try:
                have = _append(url, part, have, size, bar)
            except urllib.error.HTTPError as error:
                if error.code < 500 and error.code not in (408, 416, 429):
                    raise FetchError(f"{without_credentials(url)} answered {error.code} {error.reason}.") from error
                if error.code == 416:  # our part does not belong to this file
                    part.unlink(missing_ok=True)
                reason = f"{error.code} {error.reason}"
            except (OSError, http.client.HTTPException) as error:
                if isinstance(error, OSError) and error.filename is not None:
                    raise  # the disk, not the network
                reason = str(error) or type(error).__name__
            have = part.stat().st_size if part.exists() else 0
            bar.n = have
            bar.refresh()
            failures = 0 if have > start else failures + 1
            if failures >= ATTEMPTS:
                raise FetchError(
                    f"{without_credentials(url)} stopped at {have:,} of {size:,} bytes: {reason}. "
                    "What came so far is kept; the next try goes on from there."
                )
            if have < size:
                time.sleep(min(0.25 * 2**failures, 4.0))


def _append(url: str, part: Path, have: int, size: int, bar: tqdm) -> int:
    """One connection: ask for the bytes from `have` on and write what comes."""
    with open_url(url, headers={"Range": f"bytes={have}-"} if have else None) as answer:
        continues = answer.status == 206 and answer.headers.get("Content-Range", "").startswith(f"bytes {have}-")
        if have and not continues:  # a server without ranges sends the file from its start
            have = 0
            bar.reset()
        try:
            with open(part, "ab" if have else "wb") as file:
                while have < size and (piece := answer.read(min(CHUNK_BYTES, size - have))):
                    file.write(piece)
                    have += len(piece)
                    bar.update(len(piece))
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise FetchError(f"{part.parent} is full: {have:,} of {size:,} bytes were written.") from error
            raise
    return have
