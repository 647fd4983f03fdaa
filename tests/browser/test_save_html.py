"""A saved run in Chromium, opened from the disk with every host refused: it plays, back and forth, and says what was live."""

from __future__ import annotations

from lab_pages import open_page, our_errors

FIRST, LAST = 60, 66


def test_a_saved_run_plays_without_python(browser, shots, tmp_path):
    from kvscope.workbench import Workbench
    from kvscope.workbench.layout import Screen
    from kvscope.workbench.selection import Choices

    wb = Workbench.replay("demo")
    file = wb.save_html(tmp_path / "run.html", first=FIRST, last=LAST)
    live = Screen(Choices(), lambda *message: None)
    told = {}
    for step in range(FIRST, LAST + 1):
        wb.goto(step)
        live.update(wb._tick_now(), wb._status(), everything=True)
        told[step] = (live.header.story_line.text, live.view("block_map").summary())

    watched = open_page(browser, width=1100, height=1300)
    page = watched.page
    page.unroute("**/*")
    page.route(
        lambda url: not url.startswith("file:"),
        lambda route: (watched.refused.append(route.request.url), route.abort()),
    )
    page.goto(file.as_uri())
    step = page.locator(".stepno")

    def at(number: int) -> str:
        """The page stands at this step, and tells what the live screen tells there; the pool's picture."""
        page.wait_for_selector(f".stepno >> text=/step {number} of {LAST}/", timeout=60_000)
        story, pool = told[number]
        assert story in page.locator(".say").inner_text()
        page.wait_for_selector(f".sum >> text={pool}", timeout=60_000)
        return picture()

    def picture() -> str:
        """When it does not change any more."""
        canvas = page.locator(".bk-Figure").nth(1).locator("canvas").first
        before, now = "", canvas.evaluate("(canvas) => canvas.toDataURL()")
        while now != before:
            page.wait_for_timeout(200)
            before, now = now, canvas.evaluate("(canvas) => canvas.toDataURL()")
        return now

    newest = at(LAST)
    assert page.locator(".tag").inner_text() == "REPLAY"
    assert not page.locator("[data-kvscope-twin]").is_visible(), "the text is for where this script does not run"
    page.keyboard.press("ArrowLeft")
    before = at(LAST - 1)
    page.keyboard.press("Home")
    first = at(FIRST)
    page.click(".btns >> text=Step")
    second = at(FIRST + 1)
    assert len({newest, before, first, second}) == 4
    page.keyboard.press("ArrowLeft")
    assert at(FIRST) == first
    page.evaluate(f"location.hash = '#step={LAST - 1}'")
    assert at(LAST - 1) == before
    page.keyboard.press("End")
    assert at(LAST) == newest
    page.screenshot(path=shots / "saved-run.png")

    page.keyboard.press("Home")
    assert at(FIRST) == first
    page.keyboard.press("Space")
    assert at(LAST) == newest, "it plays to the end and stops there"
    page.wait_for_selector(".btns >> text=Run", timeout=60_000)

    page.keyboard.press("d")
    page.wait_for_selector(".opts >> text=Light", timeout=60_000)
    assert picture() != newest
    assert step.inner_text().startswith(f"step {LAST} of"), "another theme, the same step"
    page.screenshot(path=shots / "saved-run-dark.png")
    page.keyboard.press("t")
    page.keyboard.press("2")
    page.wait_for_selector("table.tw >> text=Blocks in logical order", timeout=60_000)
    page.screenshot(path=shots / "saved-run-explain-tables.png")
    # A text whose size is a column makes BokehJS look for a font without one when its source loses its rows: it says so and goes on.
    assert [text for text in our_errors(watched) if "'FontFaceSet'" not in text] == []
    assert watched.refused == []
    page.context.close()
