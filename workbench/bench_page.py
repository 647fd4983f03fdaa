"""The page of `kvscope bench views`: a workbench's screen on its viewer thread, whose messages go to a page in Chromium or
are only counted. All calls but `send` come from the thread that measures, which is also the one that playwright works in.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from bokeh.core.json_encoder import serialize_json
from bokeh.embed import file_html
from bokeh.resources import INLINE

from .layout import Screen
from .notebook import ScreenWidget
from .picture import browser as find_browser
from .workbench import Workbench

_WIDTH, _HEIGHT = 1600, 1400  # px: wide enough for three columns
_EVENTS = '{"events"'  # how the last of the three parts of a message begins

# A frame counts when it has been painted. What the page says meanwhile goes back, as through a comm.
_SCRIPT = """(bus_id) => {
  const page = Bokeh.documents[0], bus = page.get_model_by_id(bus_id), said = [];
  bus.properties.tags.change.connect(() => said.push(bus.tags));
  window.frame = (text) => new Promise((done) => {
    const begun = performance.now();
    page.apply_json_patch(JSON.parse(text));
    requestAnimationFrame(() => setTimeout(() => done([performance.now() - begun, said.splice(0)])));
  });
}"""


@contextlib.contextmanager
def chromium(*, wanted: bool) -> Iterator[Any]:
    """playwright's browser, or None where it or Chromium is not there, or it is not `wanted`."""
    program = find_browser() if wanted else None
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        program = None
    if program is None:
        yield None
        return
    flags = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--disable-gpu", "--no-first-run", *flags])
        yield browser
        browser.close()


class _Sent(ScreenWidget):
    """A notebook's widget whose messages are kept in `frames` for whoever takes them."""

    def __init__(self, *arguments: Any):
        self.frames: queue.SimpleQueue[str] = queue.SimpleQueue()
        super().__init__(*arguments)

    def send(self, content: dict[str, str], buffers: Any = None) -> None:
        if content["payload"].startswith(_EVENTS):
            self.frames.put(content["payload"])


def _html(document: Any) -> str:
    return file_html(document, INLINE, title="kvscope", suppress_callback_warning=True)


class Page:
    """`views`: names of those that can be seen. `viewer`: the thread that draws them."""

    def __init__(self, wb: Workbench, screen: Screen, widget: _Sent, tab: Any):
        self._wb, self._screen, self._widget, self._tab = wb, screen, widget, tab
        self.viewer = wb._viewer
        shown = [p for p in screen.panels if wb.choices.tab in p.tabs and screen.width in p.widths]
        head = {"header": screen.header.root, "story": screen.header.story}  # the second is inside of the first
        parts = head | {panel.name: panel.root for panel in shown}
        self.views = list(parts)
        self._owner = {model.id: name for name, root in parts.items() for model in root.references()}

    @classmethod
    @contextlib.contextmanager
    def of(cls, wb: Workbench, browser: Any) -> Iterator[Page]:
        """Shown from here on; `browser` None: to nobody."""
        viewer = wb._start_viewer()
        with wb._lock:
            screen = wb._make_screen(viewer.post)
            screen.width = "wide"
            screen.update(wb._tick_now(), wb._status(), everything=True)
            widget = _Sent(screen, wb._lock)
            html = "" if browser is None else _html(widget._document)
            wb._screens.append(SimpleNamespace(screen=screen, widget=widget, cell="", close=widget.close))
        tab = None
        if browser is not None:
            tab = browser.new_page(viewport={"width": _WIDTH, "height": _HEIGHT})
            tab.set_content(html)
            tab.wait_for_function("window.Bokeh?.documents.length")
            tab.evaluate(_SCRIPT, screen.bus.id)
        widget.hello()
        try:
            yield cls(wb, screen, widget, tab)
        finally:
            with wb._lock:
                wb._screens.clear()
            widget.close()
            if tab is not None:
                tab.close()

    def until(self, end: float) -> Iterator[tuple[str, float | None]]:
        """Each frame that comes before `end`, a time.monotonic(), and the milliseconds that the browser took, if there is one."""
        while (left := end - time.monotonic()) > 0:
            try:
                text = self._widget.frames.get(timeout=left)
            except queue.Empty:
                return
            yield text, None if self._tab is None else self._show(text)

    def _show(self, text: str) -> float:
        took, said = self._tab.evaluate("(text) => window.frame(text)", text)
        with self._wb._lock:
            for message in said:
                self._screen._received(message)
        return took

    def bytes_of(self, text: str) -> dict[str, int]:
        """Bytes of a frame by view; "page" has what no view owns, and the envelope. They add up to the frame."""
        sizes = dict.fromkeys((*self.views, "page"), 0)
        for event in json.loads(text)["events"]:
            name = self._owner.get(event.get("model", {}).get("id"), "page")
            sizes[name] += len(serialize_json(event).encode())
        sizes["page"] += len(text.encode()) - sum(sizes.values())
        return sizes
