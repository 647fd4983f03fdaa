"""Run All in Notebook 7, which shows one notebook a page: the workbench is there, moves, and answers its buttons and keys."""

from __future__ import annotations

from lab_pages import Lab, open_page, our_errors

OPEN = """
from tiny import tiny_llama
from kvscope.engine import Engine
from kvscope.workbench import Workbench
wb = Workbench(Engine(str(tiny_llama({folder!r})), num_blocks=64, dtype="float32", num_threads=1))
wb
"""
WORK = """
for number in range(3):
    wb.submit(f"You are a careful teaching assistant. Question {number}?", max_tokens=200, ignore_eos=True).result()
wb.pause()
print("ENDED")
"""
PATIENCE = 240_000  # ms; a kernel that imports torch beside much else takes minutes


def test_run_all_shows_the_live_view(lab: Lab, tmp_path, shots):
    book = lab.notebook("seven.ipynb", OPEN.format(folder=str(tmp_path / "tiny")), WORK)
    watched = open_page(lab.browser, width=1500, height=1200)
    page = watched.page
    lab.pages.append(page)
    page.set_default_timeout(PATIENCE)
    page.goto(f"{lab.url}/notebooks/{book.name}?token={lab.token}")
    page.wait_for_selector(".jp-Notebook .jp-Cell")
    assert page.title().startswith("seven") and page.locator("#jp-main-dock-panel").count() == 0, "it is no JupyterLab"
    while not any(kernel["execution_state"] == "idle" for kernel in lab.kernels()):  # sooner it would ask for a kernel
        page.wait_for_timeout(500)
    page.wait_for_selector(".jp-Notebook-ExecutionIndicator[data-status=idle]")
    watched.errors.clear()  # what Notebook says itself, before there is anything of ours
    page.click(".lm-MenuBar-itemLabel >> text=Run")
    page.click(".lm-Menu-itemLabel >> text='Run All Cells'")

    page.wait_for_selector("h2 >> text=KV block pool")
    page.wait_for_selector("pre >> text=ENDED")
    page.wait_for_selector(".state >> text=Paused")
    page.wait_for_selector("text=3 requests finished")
    step = int(page.locator(".stepno b").inner_text().replace(",", ""))
    assert step >= 600
    page.click(".btns >> text=Back")
    page.wait_for_selector(f".stepno b >> text='{step - 1:,}'")
    page.keyboard.press("End")
    page.wait_for_selector(".tag >> text=LIVE")
    page.keyboard.press("2")
    page.wait_for_selector("h2 >> text=Prefix cache >> visible=true")
    assert page.locator(".jp-Notebook .jp-Cell").count() == 2, "no key reached the notebook's own commands"
    page.screenshot(path=shots / "notebook-7.png")
    assert our_errors(watched) == []
    assert watched.refused == []
