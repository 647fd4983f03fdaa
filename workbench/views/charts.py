"""Line charts over steps: values stream in, at most 600 steps stay, and each line carries its name at its end.

A subclass names its series and turns the STEP events of a frame into one row of numbers a step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from bokeh.models import BasicTicker, ColumnDataSource, NumeralTickFormatter, Range1d
from kvscope.engine.events import Event, EventKind

from ..theme import LIGHT, Theme
from .base import Frame, View, font, paint_figure, plain_figure, replace_if_changed

STEPS = 600  # kept in the browser
_MOST_AT_ONCE = 60  # steps streamed in one tick; of a faster engine every second, third, … step is drawn


class Series(NamedTuple):
    name: str
    role: str  # of the theme
    dash: str = "solid"


class LineChart(View):
    """Base: `series`, `unit` (of the axis) and `values(events) -> rows` make a chart."""

    series: tuple[Series, ...] = ()
    unit = ""
    room = 0.14  # right of the newest step, for the words at the ends of the lines; a share of the steps

    def __init__(self, theme: Theme = LIGHT, **callbacks):
        super().__init__(theme, **callbacks)
        names = [s.name for s in self.series]
        self.line = ColumnDataSource({name: [] for name in ("step", *names)})
        self.ends = ColumnDataSource({name: [] for name in ("x", "y", "number", "name", "colour")})
        self.sources = {"line": self.line, "ends": self.ends}
        self._history: list[tuple[float, ...]] = []  # (step, values in the order of series)
        self._anew = False  # the next rows replace those that the browser has
        self._build()

    def values(self, events: Sequence[Event]) -> list[tuple[float, ...]]:
        """(step, one number a series) for each STEP event, oldest first."""
        raise NotImplementedError

    def number(self, value: float) -> str:
        """A value as the end label shows it."""
        return f"{value:,.0f}"

    def top(self, highest: float) -> float:
        """Upper end of the axis for the highest value drawn: a round number."""
        return round_top(highest)

    # -- building -----------------------------------------------------------------------------------------------------

    def _build(self) -> None:
        self.figure = fig = plain_figure(
            self.theme, x_range=Range1d(0, 40), y_range=Range1d(0, 1), height=190, min_border_left=44,
        )  # fmt: skip
        fig.ygrid.visible = True
        fig.yaxis.ticker = BasicTicker(desired_num_ticks=3)
        fig.xaxis.ticker = BasicTicker(desired_num_ticks=4, mantissas=[1, 2, 5], min_interval=1)
        fig.xaxis.axis_label = "step"
        fig.xaxis.axis_label_standoff = 2
        for axis in fig.axis:
            axis.minor_tick_line_color = None
            axis.formatter = NumeralTickFormatter(format="0,0")
        self.draw_below()
        self._lines = [
            fig.line("step", s.name, source=self.line, line_width=2.4, line_dash=s.dash, line_join="round")
            for s in self.series
        ]
        common = {"x": "x", "y": "y", "source": self.ends, "x_offset": 6, "text_font": font()}
        self._numbers = fig.text(
            **common, text="number", text_color="colour", text_font_style="bold", y_offset=-1, text_baseline="bottom"
        )
        self._names = fig.text(**common, text="name", y_offset=0, text_baseline="top")
        self.root = fig
        self.restyle(self.theme)

    def draw_below(self) -> None:
        """Areas under the lines; none by default."""

    def restyle(self, theme: Theme) -> None:
        self.theme = theme
        paint_figure(self.figure, theme)
        self.figure.height = theme.px(190)
        self.figure.ygrid.grid_line_color = theme.line
        self.figure.xaxis.axis_label_text_color = theme.muted
        self.figure.xaxis.axis_label_text_font_size = theme.font(12.5)
        self.figure.xaxis.axis_label_text_font_style = "normal"
        for line, series in zip(self._lines, self.series, strict=True):
            line.glyph.line_color = getattr(theme, series.role)
        self._numbers.glyph.text_font_size = theme.font(13.5)
        self._names.glyph.text_font_size = theme.font(13)
        self._names.glyph.text_color = theme.muted
        for text in (self._numbers, self._names):
            text.glyph.background_fill_color = theme.panel  # no line of the grid goes through a word
        self._end_labels()

    @property
    def empty(self) -> bool:
        return not self._history

    # -- one frame ----------------------------------------------------------------------------------------------------

    def update(self, frame: Frame) -> None:
        self.frame = frame
        history = self._history
        rows = self.values([e for e in frame.events if e.kind is EventKind.STEP])
        if frame.running and not self._anew:
            rows = rows[:: max(1, -(-len(rows) // _MOST_AT_ONCE))]
        if not rows and not self._anew:
            return
        history.extend(rows)
        del history[:-STEPS]
        if self._anew:
            self._anew, self.line.data = False, self._columns(history)
        else:
            self.line.stream(self._columns(rows), rollover=STEPS)
        self._fit()
        self._end_labels()

    def reset(self) -> None:
        self._history.clear()
        self._anew = True

    def _columns(self, rows: Sequence[tuple[float, ...]]) -> dict[str, list[float]]:
        names = ("step", *(s.name for s in self.series))
        return {name: [round(row[i], 1) for row in rows] for i, name in enumerate(names)}

    def _fit(self) -> None:
        first, last = (self._history[0][0], self._history[-1][0]) if self._history else (0, 1)
        span = max(20.0, last - first)
        ranges = (self.figure.x_range, self.figure.y_range)
        highest = max((max(row[1:]) for row in self._history), default=0)
        for bounds, start, end in (
            (ranges[0], first, first + (1 + self.room) * span),
            (ranges[1], 0, self.top(highest) * 1.04),
        ):
            if bounds.start != start:
                bounds.start = start
            if bounds.end != end:
                bounds.end = end

    def _end_labels(self) -> None:
        if not self._history:
            replace_if_changed(self.ends, {name: [] for name in self.ends.data})
            return
        step, *values = self._history[-1]
        height = self.figure.y_range.end
        places = spread_apart(values, 0.24 * height, height)
        replace_if_changed(self.ends, {
            "x": [step] * len(values), "y": [round(y, 1) for y in places], "number": [self.number(v) for v in values],
            "name": [s.name for s in self.series], "colour": [getattr(self.theme, s.role) for s in self.series],
        })  # fmt: skip

    # -- twin ---------------------------------------------------------------------------------------------------------

    def table(self) -> tuple[list[str], list[list[str]]]:
        """The last 8 steps."""
        headers = ["Step", *(s.name for s in self.series)]
        return headers, [[f"{row[0]:,.0f}", *(self.number(v) for v in row[1:])] for row in self._history[-8:]]


def round_top(highest: float) -> float:
    """A round number that is not below `highest`; 1 where nothing is above 0."""
    if highest <= 0:
        return 1.0
    scale = 10 ** math.floor(math.log10(highest))
    return next(n * scale for n in (1, 1.5, 2, 2.5, 3, 4, 5, 7.5, 10) if highest <= n * scale)


def spread_apart(values: Sequence[float], least: float, height: float) -> list[float]:
    """Places for labels near `values`, at least `least` apart where there is room from 0 to `height`."""
    order = np.argsort(values, kind="stable").tolist()
    places = list(values)
    lowest = 0.13 * height
    for i in order:
        places[i] = max(values[i], lowest)
        lowest = places[i] + least
    highest = 0.9 * height
    for i in reversed(order):
        places[i] = min(places[i], highest)
        highest = places[i] - least
    return places
