"""Makes docs/workbench.png: JupyterLab in Chromium, the default model, a full pool at a step worth looking at.

.venv/bin/python docs/picture.py
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "tests"), str(HERE.parent / "tests" / "browser")]

from lab_pages import CHROMIUM, CHROMIUM_ARGS, Lab, free_port  # noqa: E402
from playwright.sync_api import sync_playwright  # noqa: E402

OPEN = """from kvscope import Workbench

wb = Workbench("default", num_blocks=128)
wb"""
LOAD = """wb.pause()
wb.run("shared-prefix"), wb.run("crowd")
wb.ask("Write the first line of a story about a lighthouse.", n=4, temperature=0.9, seed=7, max_tokens=64)
while not any("copied block" in line for line in wb.explain()):
    wb.step()
wb.step(12)
wb.ask("Name the colours of the rainbow.", n=3, temperature=0.9, seed=3, max_tokens=64)
wb.step(2);"""


def main() -> None:
    folder, port = Path(tempfile.mkdtemp()), free_port()
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--port={port}",
               "--IdentityProvider.token=picture", f"--ServerApp.root_dir={folder}"]  # fmt: skip
    news = folder / ".settings" / "@jupyterlab" / "apputils-extension" / "notification.jupyterlab-settings"
    news.parent.mkdir(parents=True)
    news.write_text('{"fetchNews": "false"}')  # else JupyterLab asks in the picture whether it may fetch them
    environment = os.environ | {"JUPYTERLAB_SETTINGS_DIR": str(folder / ".settings")}
    server = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        take(folder, port, server)
    finally:
        server.terminate()


def take(folder: Path, port: int, server: subprocess.Popen) -> None:
    while not re.search(r"/lab\?token=", server.stdout.readline()):
        pass
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=CHROMIUM_ARGS)
        lab = Lab(folder, f"http://127.0.0.1:{port}", "picture", browser, dict(os.environ))
        watched = lab.open(lab.notebook("workbench.ipynb", OPEN, LOAD), width=1560, height=1500)
        page = watched.page
        page.keyboard.press("Control+b")  # the file browser away
        lab.wait_kernel(watched)
        lab.run_cell(watched, 0)
        page.wait_for_selector("h2 >> text=KV block pool", timeout=120_000)
        lab.run_cell(watched, 1)
        page.wait_for_selector(".jp-InputPrompt >> text=[2]:", timeout=120_000)
        page.locator(".jp-WindowedPanel-outer").first.evaluate("(panel) => panel.scrollTo(0, 0)")
        time.sleep(4)
        page.screenshot(path=HERE / "workbench.png")
        lab.shut_kernels()
        browser.close()


if __name__ == "__main__":
    main()
