"""Views that are written as HTML, and how often a slow view is drawn.

A view that shows words and small bars is one `Div`; its numbers stand in a source as those of a figure do, so that it is
tested in the same way. Selecting a request or a block works through `data-r` and `data-b`, as everywhere on the page.
"""

from __future__ import annotations

from collections.abc import Sequence

from bokeh.models import Div

from ..theme import LIGHT, Theme
from .base import Frame, View

EVERY = 1.0  # seconds between two drawings while the engine runs


class Pace:
    """Whether a slow view is due: once in `every` seconds while the engine runs, else when something has changed."""

    def __init__(self, every: float = EVERY):
        self._every = every
        self.reset()

    def reset(self) -> None:
        self._asked: tuple | None = None
        self._at = float("-inf")

    def due(self, frame: Frame, *asked: object) -> bool:
        """`asked` are choices that are to be seen at once, beside the selection."""
        asked = (frame.selection, frame.running, *asked)
        if frame.running and asked == self._asked and 0 <= frame.now - self._at < self._every:
            return False
        self._asked, self._at = asked, frame.now
        return True


class HtmlView(View):
    """Base: a subclass calls `show` with the HTML of what it draws."""

    needs = ("stylesheets",)

    def __init__(self, theme: Theme = LIGHT, *, stylesheets: Sequence = (), **callbacks):
        super().__init__(theme, **callbacks)
        self.root = Div(stylesheets=list(stylesheets), sizing_mode="stretch_width", margin=0, disable_math=True)
        self._pace = Pace()

    def reset(self) -> None:
        self._pace.reset()

    def show(self, html: str) -> None:
        if self.root.text != html:
            self.root.text = html

    def restyle(self, theme: Theme) -> None:
        self.theme = theme  # its colours are the page's custom properties
