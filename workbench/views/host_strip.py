"""The host strip: blocks that wait in host memory, under the pool that they left.

A square is a host block: a dashed frame when it is empty, horizontal lines and the hue of its request when KV waits in it. A
host pool of more squares than fit shows several blocks in each, and says how many.
"""

from __future__ import annotations

import numpy as np
from bokeh.layouts import column
from bokeh.models import Div, Range1d

from ..markup import plural
from ..theme import FONT, OWNER_HUES, Theme
from .base import Frame, Whose, at, by_code, empty_source, plain_figure, relook, replace_if_changed
from .block_cells import dim_levels

_COLUMNS, _MOST = 48, 192  # squares a row, and in all
_SIDE = 0.84


class HostStrip:
    """Hidden where an engine has no host pool. `waiting` says which request waits in how many blocks."""

    def __init__(self, theme: Theme):
        self.cells = empty_source("x", "y", "hue", "dim")
        self.free = empty_source("x", "y")
        self.sources = {"host": self.cells, "host_free": self.free}
        self.words = Div(sizing_mode="stretch_width", margin=0)
        self.figure = fig = plain_figure(
            theme, x_range=Range1d(0, _COLUMNS), y_range=Range1d(1, 0), height=16, min_border=0
        )
        fig.axis.visible = False
        self._alpha = by_code("dim", dim_levels(theme))
        box = {"width": _SIDE, "height": _SIDE, "line_dash": [2, 2]}
        self._empty = fig.rect("x", "y", source=self.free, fill_color=None, **box)
        self._full = fig.rect(
            "x", "y", source=self.cells, fill_color=by_code("hue", OWNER_HUES), fill_alpha=self._alpha,
            line_alpha=self._alpha, **box,
        )  # fmt: skip
        self._lines = [
            fig.segment(at("x", -_SIDE / 2), at("y", y), at("x", _SIDE / 2), at("y", y), source=self.cells, line_alpha=self._alpha)
            for y in (-0.2, 0.0, 0.2)
        ]  # fmt: skip
        self.root = column(self.words, fig, sizing_mode="stretch_width", margin=(6, 0, 0, 0), spacing=0, visible=False)
        self.waiting: dict[int, int] = {}  # request id -> host blocks
        self._owners: list[int] = []  # request of each square in use
        self.paint(theme)

    def paint(self, theme: Theme) -> None:
        self.theme = theme
        relook(self._alpha, dim_levels(theme))
        self._empty.glyph.line_color = theme.line2
        self._full.glyph.line_color = theme.ink
        for lines in self._lines:
            lines.glyph.line_color = theme.ink
        self.words.stylesheets = [
            f":host{{font:{theme.font(13.5)}/1.4 {FONT};color:{theme.muted}}} b{{color:{theme.ink}}}"
        ]

    def whose(self) -> dict[str, Whose]:
        return {"host": Whose("request", self._owners, {"dim": 1})}

    def update(self, frame: Frame) -> None:
        number = frame.snapshot.num_host_blocks
        if self.root.visible != (number > 0):
            self.root.visible = number > 0
        if not number:
            return
        each = -(-number // _MOST)  # blocks a square
        owner = np.full(number, -1, np.int64)
        self.waiting = {}
        for i, request in enumerate(frame.snapshot.requests):
            slots = np.unique(np.concatenate(request.host_tables)) if request.host_tables else np.zeros(0, np.int64)
            slots = slots[slots >= 0]
            new = slots[owner[slots] < 0]  # of samples that share one the first has it
            owner[new] = i
            if len(new):
                self.waiting[request.id] = self.waiting.get(request.id, 0) + len(new)
        squares = np.maximum.reduceat(owner, np.arange(0, number, each))
        y, x = np.divmod(np.arange(len(squares)), _COLUMNS)
        full = squares >= 0
        self._owners = frame.request_ids[squares[full]].tolist()
        slots, chosen = frame.owner_slots, frame.selected_requests
        dim = np.array(
            [int(frame.selection is not None and i not in chosen) for i in frame.request_ids.tolist()], np.int64
        )
        replace_if_changed(self.free, {"x": x[~full] + 0.5, "y": y[~full] + 0.5})
        replace_if_changed(self.cells, {
            "x": x[full] + 0.5, "y": y[full] + 0.5, "hue": slots[squares[full]] % len(OWNER_HUES), "dim": dim[squares[full]],
        } if full.any() else {name: [] for name in self.cells.data})  # fmt: skip
        rows = int(y[-1]) + 1
        height = self.theme.px(15 * rows)
        if (self.figure.height, self.figure.y_range.start) != (height, rows):
            self.figure.height, self.figure.y_range.start = height, rows
        more = f" Each square is {plural(each, 'block')}." if each > 1 else ""
        used = int((owner >= 0).sum())
        words = f"Host memory for swapped blocks: <b>{used:,}</b> of {number:,} in use.{more}"
        if self.words.text != words:
            self.words.text = words
