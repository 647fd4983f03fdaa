"""The page of a comparison in Chromium, inside somebody's own Panel app."""

from __future__ import annotations

import time

import panel as pn
import pytest
from lab_pages import free_port, open_page, our_errors

PATIENCE = 60_000  # ms: for a loaded machine; nothing waits so long where it need not


@pytest.fixture
def comparison(tiny_folder):
    from kvscope.workbench import compare

    with compare("paged/contiguous", model=str(tiny_folder), dtype="float32", num_threads=1) as cmp:
        port = free_port()
        server = pn.serve(lambda: pn.Column("# Two ways of serving", cmp), port=port, show=False, threaded=True)
        yield cmp, f"http://127.0.0.1:{port}"
        server.stop()


def test_both_sides_are_run_walked_back_and_shown_as_tables(comparison, browser, shots):
    cmp, url = comparison
    watched = open_page(browser, width=1100)
    page = watched.page
    page.goto(url, timeout=PATIENCE)
    page.wait_for_selector("h2 >> text=B. Contiguous reservation", timeout=PATIENCE)
    page.wait_for_selector("text=Two ways of serving", timeout=PATIENCE)
    page.select_option("[name=scenario]", "one-chat")
    page.click("text=Submit to every engine")
    page.wait_for_selector(".say >> text=/Engine [AB]:/", timeout=PATIENCE)
    page.wait_for_selector(".state >> text=Paused", timeout=PATIENCE)
    until = time.monotonic() + PATIENCE / 1000
    while [side.tally.finished for side in cmp.sides] != [1, 1] or cmp.state != "paused":
        assert time.monotonic() < until
        page.wait_for_timeout(50)
    page.click(".btns >> text=Back")
    page.wait_for_selector(f"text=You look at turn {cmp.turn - 1}", timeout=PATIENCE)
    page.click(".btns >> text=Back")
    page.wait_for_selector(f"text=You look at turn {cmp.turn - 2}", timeout=PATIENCE)
    assert "Shift" not in page.locator(".btns").inner_html(), "a turn has no parts that one could go into"
    page.click(".btns >> text=Turn", modifiers=["Shift"])
    page.wait_for_selector(f"text=You look at turn {cmp.turn - 1}", timeout=PATIENCE)
    page.click("text=Go to the newest turn")
    page.click(".tabs >> text=Tables")
    page.wait_for_selector("th >> text=Requests finished", timeout=PATIENCE)
    page.screenshot(path=shots / "compare.png", timeout=PATIENCE)
    assert our_errors(watched) == [] and watched.refused == []
    page.context.close()
    assert not cmp.closed, "a viewer that leaves ends nothing"
