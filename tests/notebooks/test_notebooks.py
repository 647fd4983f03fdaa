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
SHORT = {
    "01_paged_memory.ipynb": {"NUM_REQUESTS": 14, "POOL_TOKENS": 512},
    "02_sharing_and_copy_on_write.ipynb": {"NEW_TOKENS": 8},
    "03_continuous_batching.ipynb": {"NUM_REQUESTS": 8, "MEAN_TOKENS": 12, "SEATS": 4},
    "04_prefix_caching.ipynb": {"NUM_USERS": 3, "NUM_TURNS": 3, "SYSTEM_TOKENS": 300, "NEW_TOKENS": 8},
    "05_preemption.ipynb": {"NUM_REQUESTS": 6, "NEW_TOKENS": 40, "POOL_TOKENS": 320},
    "06_prefill_decode_roofline.ipynb": {"MOST_TOKENS": 8, "REPEATS": 1, "ROWS": 2, "MOST_CONTEXT": 128},
}


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


def words(notebook) -> str:
    return "\n".join(printed(cell) for cell in notebook.cells if cell.cell_type == "code")


def num_figures(notebook) -> int:
    outputs = [out for cell in notebook.cells if cell.cell_type == "code" for out in cell.outputs]
    return sum("image/svg+xml" in out.get("data", {}) for out in outputs)


def test_paged_memory_shows_what_paging_saves(tmp_path):
    notebook, seconds = run("01_paged_memory.ipynb", tmp_path)
    assert seconds < SECONDS
    gain = re.search(r"paging puts (\d+\.\d) times as much", words(notebook))
    assert float(gain[1]) > 1.5
    assert words(notebook).count("by the formula") == 5
    assert num_figures(notebook) == 2


def test_samples_and_beams_share_blocks_and_copy_when_they_write(tmp_path):
    notebook, seconds = run("02_sharing_and_copy_on_write.ipynb", tmp_path)
    assert seconds < SECONDS
    assert "3 copies, of 24 tokens in all" in words(notebook)
    assert "every one as the formula says" in words(notebook)
    saved = {name: int(first) for name, first in re.findall(r"(\d (?:samples|beams)) \['(\d+) %'", words(notebook))}
    assert saved["2 samples"] < saved["4 samples"] < saved["6 samples"] and saved["4 beams"] > saved["4 samples"]
    assert num_figures(notebook) == 2


def test_continuous_batching_needs_fewer_steps_for_the_same_work(tmp_path):
    notebook, seconds = run("03_continuous_batching.ipynb", tmp_path)
    assert seconds < SECONDS
    steps = {name: int(count) for name, count in re.findall(r"(static|reserved|paged) +(\d+) steps", words(notebook))}
    assert steps["paged"] <= steps["reserved"] < steps["static"]
    assert num_figures(notebook) == 3


def test_prefix_caching_finds_what_was_computed_before(tmp_path):
    notebook, seconds = run("04_prefix_caching.ipynb", tmp_path)
    assert seconds < SECONDS
    found = [
        int(number.replace(",", ""))
        for number in re.findall(r"([\d,]+) of [\d,]+ prompt tokens found", words(notebook))
    ]
    chat, shots, tree = found[:3], found[3:6], found[6:]
    assert chat[0] == shots[0] == 0 < chat[1] < chat[2] and shots[1] < shots[2]
    assert tree[1] >= tree[0] and tree[3] >= tree[2], "lpm finds no less than fcfs"
    assert num_figures(notebook) == 2


def test_preempted_requests_lose_time_and_no_text(tmp_path):
    notebook, seconds = run("05_preemption.ipynb", tmp_path)
    assert seconds < SECONDS
    lost = re.findall(r"(recompute|swap) *: (\d+) preemptions, (\d+) tokens computed again", words(notebook))
    assert [mode for mode, _, _ in lost] == ["recompute", "swap"]
    assert all(int(preemptions) for _, preemptions, _ in lost)
    assert int(lost[0][2]) > 0 == int(lost[1][2])
    assert num_figures(notebook) == 2


def test_steps_are_measured_beside_their_floor_and_the_cpu_kernel_beats_the_reference(tmp_path):
    notebook, seconds = run("06_prefill_decode_roofline.ipynb", tmp_path)
    assert seconds < SECONDS
    text = words(notebook)
    assert re.search(r"so a byte is worth \d+ FLOPs", text)
    steps = re.findall(r"(\d+) tokens: prefill +(\d+\.\d) ms, .*; decode +(\d+\.\d) ms, +\d+% of the floor", text)
    assert [int(tokens) for tokens, _, _ in steps] == [1, 2, 4, 8] and all(
        float(s) > 0 for _, *each in steps for s in each
    )
    assert len(re.findall(r"(?:prefill|decode) of +[18]: +\d+\.\d GB/s", text)) == 4
    reference, cpu = re.search(r"128 tokens: reference +(\d+) µs, .*cpu +(\d+) µs", text).groups()
    assert int(cpu) < int(reference)
    assert num_figures(notebook) == 4
