"""A saved run in Chromium, opened from the disk with every host refused: it plays, back and forth, and says what was live."""

from __future__ import annotations

import subprocess
import sys

from kvscope.workbench.views.base import Selection
from lab_pages import open_page, our_errors

FIRST, LAST = 63, 66
_BORDER = "(row) => getComputedStyle(row).borderTopColor"
_OPACITY = "(row) => getComputedStyle(row).opacity"
# What a selection changes in each source of the page, in the order in which the sources were made.
_SOURCES = """(columns) => {
  const models = Bokeh.documents.flatMap((known) => [...known._all_models.values()]).filter((model) => model.type === "ColumnDataSource");
  models.sort((a, b) => a.id.slice(1) - b.id.slice(1));
  return models.map(({data}) => columns.filter((name) => data[name]).map((name) => [name, Array.from(data[name])]));
}"""
_COLUMNS = [
    "alpha",
    "band",
    "bar",
    "code",
    "count",
    "dim",
    "hatch",
    "height",
    "hue",
    "label",
    "text",
    "x",
    "x0",
    "x1",
    "y",
    "y0",
    "y1",
]


def rows_of(columns) -> list[str]:
    """The rows of a source in any order: a chip has a row of its own as long as it lives. A hatch pales every ten steps, or when
    it is drawn anew: of it only whether it is dimmed."""
    values = []
    for name, column in columns:
        numbers = [v if isinstance(v, str) else round(float(v), 3) for v in column]
        values.append([v > 6 for v in numbers] if name == "hatch" else numbers)
    return sorted(map(repr, zip(*values, strict=True)))


class Live:
    """The screen that shows the same recording with Python."""

    def __init__(self, wb):
        from kvscope.workbench.layout import Screen

        self.wb, self.screen = wb, Screen(wb.choices, lambda *message: None)

    def look(self, step: int, selection=None):
        self.wb.goto(step)
        self.wb.select(selection)
        self.screen.update(self.wb._tick_now(), self.wb._status(), everything=True)
        return self.screen

    def rows(self, step: int, selection) -> list[tuple[list[str], list[str]]]:
        """(names of columns, rows) of each source; where the file does not follow the selection, nothing."""
        from bokeh.models import ColumnDataSource

        screen = self.look(step, selection)
        views = [panel.view for panel in screen.panels]
        beside = [view.sources.get(name) for view in views for name in ("marks", "arrows", "corners", "copied")]
        found = sorted(screen.root.select({"type": ColumnDataSource}), key=lambda source: int(source.id[1:]))
        result = []
        for source in found:
            columns = [(name, list(source.data[name])) for name in _COLUMNS if name in source.data]
            result.append(([], []) if source in beside else ([name for name, _ in columns], rows_of(columns)))
        return result

    def card(self) -> str:
        from kvscope.workbench.views.output import Output

        return next(
            panel.view.root.text
            for panel in self.screen.panels
            if isinstance(panel.view, Output) and panel.view._shown == 900
        )


