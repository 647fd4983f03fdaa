"""The served app in Chromium: two viewers of one engine, each with its own choices."""

from __future__ import annotations

import gc
import threading

import pytest
from lab_pages import free_port, open_page, our_errors


@pytest.fixture
def served(tiny_folder):
    from kvscope.engine import Engine
    from kvscope.workbench.app import serve

    engine = Engine(str(tiny_folder), num_blocks=128, dtype="float32", num_threads=1)
    port = free_port()
    app = serve(engine, port=port, show=False, threaded=True)
    yield engine, f"http://127.0.0.1:{port}", app
    app.close()
    engine.close()


def test_a_page_that_opens_under_load_misses_no_tick(served, browser, monkeypatch):
    from kvscope.engine import SamplingParams
    from kvscope.workbench.controls import Commands

    engine, url, _ = served
    said, obey = [], Commands.run
    monkeypatch.setattr(Commands, "run", lambda self, kind, *values: (said.append(kind), obey(self, kind, *values)))
    handles = [engine.submit([3, 4, 5], SamplingParams(max_tokens=100, ignore_eos=True)) for _ in range(400)]
    watched = open_page(browser, width=1200)
    watched.page.goto(url)
    watched.page.wait_for_selector("h2 >> text=KV block pool", timeout=30_000)
    watched.page.wait_for_timeout(1500)
    assert "hello" in said
    assert "resync" not in said, "what the page says when it has missed a tick"
    for handle in handles:
        handle.cancel()
    watched.page.context.close()


def test_two_viewers_of_one_engine(served, browser, shots):
    engine, url, app = served
    first, second = (open_page(browser, width=1200, color_scheme=scheme) for scheme in ("light", "dark"))
    for watched in (first, second):
        watched.page.goto(url)
        watched.page.wait_for_selector("h2 >> text=KV block pool", timeout=30_000)
    second.page.wait_for_selector(".tabs >> text=Light", timeout=30_000)  # it follows the browser's scheme
    assert first.page.locator(".tabs >> text=Dark").count() == 1

    engine.pause()
    first.page.fill("[data-prompt]", "Tell me of the sea")
    first.page.click("text=Submit request")
    first.page.wait_for_selector(".note >> text=/Request 1 was submitted. The engine is paused/", timeout=30_000)
    for watched in (first, second):
        watched.page.wait_for_selector(".row >> text=waiting", timeout=30_000)
    first.page.click(".btns >> text=Step")
    second.page.wait_for_selector(".stepno >> text=/step 1/", timeout=30_000)
    second.page.locator(".row").first.click()
    second.page.wait_for_selector(".tabs >> text=/Request 1 is highlighted/", timeout=30_000)
    assert first.page.locator(".tabs >> text=/highlighted/").count() == 0, "each viewer has a selection of its own"

    first.page.fill("[data-prompt]", "")
    first.page.click("text=Submit request")
    first.page.wait_for_selector(".note.warn >> text=/prompt is empty/", timeout=30_000)
    first.page.click(".btns >> text=Run")
    first.page.wait_for_selector("text=1 request finished", timeout=60_000)
    first.page.screenshot(path=shots / "app.png")
    for watched in (first, second):
        assert our_errors(watched) == []
        assert watched.refused == []
        watched.page.context.close()
    app.close()
    gc.collect()
    for thread in threading.enumerate():  # a worker ends when it has seen that its pool is closed: soon, not at once
        if "kvscope-session" in thread.name or "viewer" in thread.name:
            thread.join(30)
            assert not thread.is_alive(), f"{thread.name} is left after close()"
