"""What a newcomer does: `kvscope lab`, then Run All on the quickstart, with every other host refused."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time

import nbformat
import playwright.sync_api
import pytest
from lab_pages import Lab, free_port, our_errors

STARTING_SECONDS = 90


@pytest.fixture
def newcomer(browser, shots, tmp_path):
    """The JupyterLab that the command starts, in a home of its own."""
    environment = os.environ | {
        "JUPYTER_DATA_DIR": str(tmp_path / "data"),
        "JUPYTER_CONFIG_DIR": str(tmp_path / "config"),
    }
    environment.pop("DISPLAY", None)
    command = [sys.executable, "-m", "kvscope", "lab", "first-look", "--port", str(free_port())]
    server = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    said: list[str] = []
    threading.Thread(target=lambda: said.extend(iter(server.stdout.readline, "")), daemon=True).start()
    deadline, address = time.monotonic() + STARTING_SECONDS, None
    while address is None:
        assert server.poll() is None and time.monotonic() < deadline, "".join(said)
        time.sleep(0.2)
        address = re.search(r"http://127\.0\.0\.1:\d+/lab\S*?\?token=(\w+)", "".join(list(said)))
    lab = Lab(tmp_path / "first-look", address[0].split("/lab")[0], address[1], browser, environment)
    yield lab
    for page in lab.pages:
        page.screenshot(path=shots / "quickstart-at-the-end.png")
        page.context.close()
    lab.shut_kernels()
    os.killpg(server.pid, signal.SIGTERM)  # the command and the JupyterLab that it started
    try:
        server.wait(10)
    except subprocess.TimeoutExpired:
        os.killpg(server.pid, signal.SIGKILL)


def test_a_newcomer_runs_all_and_watches(newcomer, shots):
    path = newcomer.folder / "00_quickstart.ipynb"
    num_cells = sum(cell.cell_type == "code" for cell in nbformat.read(path, as_version=4).cells)
    watched = newcomer.open(path, width=1500, height=1300)
    newcomer.run_all(watched)
    page = watched.page
    page.wait_for_selector("h2 >> text=KV block pool", timeout=120_000)
    pool = page.locator(".bk-Figure").nth(1).locator("canvas").first
    notebook = page.locator(".jp-WindowedPanel-outer").first
    texts, pools = set(), set()

    def watch(seconds: float, enough: int) -> None:
        deadline = time.monotonic() + seconds
        while (len(pools) < enough or len(texts) < enough) and time.monotonic() < deadline:
            try:
                texts.add(page.locator(".reqs").first.inner_text(timeout=1000))
                pools.add(pool.evaluate("(canvas) => canvas.toDataURL()", timeout=1000))
            except playwright.sync_api.TimeoutError:
                # Run All has scrolled to the last cell, and JupyterLab drops what is out of sight.
                notebook.evaluate("(panel) => panel.scrollTo(0, 0)")
            page.wait_for_timeout(100)

    watch(15, enough=4)
    page.screenshot(path=shots / "quickstart-running.png")
    notebook.evaluate("(panel) => panel.scrollTo(0, 1e6)")
    page.wait_for_selector(f".jp-InputPrompt >> text=[{num_cells}]:", timeout=90_000)
    notebook.evaluate("(panel) => panel.scrollTo(0, 0)")
    page.click("text=Submit request", timeout=30_000)
    page.click("text=Start traffic")  # on a fast machine the cells and one answer are over within a second or two
    watch(60, enough=4)
    page.click("text=Stop traffic")
    assert len(pools) >= 4 and len(texts) >= 4, f"{len(pools)} pictures of the pool, {len(texts)} of the text"
    page.locator(".jp-MarkdownCell").first.click()  # the keys are the notebook's again
    newcomer.save(watched)
    saved = nbformat.read(path, as_version=4)
    kinds = [output.output_type for cell in saved.cells if cell.cell_type == "code" for output in cell.outputs]
    assert kinds and "error" not in kinds
    assert "Paris" in str(saved)
    assert our_errors(watched) == []
    assert watched.refused == []
