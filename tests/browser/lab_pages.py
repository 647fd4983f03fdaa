"""A running JupyterLab and its pages as the browser tests drive them.

Every request to another host than this machine is refused, so that whatever is shown came without a network.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import nbformat

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
CHROMIUM_ARGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
# What JupyterLab and Chromium say themselves, with or without kvscope.
NOT_OURS = ("favicon", "ResizeObserver loop", "DevTools", "Permissions policy", "third-party cookie", "/lab/api/news",
            "/api/contents", "No provider for", "preload", "ERR_FAILED", "ERR_BLOCKED_BY_CLIENT", "/api/kernels")  # fmt: skip


@dataclass
class Watched:
    """A page that refuses other hosts and remembers what went wrong in it."""

    page: object
    errors: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


def open_page(browser, width: int = 1300, height: int = 1000, color_scheme: str = "light") -> Watched:
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=color_scheme)
    page = context.new_page()
    watched = Watched(page)

    def route(route):
        if "127.0.0.1" in route.request.url or route.request.url.startswith(("data:", "blob:")):
            return route.continue_()
        watched.refused.append(route.request.url)
        return route.abort()

    page.route("**/*", route)
    page.on("pageerror", lambda error: watched.errors.append(str(error)))
    page.on("console", lambda m: watched.errors.append(m.text) if m.type == "error" else None)
    return watched


def our_errors(watched: Watched) -> list[str]:
    return [text for text in watched.errors if not any(known in text for known in NOT_OURS)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def served(engine) -> Iterator[str]:
    """The address of the app on an engine, which is closed with it."""
    from kvscope.workbench.app import serve

    port = free_port()
    app = serve(engine, port=port, show=False, threaded=True)
    yield f"http://127.0.0.1:{port}"
    app.close()
    engine.close()


@dataclass
class Lab:
    """A running JupyterLab: `notebook` writes a file, `open` shows it in a page of its own."""

    folder: Path
    url: str
    token: str
    browser: object
    environment: dict[str, str]
    pages: list = field(default_factory=list)

    def notebook(self, name: str, *cells: str) -> Path:
        """A trusted notebook with the kernel named in its metadata (else JupyterLab asks for one)."""
        book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
        book.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
        path = self.folder / name
        nbformat.write(book, path)
        return path

    def open(self, path: Path, *, dialog: str = "", **options) -> Watched:
        """Show a notebook; `dialog` chooses that kernel in the dialog of a notebook whose kernel does not exist."""
        if dialog:
            book = nbformat.read(path, 4)
            book.metadata.kernelspec = {"name": "gone", "display_name": "Gone", "language": "gone"}
            book.metadata.pop("language_info", None)
            nbformat.write(book, path)
            subprocess.run([sys.executable, "-m", "jupyter", "trust", str(path)], env=self.environment, check=True)
        watched = open_page(self.browser, **options)
        self.pages.append(watched.page)
        # A workspace of its own, so that no page restores the tabs of another.
        workspace = f"auto-{path.stem}-{len(self.pages)}"
        watched.page.goto(f"{self.url}/lab/workspaces/{workspace}/tree/{path.name}?token={self.token}")
        watched.page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=60_000)
        if dialog:
            watched.page.wait_for_selector(".jp-Dialog select", timeout=30_000)
            watched.page.select_option(".jp-Dialog select", label=dialog)
            watched.page.click(".jp-Dialog .jp-mod-accept")
        return watched

    def wait_kernel(self, watched: Watched) -> None:
        watched.page.wait_for_selector("#jp-main-statusbar >> text=/ipykernel.* Idle/", timeout=60_000)

    def run_all(self, watched: Watched) -> None:
        self.wait_kernel(watched)
        watched.page.click("text=Run >> nth=0")
        watched.page.click(".lm-Menu-itemLabel >> text='Run All Cells'")

    def run_cell(self, watched: Watched, index: int) -> None:
        watched.page.locator(".jp-Notebook .jp-CodeCell").nth(index).locator(".cm-content").click()
        watched.page.keyboard.press("Control+Enter")

    def save(self, watched: Watched) -> None:
        watched.page.keyboard.press("Escape")
        watched.page.keyboard.press("Control+s")
        watched.page.wait_for_timeout(800)

    def kernels(self) -> list[dict]:
        request = urllib.request.Request(f"{self.url}/api/kernels", headers={"Authorization": f"token {self.token}"})
        return json.load(urllib.request.urlopen(request))

    def shut_kernels(self) -> None:
        for kernel in self.kernels():
            request = urllib.request.Request(
                f"{self.url}/api/kernels/{kernel['id']}",
                headers={"Authorization": f"token {self.token}"},
                method="DELETE",
            )
            urllib.request.urlopen(request)
