"""A distribution as a strip: one chip a request over an axis of time, or a histogram where they are too many.

    half: 859 ms          95 %: 4.5 s
         │  [4]                ┊            chips stand on each other where they would overlap; the solid line is at the median,
    [2]  │  [8]                ┊  [12]      the dashed one at the 95th percentile
    [7] [1][10]      [13]      ┊ [15]
    0        1.0 s      2.0 s      3.0 s

Values are seconds; the axis says ms or s. Knows no engine: `update` gets the values, and who they belong to.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from bokeh.core.property.vectorization import value
from bokeh.models import BasicTicker, PrintfTickFormatter, Range1d, Span, Title

from ..markup import duration
from ..theme import FONT, ON_OWNER, OWNER_HUES, Theme
from .base import at, by_code, empty_source, font, paint_figure, plain_figure, relook, replace_if_changed
from .block_cells import dim_levels

MOST_DOTS = 60  # requests; more are a histogram
_BINS = 14  # bars
_APART = 0.13  # of the axis, between two chips beside each other: a chip's width where the strip is narrowest
_BEFORE = 0.065  # of the axis, left of 0: half a chip
_ROW, _CHIP = 19, (26, 16)  # px
_HEAD, _FOOT = 58, 24  # px above and below the chips: title and the words of the lines, axis
_LEAST_ROWS, _MOST_ROWS = 5, 14


class Dot(NamedTuple):
    seconds: float
    request_id: int
    slot: int  # of its hue
    dim: bool


class DotStrip:
    """One figure with its sources: `dots`, `bars` and `marks`."""

    def __init__(self, theme: Theme, title: str):
        self.theme = theme
        self.dots = empty_source("x", "y", "label", "hue", "bar", "dim")
        self.bars = empty_source("left", "right", "top")
        self.marks = empty_source("x", "row", "text", "align")
        self.figure = fig = plain_figure(theme, x_range=Range1d(0, 1), y_range=Range1d(0, _LEAST_ROWS), min_border=0)
        fig.min_border_left, fig.min_border_right = 14, 14
        fig.xgrid.visible = True
        fig.yaxis.visible = False
        fig.xaxis.ticker = BasicTicker(desired_num_ticks=4, num_minor_ticks=0)
        fig.xaxis.formatter = self._formatter = PrintfTickFormatter()  # one for good: a new model costs a walk
        fig.title = Title(text=title, text_font=FONT, text_font_style="bold", align="left")
        self._lines = [Span(location=0, dimension="height", line_width=1.8, line_dash=dash, visible=False, level="underlay")
                       for dash in ("solid", "dashed")]  # fmt: skip
        for line in self._lines:
            fig.add_layout(line)
        self._hist = fig.quad("left", "right", "top", 0, source=self.bars, line_color=None)
        self._alpha = by_code("dim", dim_levels(theme))
        self._bar = by_code("bar", (0.0, 1.0, theme.dim_alpha))
        self._chips = fig.rect(
            "x", at("y", 0.46), width=_CHIP[0], height=_CHIP[1], width_units="screen", height_units="screen",
            source=self.dots, fill_color=by_code("hue", OWNER_HUES), fill_alpha=self._alpha, line_alpha=self._alpha,
            border_radius=4,
        )  # fmt: skip
        self._insets = fig.text(
            "x", at("y", 0.46), text=value("▎"), source=self.dots, text_color=ON_OWNER, text_alpha=self._bar,
            text_align="center", text_baseline="middle", x_offset=-8,
        )  # fmt: skip
        self._labels = fig.text(
            "x", at("y", 0.46), text="label", source=self.dots, text_font=font(), text_font_style="bold",
            text_color=ON_OWNER, text_alpha=self._alpha, text_align="center", text_baseline="middle",
        )  # fmt: skip
        self._words = fig.text(
            "x", "row", text="text", source=self.marks, text_font=font(), text_align={"field": "align"},
            text_baseline="middle",
        )  # fmt: skip
        self.paint(theme)

    def paint(self, theme: Theme) -> None:
        self.theme = theme
        paint_figure(self.figure, theme)
        fig = self.figure
        fig.title.text_color, fig.title.text_font_size = theme.ink, theme.font(14)
        relook(self._alpha, dim_levels(theme))
        relook(self._bar, (0.0, 1.0, theme.dim_alpha))
        for line in self._lines:
            line.line_color = theme.ink
        self._hist.glyph.fill_color = theme.decode
        self._chips.glyph.line_color = f"{theme.cell_line}{round(255 * theme.cell_line_alpha):02X}"
        self._chips.glyph.width, self._chips.glyph.height = (theme.px(side) for side in _CHIP)
        self._labels.glyph.text_font_size = self._insets.glyph.text_font_size = theme.font(12)
        self._words.glyph.text_font_size = theme.font(12.5)
        self._words.glyph.text_color, self._words.glyph.background_fill_color = theme.ink, theme.panel
        self._size(round(fig.y_range.end) - 2)

    def update(self, dots: Sequence[Dot], half: float, most: float) -> None:
        """Chips for `dots`, and lines at the median and at the 95th percentile."""
        top = _nice(max((d.seconds for d in dots), default=0.0))
        level = _stacked([d.seconds / top for d in dots])
        tallest = max(level, default=-1) + 1
        if len(dots) > MOST_DOTS or tallest > _MOST_ROWS:
            return self.histogram([d.seconds for d in dots], [1] * len(dots), half, most)
        self._axis(top, max(_LEAST_ROWS, tallest))
        replace_if_changed(self.bars, {"left": [], "right": [], "top": []})
        replace_if_changed(self.dots, {
            "x": [round(d.seconds * self._unit, 2) for d in dots], "y": level, "label": [str(d.request_id) for d in dots],
            "hue": [d.slot % len(OWNER_HUES) for d in dots], "dim": [int(d.dim) for d in dots],
            "bar": [int(d.slot >= len(OWNER_HUES)) * (1 + d.dim) for d in dots],
        })  # fmt: skip
        self._mark(half, most, bool(dots))

    def histogram(self, values: Sequence[float], weights: Sequence[float], half: float, most: float) -> None:
        """Bars over the values; what is far beyond the 95th percentile stands in the last one."""
        top = _nice(min(max(values, default=0.0), 2.5 * most))
        bins = np.minimum(_BINS * np.array(values, float) / top, _BINS - 1).astype(np.int64)
        counts = np.bincount(bins, weights, minlength=_BINS)
        self._axis(top, _LEAST_ROWS)
        edges = np.arange(_BINS + 1) * top * self._unit / _BINS
        gap = 0.06 * edges[1]
        replace_if_changed(self.dots, {name: [] for name in self.dots.data})
        replace_if_changed(self.bars, {
            "left": (edges[:-1] + gap).round(3).tolist(), "right": (edges[1:] - gap).round(3).tolist(),
            "top": (_LEAST_ROWS * counts / max(1, counts.max())).round(2).tolist(),
        })  # fmt: skip
        self._mark(half, most, len(values) > 0)

    def _axis(self, top: float, rows: int) -> None:
        """From 0 to `top` seconds, in ms below a second."""
        self._unit = 1000.0 if top < 1 else 1.0
        self._rows = rows
        fig, end = self.figure, top * self._unit
        if fig.x_range.end != end:
            fig.x_range.start, fig.x_range.end = -_BEFORE * end, end
            if self._unit > 1:
                self._formatter.format = "%d ms" if end >= 4 else "%.1f ms"
            else:
                self._formatter.format = "%.1f s" if end < 10 else "%d s"
        self._size(rows)

    def _size(self, rows: int) -> None:
        fig, height = self.figure, self.theme.px(_HEAD + _FOOT + _ROW * rows)
        if fig.height != height:
            fig.height = height
        if fig.y_range.end != rows + 2:
            fig.y_range.end = rows + 2

    def _mark(self, half: float, most: float, shown: bool) -> None:
        values = [half * self._unit, most * self._unit]
        for line, at_value in zip(self._lines, values, strict=True):
            place = min(at_value, self.figure.x_range.end)
            if (line.location, line.visible) != (place, shown):
                line.location, line.visible = place, shown
        middle = self.figure.x_range.end / 2
        texts = [f"half: {duration(half)}", f"95 %: {duration(most)}"]
        left = [at_value < middle for at_value in values]
        pad = 0.012 * self.figure.x_range.end
        replace_if_changed(self.marks, {
            "x": [round(min(v, self.figure.x_range.end) + (pad if to_right else -pad), 3) for v, to_right in zip(values, left, strict=True)],
            "row": [self._rows + 1.55, self._rows + 0.6], "text": texts,
            "align": ["left" if to_right else "right" for to_right in left],
        } if shown else {name: [] for name in self.marks.data})  # fmt: skip


def _stacked(places: Sequence[float]) -> list[int]:
    """For chips at these shares of the axis the lowest row in which each overlaps none to its left."""
    level, free_from = [0] * len(places), []
    for i in np.argsort(places, kind="stable").tolist():
        level[i] = next((row for row, start in enumerate(free_from) if places[i] >= start), len(free_from))
        free_from[level[i] : level[i] + 1] = [places[i] + _APART]
    return level


def _nice(highest: float) -> float:
    """The end of an axis: a round number a little above the highest value."""
    if highest <= 0:
        return 0.001
    scale = 10 ** math.floor(math.log10(highest))
    return next(n * scale for n in (1.05, 1.55, 2.1, 2.6, 3.1, 4.2, 5.2, 7.8, 10.5) if highest * 1.04 <= n * scale)
