"""The lens of a pool above 512 blocks: a part of the map, three or four rows of it, as the labelled cells of a small pool.

A frame on the map shows where it is. It follows the block that is selected, and the keyboard's cursor in the map.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from bokeh.events import Tap
from bokeh.layouts import column
from bokeh.models import Div, HoverTool, Range1d
from bokeh.plotting import figure

from ..theme import FONT, Theme
from .base import Frame, empty_source, font, plain_figure, replace_if_changed
from .block_cells import CellGrid

COLUMNS, ROWS = 15, 4
EVERY = 0.25  # seconds between redraws while the engine runs
_GUTTER, _MARGIN = 1.3, 0.12  # cells: ids of the rows at the left; around the cells


class BlockLens:
    """Shows `COLUMNS` × `ROWS` of the blocks of a map that has `columns` a row, drawn in `over`. `on_tap` gets a block."""

    def __init__(
        self, over: figure, theme: Theme, num_blocks: int, columns: int, tooltip: str, on_tap: Callable[[int], None]
    ):
        self.theme, self.num_blocks, self.columns = theme, num_blocks, columns
        self._on_tap = on_tap
        self._drawn_at = float("-inf")
        self._asked: tuple | None = None
        self.place, self.rows = empty_source("left", "right", "top", "bottom"), empty_source("x", "y", "text")
        side = {
            "left": "left",
            "right": "right",
            "top": "top",
            "bottom": "bottom",
            "source": self.place,
            "fill_color": None,
        }
        self._halo, self._frame = over.quad(**side, line_width=6), over.quad(**side, line_width=3)
        wide, high = COLUMNS + _GUTTER + _MARGIN, ROWS + 2 * _MARGIN
        self.figure = fig = plain_figure(
            theme, x_range=Range1d(-_GUTTER, COLUMNS + _MARGIN), y_range=Range1d(ROWS + _MARGIN, -_MARGIN),
            aspect_ratio=wide / high, sizing_mode="scale_width", min_border=0,
        )  # fmt: skip
        fig.axis.visible = False
        self.grid = CellGrid(fig, theme, COLUMNS * ROWS, COLUMNS, labelled=True)
        self.grid.draw_over()
        self._row_text = fig.text(
            "x", "y", text="text", source=self.rows, text_align="right", text_baseline="middle", text_font=font()
        )
        self._hover = HoverTool(renderers=[self.grid.faces], tooltips=tooltip, point_policy="follow_mouse")
        fig.add_tools(self._hover)
        fig.on_event(Tap, self._tapped)
        self.words = Div(sizing_mode="stretch_width", margin=0)
        self.root = column(self.words, fig, sizing_mode="stretch_width", margin=(8, 0, 0, 0), spacing=0)
        self.sources = {f"lens_{name}": source for name, source in self.grid.sources.items()}
        self.sources |= {"lens_place": self.place, "lens_rows": self.rows}
        self.look_at(0)
        self.paint(theme, tooltip)

    def look_at(self, block: int) -> None:
        """Have this block in the lens, in its middle where the map goes on around it."""
        if not 0 <= block < self.num_blocks:
            return
        row, column = divmod(block, self.columns)
        rows = -(-self.num_blocks // self.columns)
        top = min(max(0, row - 1), max(0, rows - ROWS))
        left = min(max(0, column - COLUMNS // 2), self.columns - COLUMNS)
        ids = (top + np.arange(ROWS))[:, None] * self.columns + left + np.arange(COLUMNS)
        ids = np.where(ids < self.num_blocks, ids, -1)
        self.grid.show(ids.ravel())
        self._asked = None
        starts = ids[:, 0].tolist()
        replace_if_changed(
            self.place, {"left": [left], "right": [left + COLUMNS], "top": [top], "bottom": [min(rows, top + ROWS)]}
        )
        replace_if_changed(self.rows, {
            "x": [-0.16] * ROWS, "y": [row + 0.5 for row in range(ROWS)], "text": [f"{b:,}" if b >= 0 else "" for b in starts]
        })  # fmt: skip
        last = self.num_blocks - 1 if top + ROWS > rows else int(ids[0][ids[0] >= 0][-1])
        text = f"Lens: blocks {starts[0]:,} to {last:,} and the {ROWS - 1} rows below. Click the map, or walk in it with the arrow keys."
        if self.words.text != text:
            self.words.text = text

    def shows(self, block: int) -> bool:
        return bool(np.any(self.grid.ids == block))

    def update(self, frame: Frame, *, by_state: bool) -> None:
        asked = frame.selection, self.grid.label, frame.running
        if asked == self._asked and frame.running and 0 <= frame.now - self._drawn_at < EVERY:
            return
        self._asked, self._drawn_at = asked, frame.now
        self.grid.update(frame, by_state=by_state)

    def paint(self, theme: Theme, tooltip: str) -> None:
        self.theme, self._asked = theme, None
        self._halo.glyph.line_color, self._frame.glyph.line_color = theme.panel, theme.accent
        self._row_text.glyph.text_color, self._row_text.glyph.text_font_size = theme.muted, theme.font(13)
        self._hover.tooltips = tooltip
        self.words.stylesheets = [f":host{{font:{theme.font(14)}/1.45 {FONT};color:{theme.muted}}}"]
        self.grid.paint(theme)

    def _tapped(self, event: Tap) -> None:
        if event.x is None or event.y is None:
            return
        x, y = int(event.x // 1), int(event.y // 1)
        if 0 <= x < COLUMNS and 0 <= y < ROWS and self.grid.ids[y * COLUMNS + x] >= 0:
            self._on_tap(int(self.grid.ids[y * COLUMNS + x]))
