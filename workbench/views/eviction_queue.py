"""Next to be evicted: cached blocks without a reader in the order in which they go, with the steps they have been idle."""

from __future__ import annotations

import numpy as np
from bokeh.events import Tap
from bokeh.models import Range1d

from ..markup import plural
from ..theme import LIGHT, Theme
from .base import Frame, View, Whose, capped, empty_source, font, plain_figure, replace_if_changed
from .block_chips import ChipGrid
from .html import Pace

COLUMNS, MOST_ROWS = 5, 3
_ROW_HEIGHT = 70  # px: the place, the chip, the idle steps


class EvictionQueue(View):
    title = "Next to be evicted"

    def __init__(self, theme: Theme = LIGHT, **callbacks):
        super().__init__(theme, **callbacks)
        self.words = empty_source("x", "y", "place", "idle")
        self._grid = np.zeros((0, COLUMNS), np.int64)
        self._pace = Pace()
        self.figure = fig = plain_figure(
            theme, x_range=Range1d(0, COLUMNS), y_range=Range1d(1, 0), height=_ROW_HEIGHT, min_border=0,
        )  # fmt: skip
        fig.axis.visible = False
        self._chips = ChipGrid(fig, theme, hatched=True, top=0.27, bottom=0.35)
        common = {"x": "x", "source": self.words, "text_font": font(), "text_align": "center"}
        self._places = fig.text(**common, y="y", text="place", text_baseline="top", y_offset=1)
        self._idle = fig.text(**common, y="y", text="idle", text_baseline="top", text_font_style="normal")
        self.sources = self._chips.sources | {"words": self.words}
        fig.on_event(Tap, self._tapped)
        self.root = fig
        self.restyle(theme)

    def reset(self) -> None:
        self._pace.reset()

    def restyle(self, theme: Theme) -> None:
        self.theme = theme
        self._chips.paint(theme)
        self._chips.show_ids(True, 13.5)
        for text in (self._places, self._idle):
            text.glyph.text_color, text.glyph.text_font_size = theme.muted, theme.font(12.5)
        self._idle.glyph.y_offset = theme.px(47)
        self.figure.max_width = theme.px(440)
        if self.frame is not None:
            self._draw(self.frame)

    def update(self, frame: Frame) -> None:
        self.frame = frame
        if self._pace.due(frame):
            self._draw(frame)

    def _draw(self, frame: Frame) -> None:
        order = frame.snapshot.eviction_order[: COLUMNS * MOST_ROWS].astype(np.int64)
        rows = max(1, -(-len(order) // COLUMNS))
        self._grid = np.full(rows * COLUMNS, -1, np.int64)
        self._grid[: len(order)] = order
        self._grid = self._grid.reshape(rows, COLUMNS)
        height = self.theme.px(_ROW_HEIGHT * rows)
        if (self.figure.height, self.figure.y_range.start) != (height, rows):
            self.figure.height, self.figure.y_range.start = height, rows
        self._chips.update(frame, self._grid)
        row, place = np.divmod(np.arange(len(order)), COLUMNS)
        replace_if_changed(self.words, {
            "x": (place + 0.47).tolist(), "y": row.tolist(), "place": [f"{i}." for i in range(1, len(order) + 1)],
            "idle": [f"idle {idle}" for idle in _idle(frame, order).tolist()],
        })  # fmt: skip

    def _tapped(self, event: Tap) -> None:
        if self.frame is None or event.x is None or event.y is None:
            return
        row, place = int(event.y // 1), int(event.x // 1)
        if 0 <= row < self._grid.shape[0] and 0 <= place < COLUMNS and self._grid[row, place] >= 0:
            self.choose("block", int(self._grid[row, place]))

    @property
    def empty(self) -> bool:
        return self.frame is None or not len(self.frame.snapshot.eviction_order)

    def whose(self) -> dict[str, Whose]:
        return self._chips.whose()

    def summary(self) -> str:
        if self.empty:
            return "Nothing can be evicted yet: no cached block is without a reader."
        number = len(self.frame.snapshot.eviction_order)
        left_out = number - COLUMNS * MOST_ROWS
        more = f" {left_out:,} more stand behind them." if left_out > 0 else ""
        told = "The number in a chip is the block; it has been idle for so many steps."
        return f"{plural(number, 'block')}, the first to go first. {told}{more}"

    def table(self) -> tuple[list[str], list[list[str]]]:
        headers = ["Place", "Block", "Idle", "Hits", "Computed for"]
        if self.frame is None:
            return headers, []
        snapshot = self.frame.snapshot
        order = snapshot.eviction_order
        rows = [
            [
                f"{i}.",
                str(block),
                plural(idle, "step"),
                str(snapshot.num_hits[block]),
                str(snapshot.computed_for[block]),
            ]
            for i, (block, idle) in enumerate(zip(order.tolist(), _idle(self.frame, order).tolist(), strict=True), 1)
        ]
        return headers, capped(rows)


def _idle(frame: Frame, blocks: np.ndarray) -> np.ndarray:
    return frame.snapshot.step - frame.snapshot.last_used_step[blocks]