def test_a_saved_run_plays_without_python(browser, shots, tmp_path):
    from kvscope.workbench import Workbench

    wb = Workbench.replay("demo")
    file = wb.save_html(tmp_path / "run.html", first=FIRST, last=LAST)
    live, told = Live(wb), {}
    for step in range(FIRST, LAST + 1):
        screen = live.look(step)
        told[step] = (screen.header.story_line.text, screen.view("block_map").summary())

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

    def follows(step: int, kind: str, number: int) -> None:
        """The page says what is selected, and every source and the inspector hold what they hold live."""
        page.wait_for_selector(f".tabs >> text={kind.title()} {number} is highlighted in every view", timeout=60_000)
        expected, rows = live.rows(step, Selection(kind, number)), page.evaluate(_SOURCES, _COLUMNS)
        assert len(rows) == len(expected)
        wrong = []
        for (names, live_rows), columns in zip(expected, rows, strict=True):
            if names and ([name for name, _ in columns], rows_of(columns)) != (names, live_rows):
                wrong.append(
                    (names, [pair for pair in zip(rows_of(columns), live_rows, strict=False) if len({*pair}) > 1][:3])
                )
        assert wrong == []
        texts = page.evaluate("() => Bokeh.documents[0].roots()[0].select({type: 'Div'}).map((div) => div.text)")
        assert texts.count(live.card()) == 3, "the inspector stands on two tabs, and on one at two widths"

    request = next(r.id for r in wb.state_at(LAST).requests if r.num_samples > 1)
    while not page.locator(f".tabs >> text=Request {request} is highlighted").count():
        page.keyboard.press("]")
        page.wait_for_timeout(300)
    follows(LAST, "request", request)
    assert page.locator(f".reqs .row[data-r='{request}']").evaluate(_BORDER) != "rgba(0, 0, 0, 0)"
    assert float(page.locator(f".reqs .row:not([data-r='{request}'])").first.evaluate(_OPACITY)) < 1
    page.screenshot(path=shots / "saved-run-request.png")
    page.keyboard.press("2")
    assert page.locator(".log .e:visible").count() > 0
    assert page.locator(f".log .e:visible:not([data-of~='r{request}'])").count() == 0, "the log follows too"
    page.screenshot(path=shots / "saved-run-request-explain.png")
    page.keyboard.press("1")
    page.keyboard.press("Home")
    at(FIRST)
    follows(FIRST, "request", request)
    page.keyboard.press("End")
    at(LAST)
    page.click("text=Clear")
    assert at(LAST) == newest
    figure = page.locator("[data-pool]").first.bounding_box()
    page.mouse.click(figure["x"] + 0.5 * figure["width"], figure["y"] + 0.5 * figure["height"])
    page.wait_for_selector(".tabs >> text=/Block \\d+ is highlighted/", timeout=60_000)
    block = int(page.locator(".hint.keep").inner_text().split()[1])
    follows(LAST, "block", block)
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


def test_the_command_line_writes_a_page_that_plays(browser, tiny_folder, tmp_path, shots):
    """A run of an engine, saved, written by `kvscope replay FILE --html`, opened with no Python behind it."""
    from kvscope.engine import Engine
    from kvscope.workbench import Workbench

    recording, file = tmp_path / "run.kvscope", tmp_path / "run.html"
    with Engine(str(tiny_folder), num_blocks=32, dtype="float32", num_threads=1) as engine, Workbench(engine) as wb:
        wb.pause()
        handle = wb.submit([*range(3, 40)], max_tokens=20, ignore_eos=True)
        wb.step(5)
        wb.save(recording)
    command = [sys.executable, "-m", "kvscope", "replay", str(recording), "--html", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout.strip()) == (0, str(file)), done.stderr

    watched = open_page(browser, width=1100, height=1300)
    page = watched.page
    page.unroute("**/*")
    page.goto(file.as_uri())
    page.wait_for_selector(".stepno >> text=/step 5 of 5/", timeout=60_000)
    page.click(".btns >> text=Back")
    page.wait_for_selector(".stepno >> text=/step 4 of 5/", timeout=60_000)
    page.click(f".reqs .row[data-r='{handle.request_id}']")
    page.wait_for_selector(f"h2 >> text=Request {handle.request_id}", timeout=60_000)
    page.wait_for_selector(".facts2 >> text=37 tokens, 0 from the cache", timeout=60_000)
    page.keyboard.press("2")
    page.locator(".log .e:visible").last.click()
    page.wait_for_selector(".stepno >> text=/step [01] of 5/", timeout=60_000)
    page.keyboard.press("1")
    page.keyboard.press("End")
    page.wait_for_selector(".stepno >> text=/step 5 of 5/", timeout=60_000)
    page.screenshot(path=shots / "replayed-to-html.png")
    assert our_errors(watched) == []
    page.context.close()
