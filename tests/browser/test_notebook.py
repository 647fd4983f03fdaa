"""Run All in JupyterLab with a cell that blocks: the workbench moves all the while, and its buttons work."""

from __future__ import annotations

import ast

import pytest
from kvscope.workbench.viewer import BURST, CPU_SHARE
from lab_pages import Lab, Watched, our_errors

OPEN = """
from tiny import tiny_llama
from kvscope.engine import Engine, SamplingParams
from kvscope.workbench import Workbench
engine = Engine(str(tiny_llama({folder!r})), num_blocks=128, dtype="float32", num_threads=1)
wb = Workbench(engine)
wb
"""
HANDLE = "handle = engine.submit('Once upon a time', SamplingParams(max_tokens=40, ignore_eos=True))\nhandle"
BLOCK = """
import pathlib, time
until, stop = time.monotonic() + 300, pathlib.Path("stop")
while time.monotonic() < until and not stop.exists():
    with wb._lock:  # between two messages
        for shown in wb._screens:  # a third of one, as a view has it that was made amid one
            shown.widget.send({"msg": "patch", "payload": "{}"})
    try:
        engine.generate(["Tell me of the sea", "Tell me of the north wind", "Tell me of a lighthouse"],
                        SamplingParams(max_tokens=200, temperature=0.8, ignore_eos=True))
    except RuntimeError:  # paused just between two rounds
        time.sleep(0.05)
stop.unlink()
print("ENDED")
"""
COST = """
import json
viewer = wb._viewer
print("COST", json.dumps([viewer.ticks, viewer.cpu_seconds, time.monotonic() - viewer.started]))
"""
CLOSE = """
import gc, threading, ipywidgets
wb.close(); engine.close(); gc.collect()
print("LEFT", [t.name for t in threading.enumerate() if "kvscope" in t.name], engine.while_waiting)
"""


@pytest.fixture
def book(lab, tmp_path):
    return lab.notebook("run_all.ipynb", OPEN.format(folder=str(tmp_path / "tiny")), HANDLE, BLOCK, COST)


def text_of(watched: Watched, selector: str) -> str:
    return " ".join(watched.page.locator(selector).first.inner_text().split())


def blocked(watched: Watched, cell: int) -> bool:
    return "[*]" in watched.page.locator(".jp-CodeCell .jp-InputPrompt").nth(cell).inner_text()


def end_the_cell(lab: Lab, watched: Watched) -> None:
    (lab.folder / "stop").touch()
    watched.page.wait_for_selector("pre >> text=ENDED", timeout=60_000)


def printed(watched: Watched, word: str) -> str:
    return watched.page.locator(f".jp-OutputArea-output pre >> text={word}").first.text_content()


def step_of(watched: Watched) -> int:
    return int(text_of(watched, ".stepno b").replace(",", ""))


def settled_step(watched: Watched) -> int:
    before = -1
    while before != step_of(watched):
        before = step_of(watched)
        watched.page.wait_for_timeout(1000)
    return before


def wait_for_view(watched: Watched) -> None:
    watched.page.wait_for_selector("h2 >> text=KV block pool", timeout=60_000)


def test_it_moves_while_a_cell_blocks_and_pause_works(lab: Lab, book, shots):
    watched = lab.open(book)
    lab.run_all(watched)
    wait_for_view(watched)
    page = watched.page
    page.wait_for_function("() => document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')[2].innerText.includes('*')")
    pool = page.locator(".bk-Figure").nth(1).locator("canvas").first
    steps, texts, pools = [], set(), set()
    page.wait_for_selector(".reqs .row", timeout=60_000)
    for _ in range(60):
        steps.append(step_of(watched))
        texts.add(text_of(watched, ".reqs"))
        pools.add(pool.evaluate("(canvas) => canvas.toDataURL()"))
        if len(set(steps)) > 4 and len(texts) > 3 and len(pools) > 3:
            break
        page.wait_for_timeout(250)
    assert blocked(watched, 2), "the sample must be taken while the cell blocks"
    assert steps == sorted(steps) and len(set(steps)) > 4, steps
    assert len(texts) > 3, "the text of the requests streams"
    assert len(pools) > 3, "the pool map changes"
    page.screenshot(path=shots / "while-blocked.png")

    page.click(".btns >> text=Pause")
    page.wait_for_selector(".state >> text=Paused", timeout=30_000)
    assert blocked(watched, 2), "the button worked while the cell blocks"
    page.wait_for_timeout(400)
    before = step_of(watched)
    page.wait_for_timeout(400)
    assert step_of(watched) == before
    page.click(".btns >> text=Run")
    page.wait_for_selector(".state >> text=Running", timeout=30_000)

    end_the_cell(lab, watched)
    ticks, cpu, wall = ast.literal_eval(printed(watched, "COST").removeprefix("COST "))
    print(f"viewer: {ticks} ticks, {cpu / ticks * 1000:.2f} ms each, {cpu / wall:.2%} of wall time")
    assert cpu <= CPU_SHARE * wall + BURST + 0.25  # beside its budget: the first picture and the answers to two clicks
    assert our_errors(watched) == []
    assert watched.refused == []


