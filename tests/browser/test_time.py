"""Time in a real JupyterLab: pause, back, the scrubber, keys, and an engine that goes on while one looks at the past."""

from __future__ import annotations

from lab_pages import Lab, Watched, our_errors

OPEN = """
from tiny import tiny_llama
from kvscope.engine import Engine
from kvscope.workbench import Workbench
wb = Workbench(Engine(str(tiny_llama({folder!r})), num_blocks=64, dtype="float32", num_threads=1))
wb.pause()
for number in range(4):
    wb.submit(f"You are a careful teaching assistant. Question {{number}}?", max_tokens=900, ignore_eos=True)
wb.step(60)
wb.engine.steps_per_second = 20
wb
"""
SLOW = 60_000  # ms; what is waited for comes at once, and on a busy machine later


def said(watched: Watched, selector: str) -> str:
    return " ".join(watched.page.locator(selector).first.inner_text().split())


def step_of(watched: Watched) -> int:
    return int(said(watched, ".stepno b").replace(",", ""))


def newest_of(watched: Watched) -> int:
    """As the banner counts it."""
    return int(said(watched, ".banner.past").split("the newest is ")[1].split(".")[0].replace(",", ""))


def wait_step(watched: Watched, step: int, *, tag: str) -> None:
    watched.page.wait_for_selector(f".stepno b >> text='{step:,}'", timeout=SLOW)
    watched.page.wait_for_selector(f".tag >> text={tag}", timeout=SLOW)


def test_time(lab: Lab, tmp_path, shots):
    watched = lab.open(lab.notebook("time.ipynb", OPEN.format(folder=str(tmp_path / "tiny"))), width=1500, height=900)
    lab.run_all(watched)
    page = watched.page
    page.wait_for_selector("h2 >> text=KV block pool", timeout=240_000)
    wait_step(watched, 60, tag="LIVE")

    page.click(".btns >> text=Back")
    wait_step(watched, 59, tag="REPLAY")
    page.click(".btns >> text=Back")
    wait_step(watched, 58, tag="REPLAY")
    page.keyboard.press("ArrowLeft")
    wait_step(watched, 57, tag="REPLAY")
    page.keyboard.press("Home")
    wait_step(watched, 0, tag="REPLAY")
    assert "0 running" in said(watched, ".kpis"), "every view shows the past, the numbers too"
    page.keyboard.press("ArrowRight")
    wait_step(watched, 1, tag="REPLAY")
    page.wait_for_selector("[data-send]:disabled >> nth=0", timeout=SLOW)

    track = page.locator(".bk-Figure").first.bounding_box()
    middle = track["y"] + track["height"] / 2
    page.mouse.click(track["x"] + track["width"] / 2, middle)
    page.wait_for_selector(".stepno b >> text=/^(2[5-9]|3[0-4])$/", timeout=SLOW)
    page.screenshot(path=shots / "time-past.png")
    page.mouse.move(track["x"] + track["width"] / 2, middle)
    page.mouse.down()
    page.mouse.move(track["x"] + track["width"] / 3, middle, steps=6)
    page.mouse.move(track["x"] + track["width"] / 5, middle, steps=6)
    page.mouse.up()
    page.wait_for_selector(".stepno b >> text=/^([5-9]|1[0-6])$/", timeout=SLOW)

    page.keyboard.press("End")
    wait_step(watched, 60, tag="LIVE")
    page.wait_for_selector(".banner.past", state="detached", timeout=SLOW)
    page.wait_for_selector("[data-send]:not(:disabled) >> nth=0", timeout=SLOW)

    page.click(".btns >> text=Run")
    page.wait_for_selector(".state >> text=Running", timeout=SLOW)
    page.keyboard.press("ArrowLeft")
    page.wait_for_selector(".banner.past >> text=The engine goes on", timeout=SLOW)
    looked_at, newest = step_of(watched), newest_of(watched)
    page.wait_for_function(
        """(before) => {
            const find = (from) => { for (const node of from.querySelectorAll("*")) {
                if (node.matches(".banner.past")) return node;
                const found = node.shadowRoot && find(node.shadowRoot); if (found) return found; } };
            const told = find(document)?.innerText.match(/the newest is ([\\d,]+)/);
            return told && Number(told[1].replace(",", "")) > before + 5; }""",
        arg=newest,
        timeout=SLOW,
    )
    assert step_of(watched) == looked_at, "what one looks at stands still"
    page.click("text=Go to the newest step")
    page.wait_for_selector(".tag >> text=LIVE", timeout=SLOW)
    page.click(".btns >> text=Pause")
    page.wait_for_selector(".state >> text=Paused", timeout=SLOW)
    assert step_of(watched) > newest

    page.select_option("[data-speed]", "until preemption")
    page.wait_for_selector(".say >> text=/preempted/", timeout=60_000)
    page.wait_for_selector(".state >> text=Paused", timeout=SLOW)
    page.screenshot(path=shots / "time-preemption.png")
    assert our_errors(watched) == []
    assert watched.refused == []
