"""The player's track: the share of blocks in use over all recorded steps, ticks for evictions, discs for preemptions,
rings for swaps, and a line at the step that is looked at.

However long the run, at most so many points are drawn: every step, every second, every fourth, … A tick streams the few new
ones; only when they have become too many is everything sent again, thinned out. Where to go is decided elsewhere: the page's
script turns taps and drags on the figure into steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from bokeh.models import InlineStyleSheet, Range1d

from ..theme import Theme
from .base import empty_source, plain_figure

if TYPE_CHECKING:
    from ..recorder import Recording, Series

POINTS = 600  # drawn at most
_AT_ONCE = 8  # points streamed in one tick
_MISSED = 100  # points that were not drawn in time, from which on everything is sent again
_TOP, _TICK, _FOOT = 100, -26, -32  # all blocks in use; lower ends of an eviction's tick and of the line
_SPARE = 0.03  # of the length: room at the right, so that the axis does not move with every step
_HAND = ".bk-Canvas,.bk-events{cursor:pointer!important}"


class Scrubber:
    """`figure` for the page; `update` with every tick."""

    def __init__(self, theme: Theme, stylesheet: InlineStyleSheet | None = None):
        self.use = empty_source("step", "used", "evicted")
        self.losses = empty_source("step")  # preemptions
        self.swaps = empty_source("step")
        self.here = empty_source("step")
        self.sources = {"use": self.use, "preemptions": self.losses, "swaps": self.swaps, "here": self.here}
        self.figure = fig = plain_figure(
            theme, height=42, sizing_mode="stretch_width", x_range=Range1d(-1, 20), y_range=Range1d(-34, 112),
            min_border=0, stylesheets=[_HAND, *([stylesheet] if stylesheet else [])],
        )  # fmt: skip
        fig.axis.visible = False
        self._area = fig.varea("step", 0, "used", source=self.use)
        self._base = fig.line("step", 0, source=self.use, line_width=1)
        self._ticks = fig.segment("step", 0, "step", "evicted", source=self.use, line_width=1.4)
        self._discs = fig.scatter("step", 94, source=self.losses, line_color=None)
        self._rings = fig.scatter("step", 94, source=self.swaps, line_width=2)
        self._line = fig.segment("step", _FOOT, "step", _TOP + 10, source=self.here, line_width=2)
        self._knob = fig.scatter("step", -10, source=self.here, line_width=1.5)
        self._origin: int | None = None
        self._next = 0  # the first step that is not drawn yet
        self._stride = 1
        self._last_point = -1
        self._last_mark: dict[str, int] = {}
        self.paint(theme)

    def paint(self, theme: Theme) -> None:
        self.figure.height = theme.px(42)
        self._area.glyph.fill_color, self._base.glyph.line_color = theme.area, theme.line2
        self._ticks.glyph.line_color = self._discs.glyph.fill_color = theme.warn
        self._rings.glyph.fill_color, self._rings.glyph.line_color = theme.panel, theme.ink
        self._line.glyph.line_color = theme.ink
        self._knob.glyph.fill_color, self._knob.glyph.line_color = theme.accent, theme.panel
        self._discs.glyph.size = self._rings.glyph.size = theme.px(9)
        self._knob.glyph.size = theme.px(12)

    # -- one tick -----------------------------------------------------------------------------------------------------

    def update(self, recording: Recording | None, num_blocks: int, step: int, origin: int = 0) -> None:
        """`step` is the one that is looked at; `origin` another number where `recording` is of another run."""
        series = None if recording is None else recording.series
        if series is not None and len(series.steps):
            room = max(1, num_blocks - 1)
            if origin != self._origin or not self._stream(series, room):
                self._origin = origin
                self._send_all(series, room)
            self._fit(int(series.steps[0]), int(series.steps[-1]))
            self._show_step(step, empty=len(series.steps) == 1)

    def _stream(self, series: Series, room: int) -> bool:
        """Add what is new; False where that would be too much and everything is thinned out instead."""
        begin = int(np.searchsorted(series.steps, self._next))
        new = np.arange(begin, len(series.steps))
        self._next = int(series.steps[-1]) + 1
        chosen = new[series.steps[new] % self._stride == 0]
        if len(chosen) > _MISSED:
            return False
        chosen = chosen[:: -max(1, -(-len(chosen) // _AT_ONCE))][::-1]  # the newest among them
        if len(self.use.data["step"]) + len(chosen) > POINTS:
            return False
        if len(chosen):
            self.use.stream(self._points(series, chosen, room))
        for name, counts in _marks(series).items():
            if marks := self._thin(name, series.steps[new[counts[new] > 0]]):
                self.sources[name].stream({"step": marks})
        return True

    def _send_all(self, series: Series, room: int) -> None:
        """Everything again, with half as many points as may be drawn."""
        steps = series.steps
        self._stride = 1
        while len(steps) > self._stride * POINTS // 2:
            self._stride *= 2
        self._next, self._last_point, self._last_mark = int(steps[-1]) + 1, -1, {}
        self.use.data = self._points(series, np.flatnonzero(steps % self._stride == 0), room)
        for name, counts in _marks(series).items():
            self.sources[name].data = {"step": self._thin(name, steps[counts > 0])}

    def _points(self, series: Series, chosen: np.ndarray, room: int) -> dict[str, list]:
        """A point says whether a block was evicted since the point before it."""
        begin = int(np.searchsorted(series.steps, self._last_point, "right"))
        seen = np.concatenate([[0], np.cumsum(series.evictions[begin:] > 0)])[chosen + 1 - begin]
        evicted = np.diff(seen, prepend=0) > 0
        if len(chosen):
            self._last_point = int(series.steps[chosen[-1]])
        used = np.round(_TOP * series.used_blocks[chosen] / room).astype(int)
        return {"step": series.steps[chosen].tolist(), "used": used.tolist(), "evicted": (evicted * _TICK).tolist()}

    def _thin(self, name: str, steps: np.ndarray) -> list[int]:
        """Of these steps those whose marks do not lie on one another."""
        apart, kept = 4 * self._stride, []
        for step in steps.tolist():
            if step // apart > self._last_mark.get(name, -1):
                self._last_mark[name] = step // apart
                kept.append(step)
        return kept

    def _fit(self, first: int, last: int) -> None:
        bounds, span = self.figure.x_range, max(20, last - first)
        if last > bounds.end or last < bounds.end - 3 * _SPARE * span - 20:
            bounds.end = first + max(20, round((1 + _SPARE) * (last - first)) + 1)
        if not bounds.start <= first <= bounds.start + 2 * _SPARE * span:
            bounds.start = first - 0.02 * span

    def _show_step(self, step: int, *, empty: bool) -> None:
        shown = [] if empty else [step]
        if self.here.data["step"] == shown:
            return
        if len(self.here.data["step"]) == len(shown):
            self.here.patch({"step": [(0, step)]})
        else:
            self.here.data = {"step": shown}


def _marks(series: Series) -> dict[str, np.ndarray]:
    return {"preemptions": series.preemptions, "swaps": series.swaps}
