"""The pool map above 4,096 blocks: one image, 256 columns, one pixel a block, coloured by state.

The image is uint8 state codes through a colour mapper (a quarter of the bytes of RGBA), sent at most 4 times a second
up to 65,535 blocks and twice a second from there on. Blocks of the selected request are outlined rectangles.
"""

from __future__ import annotations

import numpy as np
from bokeh.models import ColumnDataSource, LinearColorMapper
from bokeh.plotting import figure

from ..theme import SELECTED_HUE, Theme
from .base import Frame, empty_source, replace_if_changed

COLUMNS = 256
_SELECTED = 6
STATE_WORDS = ("empty", "cached", "active", "shared", "pinned", "in flight", "selected")  # of a pixel
_RECTANGLES = 2000  # a selection of more blocks is shown by colour alone


class ImageGrid:
    """Draws block states of a frame into `fig` as one image."""

    def __init__(self, fig: figure, theme: Theme, num_blocks: int):
        self.num_blocks, self.columns = num_blocks, COLUMNS
        self.num_rows = -(-num_blocks // COLUMNS)
        self.image = ColumnDataSource({"image": [np.zeros((self.num_rows, COLUMNS), np.uint8)]})
        self.chosen = empty_source("left", "right", "top", "bottom")
        self._mapper = LinearColorMapper(palette=self._palette(theme), low=0, high=_SELECTED)
        self._drawn_at = float("-inf")
        self._selection: object = None
        fig.image(
            "image", source=self.image, x=0, y=0, dw=COLUMNS, dh=self.num_rows, color_mapper=self._mapper, name="cells"
        )  # fmt: skip
        self._outline = fig.quad(
            left="left", right="right", top="top", bottom="bottom", source=self.chosen, fill_color=SELECTED_HUE,
            line_width=1.1, name="chosen",
        )  # fmt: skip
        self.paint(theme)

    @property
    def sources(self) -> dict[str, ColumnDataSource]:
        return {"image": self.image, "chosen": self.chosen}

    @staticmethod
    def _palette(theme: Theme) -> list[str]:
        return [theme.free, theme.cached_image, theme.active, theme.shared, theme.ink, theme.active, SELECTED_HUE]

    def paint(self, theme: Theme) -> None:
        self._mapper.palette = self._palette(theme)
        self._outline.glyph.line_color = theme.ink

    def update(self, frame: Frame, *, by_state: bool) -> None:
        """Always coloured by state (`by_state` is what smaller grids need). Skipped when the last image is too young."""
        period = 0.25 if self.num_blocks < 65_536 else 0.5
        if frame.selection == self._selection and frame.running and frame.now - self._drawn_at < period:
            return
        self._drawn_at, self._selection = frame.now, frame.selection
        codes = np.zeros(self.num_rows * COLUMNS, np.uint8)
        codes[: self.num_blocks] = frame.snapshot.block_state
        chosen = frame.selected_blocks
        codes[chosen] = _SELECTED
        image = codes.reshape(self.num_rows, COLUMNS)
        if not np.array_equal(image, self.image.data["image"][0]):
            self.image.data = {"image": [image]}
        boxes = chosen[:0] if len(chosen) > _RECTANGLES else chosen
        x, y = (boxes % COLUMNS).astype(np.float32), (boxes // COLUMNS).astype(np.float32)
        replace_if_changed(self.chosen, {"left": x, "right": x + 1, "top": y, "bottom": y + 1})