def test_reopened_with_and_without_a_kernel(lab: Lab, book, shots):
    watched = lab.open(book)
    lab.run_all(watched)
    wait_for_view(watched)
    page = watched.page
    end_the_cell(lab, watched)
    newest = settled_step(watched)
    saved = f"[data-kvscope-twin] summary >> text=saved copy of step {newest:,}"
    page.wait_for_selector(saved, state="attached", timeout=60_000)  # it follows when the engine is idle
    assert not page.locator("[data-kvscope-twin] table").first.is_visible(), "folded while the live view is there"
    lab.save(watched)

    same_kernel = lab.open(book)  # the live widget is drawn again, as it is now
    wait_for_view(same_kernel)
    same_kernel.page.wait_for_selector(f".stepno b >> text='{newest:,}'", timeout=60_000)
    same_kernel.page.click(".tabs >> text=Explain")
    same_kernel.page.wait_for_selector("h2 >> text=Block tables >> visible=true", timeout=30_000)
    assert our_errors(same_kernel) == []
    same_kernel.page.context.close()
    page.context.close()
    lab.pages.clear()
    lab.shut_kernels()

    for case in ("fresh-kernel", "no-kernel"):
        reopened = lab.open(book, dialog="No Kernel" if case == "no-kernel" else "")
        copy = reopened.page.locator("[data-kvscope-twin]")
        copy.locator("table").first.wait_for(state="visible", timeout=30_000)
        said = copy.inner_text()
        assert f"saved copy of step {newest:,}" in said, case
        assert "blocks in use" in said and "KV block pool" in said, case
        assert copy.locator("svg").first.is_visible(), case
        shown = reopened.page.locator(".jp-CodeCell").nth(1).text_content()
        assert "Request 1" in shown and "40 tokens" in shown, "the handle left its text"
        reopened.page.screenshot(path=shots / f"reopened-{case}.png")
        reopened.page.context.close()
        lab.pages.clear()
        lab.shut_kernels()


def test_closing_leaves_no_thread_and_the_last_state(lab: Lab, tmp_path):
    generate = "wb.submit('hello', max_tokens=20, ignore_eos=True).result().outputs[0].finish_reason"
    book = lab.notebook("close.ipynb", OPEN.format(folder=str(tmp_path / "tiny")), generate, CLOSE)
    watched = lab.open(book)
    lab.run_all(watched)
    watched.page.wait_for_selector("pre >> text=LEFT", timeout=60_000)
    assert printed(watched, "LEFT").split() == ["LEFT", "[]", "[]"]
    copy = watched.page.locator("[data-kvscope-twin]")
    copy.locator("table").first.wait_for(state="visible", timeout=30_000)
    assert "Request 1" in copy.inner_text()
    lab.save(watched)
    assert book.stat().st_size < 200_000, "a closed workbench takes its script out of the notebook"
    assert our_errors(watched) == []


def test_the_page_is_drawn_in_dark_and_at_every_width(lab: Lab, tmp_path, shots):
    scene = """
wb.pause()
for question in ("What is a page?", "What is a frame?"):
    wb.submit("You are a careful teaching assistant of a course. " + question, max_tokens=60, ignore_eos=True)
wb.submit("Tell me of the sea", n=3, temperature=1.0, max_tokens=60, ignore_eos=True, logprobs=3)
wb.step(30)
print("DRAWN")
"""
    book = lab.notebook("widths.ipynb", OPEN.format(folder=str(tmp_path / "tiny")), scene)
    watched = lab.open(book, width=1500, color_scheme="dark", height=1500)
    lab.run_all(watched)
    page = watched.page
    page.wait_for_selector("pre >> text=DRAWN", timeout=60_000)
    page.wait_for_selector(".state >> text=Paused", timeout=30_000)
    for width, columns in ((2060, 3), (1500, 2), (1100, 1)):
        page.set_viewport_size({"width": width, "height": 1500})
        page.wait_for_timeout(600)
        pool = page.locator("h2 >> text=KV block pool").bounding_box()
        form = page.locator("h2 >> text=Submit").bounding_box()
        assert (pool["y"] > form["y"] + 100) == (columns == 1), width
        assert page.locator("h2 >> text=Event log >> visible=true").count() == (columns == 3), width
        page.screenshot(path=shots / f"light-{width}.png")
    page.locator(".tabs >> text=Dark").click()
    page.wait_for_selector(".tabs >> text=Light", timeout=30_000)
    page.locator(".row").first.click()
    page.wait_for_selector(".tabs >> text=/Request 1 is highlighted/", timeout=30_000)
    page.keyboard.press("2")
    page.wait_for_selector("h2 >> text=Block tables", timeout=30_000)
    page.wait_for_timeout(500)
    page.screenshot(path=shots / "dark-explain.png")
    page.keyboard.press("Escape")
    page.wait_for_selector(".tabs >> text=/highlighted/", state="detached", timeout=30_000)
    page.keyboard.press("t")
    page.wait_for_selector("table.tw >> text=Blocks in logical order >> visible=true", timeout=30_000)
    assert page.locator(".jp-Notebook .jp-Cell").count() == 2, "no key reached JupyterLab's own commands"
    assert our_errors(watched) == []
