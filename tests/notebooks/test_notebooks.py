"""Every notebook runs from top to bottom in a fresh kernel, within its time, and says what its prose promises."""

from __future__ import annotations

import re
import time
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[2] / "notebooks"
SECONDS = 90
# What the tests make smaller; a person runs the whole.
SHORT = {"01_paged_memory.ipynb": {"NUM_REQUESTS": 14, "POOL_TOKENS": 512}}


def run(name: str, folder: Path):
    notebook = nbformat.read(FOLDER / name, as_version=4)
    for variable, value in SHORT.get(name, {}).items():
        shorten(notebook, variable, value)
    client = NotebookClient(notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(folder)}})
    start = time.monotonic()
    client.execute()
    return notebook, time.monotonic() - start


def shorten(notebook, variable: str, value: int) -> None:
    """Give a variable that is assigned a number at the start of a line, once, another one."""
    changed = 0
    for cell in notebook.cells:
        cell.source, times = re.subn(rf"(?m)^{variable} = [\d_]+", f"{variable} = {value}", cell.source)
        changed += times
    assert changed == 1, variable


def printed(cell) -> str:
    return "".join(
        output["text"] for output in cell.outputs if output.output_type == "stream" and output.name == "stdout"
    )


@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.glob("*.ipynb")))
def test_notebooks_are_stored_without_outputs(name):
    notebook = nbformat.read(FOLDER / name, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code)
    assert notebook.metadata.kernelspec.name == "python3"  # without it JupyterLab asks for a kernel
    assert len(notebook.cells) < 20


def test_quickstart_runs_and_keeps_its_promises(tmp_path):
    notebook, seconds = run("00_quickstart.ipynb", tmp_path)
    assert seconds < SECONDS
    text = {i: printed(cell) for i, cell in enumerate(notebook.cells) if cell.cell_type == "code"}
    joined = "\n".join(text.values())
    assert "Paris" in joined
    assert joined.count("before writing, because") == 3  # four samples, three copies
    cached = [line for line in joined.splitlines() if "prompt tokens came from the cache; first token" in line]
    assert cached[0].startswith("0 of") and not cached[1].startswith("0 of")
    assert "step " in joined and "cancelled" in joined


def test_paged_memory_shows_what_paging_saves(tmp_path):
    notebook, seconds = run("01_paged_memory.ipynb", tmp_path)
    assert seconds < SECONDS
    joined = "\n".join(printed(cell) for cell in notebook.cells if cell.cell_type == "code")
    gain = re.search(r"paging puts (\d+\.\d) times as much", joined)
    assert float(gain[1]) > 1.5
    assert joined.count("by the formula") == 5
    figures = [
        out
        for cell in notebook.cells
        if cell.cell_type == "code"
        for out in cell.outputs
        if "image/svg+xml" in out.get("data", {})
    ]
    assert len(figures) == 2
