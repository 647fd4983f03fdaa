"""One JupyterLab and one Chromium a session; helpers to open a notebook, run it and look at it.

A missing browser skips these tests on a developer's machine and fails them where the environment variable CI is set.
Every request to another host than this machine is refused, so that whatever is shown came without a network.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import nbformat
import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
CHROMIUM_ARGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
# What JupyterLab and Chromium say themselves, with or without kvscope.
NOT_OURS = ("favicon", "ResizeObserver loop", "DevTools", "Permissions policy", "third-party cookie", "/lab/api/news",
            "/api/contents", "No provider for", "preload", "ERR_FAILED", "ERR_BLOCKED_BY_CLIENT", "/api/kernels")  # fmt: skip


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(item.fspath).parent == Path(__file__).parent:
            item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="session")
def browser():
    if CHROMIUM is None:
        message = "Chromium is not installed: apt install chromium"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=CHROMIUM_ARGS)
        yield chromium
        chromium.close()


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


@dataclass
class Lab:
    """A running JupyterLab: `notebook` writes a file, `open` shows it in a page of its own."""

    folder: Path
    url: str
    token: str
    browser: object
    pages: list = field(default_factory=list)

    def notebook(self, name: str, *cells: str) -> Path:
        """A trusted notebook with the kernel named in its metadata (else JupyterLab asks for one)."""
        book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
        book.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
        path = self.folder / name
        nbformat.write(book, path)
        return path

    def open(self, path: Path, **options) -> Watched:
        watched = open_page(self.browser, **options)
        self.pages.append(watched.page)
        # A workspace of its own, so that no page restores the tabs of another.
        workspace = f"auto-{path.stem}-{len(self.pages)}"
        watched.page.goto(f"{self.url}/lab/workspaces/{workspace}/tree/{path.name}?token={self.token}")
        watched.page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=60_000)
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
        import json

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


@pytest.fixture(scope="session")
def jupyter(tmp_path_factory) -> Iterator[tuple[Path, str, str]]:
    """(folder, address, token) of one JupyterLab that knows nothing of the user's own settings."""
    folder = tmp_path_factory.mktemp("notebooks")
    home = tmp_path_factory.mktemp("jupyter-home")
    port, token = free_port(), secrets.token_hex(16)
    news = home / "settings" / "@jupyterlab" / "apputils-extension" / "notification.jupyterlab-settings"
    news.parent.mkdir(parents=True)
    news.write_text('{"fetchNews": "false", "checkForUpdates": false}')
    environment = os.environ | {
        "JUPYTER_CONFIG_DIR": str(home / "config"),
        "JUPYTER_DATA_DIR": str(home / "data"),
        "JUPYTER_RUNTIME_DIR": str(home / "runtime"),
        "JUPYTERLAB_SETTINGS_DIR": str(home / "settings"),
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }
    command = [
        sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ServerApp.ip=127.0.0.1",
        f"--ServerApp.port={port}", "--ServerApp.port_retries=0", f"--IdentityProvider.token={token}",
        f"--ServerApp.root_dir={folder}", "--ServerApp.log_level=ERROR",
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    ]  # fmt: skip
    log = (home / "lab.log").open("w")
    server = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(f"{url}/api", timeout=1)
                break
            except OSError:
                if server.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError((home / "lab.log").read_text()) from None
                time.sleep(0.2)
        yield folder, url, token
    finally:
        server.terminate()
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            server.kill()


@pytest.fixture
def lab(jupyter, browser) -> Iterator[Lab]:
    folder, url, token = jupyter
    lab = Lab(folder, url, token, browser)
    yield lab
    for page in lab.pages:
        page.context.close()
    lab.shut_kernels()


@pytest.fixture(scope="session")
def shots(tmp_path_factory) -> Path:
    """Where screenshots go: the folder named by KVSCOPE_SHOTS, or a temporary one."""
    folder = Path(os.environ.get("KVSCOPE_SHOTS") or tmp_path_factory.mktemp("shots"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder
