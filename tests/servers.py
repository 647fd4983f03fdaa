"""A package index and a model hub on 127.0.0.1, with every fault that a network has.

`Server` answers paths from a table and keeps a log of (method, path, Range header). A file may be cut after some bytes
(once or always), be served without ranges, be corrupt, or come late.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Reply:
    body: bytes
    kind: str = "application/octet-stream"
    headers: dict[str, str] = field(default_factory=dict)
    status: int = 200
    delay: float = 0.0
    ranges: bool = True
    cuts: list[int] = field(default_factory=list)  # one connection each is closed after so many bytes


class Server:
    def __init__(self):
        self.replies: dict[str, Reply] = {}
        self.log: list[tuple[str, str, str | None]] = []
        self.url = ""

    def requests(self, end: str = "", method: str = "GET") -> list[tuple[str, str | None]]:
        """(path, Range) of the requests so far whose path ends so."""
        return [(path, span) for used, path, span in self.log if used == method and path.endswith(end)]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    owner: Server

    def log_message(self, *arguments):
        pass

    def do_HEAD(self):
        self._answer(send=False)

    def do_GET(self):
        self._answer(send=True)

    def _answer(self, *, send: bool) -> None:
        path, span = self.path.partition("?")[0], self.headers.get("Range")
        self.owner.log.append((self.command, path, span))
        reply = self.owner.replies.get(path, Reply(b"not here", status=404))
        time.sleep(reply.delay)
        body, status, headers = reply.body, reply.status, dict(reply.headers)
        if span and reply.ranges and status == 200:
            start = int(span.removeprefix("bytes=").partition("-")[0])
            if start >= len(body):
                status, body = 416, b""
            else:
                headers["Content-Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
                status, body = 206, body[start:]
        self.send_response(status)
        for name, value in {"Content-Type": reply.kind, "Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if not send:
            return
        try:
            if reply.cuts:
                self.wfile.write(body[: reply.cuts.pop(0)])
                self.close_connection = True
            else:
                self.wfile.write(body)
        except OSError:
            self.close_connection = True


@contextmanager
def serving() -> Iterator[Server]:
    owner = Server()
    handler = type("Handler", (_Handler,), {"owner": owner})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        owner.url = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            yield owner
        finally:
            server.shutdown()
            thread.join()


def add_wheel(server: Server, package: str, filename: str, body: bytes, **options) -> Reply:
    """List `filename` on the index at /simple and serve it."""
    page = {
        "meta": {"api-version": "1.0"},
        "name": package,
        "files": [{"filename": filename, "url": f"/files/{filename}", "hashes": {}}],
    }
    server.replies[f"/simple/{package}/"] = Reply(json.dumps(page).encode(), "application/vnd.pypi.simple.v1+json")
    server.replies[f"/files/{filename}"] = reply = Reply(body, **options)
    return reply


COMMIT = "0123456789abcdef0123456789abcdef01234567"


def add_model(server: Server, repo: str, files: dict[str, bytes], **options) -> None:
    """Serve a model as the Hugging Face hub does."""
    info = {"id": repo, "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
    tree = [{"type": "file", "path": name, "size": len(body), "oid": _oid(body)} for name, body in files.items()]
    for path in (f"/api/models/{repo}", *(f"/api/models/{repo}/revision/{name}" for name in ("main", COMMIT))):
        server.replies[path] = Reply(json.dumps(info).encode(), "application/json", **options)
    server.replies[f"/api/models/{repo}/tree/{COMMIT}"] = Reply(json.dumps(tree).encode(), "application/json")
    for name, body in files.items():
        headers = {"ETag": f'"{_oid(body)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        server.replies[f"/{repo}/resolve/{COMMIT}/{name}"] = Reply(body, headers=headers)


def _oid(body: bytes) -> str:
    return hashlib.sha1(body).hexdigest()
