"""A saved run in Chromium, opened from the disk with every host refused: it plays, back and forth, and says what was live."""

from __future__ import annotations

from lab_pages import open_page, our_errors

FIRST, LAST = 60, 66
_BORDER = "(row) => getComputedStyle(row).borderTopColor"
_OPACITY = "(row) => getComputedStyle(row).opacity"
# [the blocks with a ring, those that are not dimmed], of the pool map; the strips of shared blocks follow the others.
_LIT = """() => {
  const models = Bokeh.documents.flatMap((known) => [...known._all_models.values()]);
  const data = (name) => models.find((model) => model.name === name && model.data_source).data_source.data;
  const {x, y} = data("chosen"), ringed = Array.from(x, (column, i) => y[i] * 16 + column);
  const strong = [...data("cells").dim.keys()].filter((block) => data("cells").dim[block] !== 1), strips = data("strips");
  const wrong = [...strips.code.keys()].filter((i) => (strips.code[i] < 8) !== strong.includes(16 * strips.y[i] + Math.floor(strips.x[i])));
  if (wrong.length) throw new Error(`strips ${wrong}`);
  return [ringed, strong];
}"""


def blocks_of(wb, step: int, number: int) -> list[int]:
    tables = [table for r in wb.state_at(step).requests if r.id == number for table in r.block_tables]
    return sorted({block for table in tables for block in table.tolist() if block})


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
    assert "Shift" not in page.locator(".btns").inner_html(), "the file holds whole steps"
    page.click(".btns >> text=Step", modifiers=["Shift"])
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

    def lit(what: str) -> list[int]:
        """Blocks that are ringed, once the page says so; and no other one of the pool is at full strength."""
        page.wait_for_selector(f"#kv-said >> text={what} is highlighted", timeout=60_000)
        ringed, strong = page.evaluate(_LIT)
        assert set(ringed) <= set(strong)
        return strong if what.startswith("Request") else ringed

    request = wb.state_at(LAST).requests[0].id
    page.keyboard.press("]")
    assert lit(f"Request {request}") == blocks_of(wb, LAST, request)
    assert page.locator(f".reqs .row[data-r='{request}']").evaluate(_BORDER) != "rgba(0, 0, 0, 0)"
    assert float(page.locator(f".reqs .row:not([data-r='{request}'])").first.evaluate(_OPACITY)) < 1
    page.keyboard.press("Home")
    assert at(FIRST) != first
    assert page.evaluate(_LIT)[1] == blocks_of(wb, FIRST, request), "it follows the step"
    page.keyboard.press("End")
    at(LAST)
    page.keyboard.press("Escape")
    assert at(LAST) == newest
    figure = page.locator("[data-pool]").first.bounding_box()
    page.mouse.click(figure["x"] + 0.5 * figure["width"], figure["y"] + 0.5 * figure["height"])
    block = page.evaluate(_LIT)[0]
    assert len(block) == 1 and lit(f"Block {block[0]}") == block
    page.screenshot(path=shots / "saved-run-block.png")
    page.wait_for_timeout(1000)  # else it is a double click
    page.mouse.click(figure["x"] + 0.5 * figure["width"], figure["y"] + 0.5 * figure["height"])
    assert picture() == newest, "a second click drops it"

    page.keyboard.press("d")
    page.wait_for_selector(".opts >> text=Light", timeout=60_000)
    assert picture() != newest
    assert step.inner_text().startswith(f"step {LAST} of"), "another theme, the same step"
    page.screenshot(path=shots / "saved-run-dark.png")
    page.keyboard.press("t")
    page.keyboard.press("2")
    page.wait_for_selector("table.tw >> text=Blocks in logical order", timeout=60_000)
    page.screenshot(path=shots / "saved-run-explain-tables.png")
    assert our_errors(watched) == []
    assert watched.refused == []
    page.context.close()
