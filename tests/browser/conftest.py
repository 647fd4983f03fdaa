"""One JupyterLab and one Chromium a session.

A missing browser skips these tests on a developer's machine and fails them where the environment variable CI is set.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab_pages import CHROMIUM, CHROMIUM_ARGS, Lab, free_port


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


@pytest.fixture(scope="session")
def jupyter(tmp_path_factory) -> Iterator[tuple[Path, str, str, dict[str, str]]]:
    """(folder, address, token, environment) of one JupyterLab that knows nothing of the user's own settings."""
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
        deadline = time.monotonic() + 240  # on a machine with much else to do it takes minutes
        while True:
            try:
                urllib.request.urlopen(f"{url}/api", timeout=1)
                break
            except OSError:
                if server.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError((home / "lab.log").read_text()) from None
                time.sleep(0.2)
        yield folder, url, token, environment
    finally:
        server.terminate()
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            server.kill()


@pytest.fixture
def lab(jupyter, browser, shots, request) -> Iterator[Lab]:
    folder, url, token, environment = jupyter
    lab = Lab(folder, url, token, browser, environment)
    yield lab
    for number, page in enumerate(lab.pages):
        page.screenshot(path=shots / f"{request.node.name}-{number}-at-the-end.png")
        page.context.close()
    lab.shut_kernels()


@pytest.fixture(scope="session")
def shots(tmp_path_factory) -> Path:
    """Where screenshots go: the folder named by KVSCOPE_SHOTS, or a temporary one."""
    folder = Path(os.environ.get("KVSCOPE_SHOTS") or tmp_path_factory.mktemp("shots"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder
