"""KV use: the share of blocks in use (solid), of slots that hold tokens (dashed), and between them, dotted, the slots
that are reserved and not written."""

from __future__ import annotations

from collections.abc import Sequence

from bokeh.models import PrintfTickFormatter
from kvscope.engine.events import Event

from ..theme import Theme
from .base import Frame
from .charts import LineChart, Series


class KVUse(LineChart):
    title = "KV use"
    series = (Series("blocks", "ink"), Series("tokens", "decode", "dashed"))

    def draw_below(self) -> None:
        self._gap = self.figure.varea(
            "step", "tokens", "blocks", source=self.line, fill_color=None, hatch_pattern="dot", hatch_scale=6,
            hatch_weight=1.4,
        )  # fmt: skip
        self.figure.yaxis.formatter = PrintfTickFormatter(format="%d %%")
        self._pool: tuple[int, int] = (1, 1)  # blocks without the null block, slots a block

    def update(self, frame: Frame) -> None:
        self._pool = max(1, frame.snapshot.num_blocks - 1), frame.snapshot.block_size
        super().update(frame)

    def values(self, events: Sequence[Event]) -> list[tuple[float, ...]]:
        blocks, block_size = self._pool
        return [
            (
                event.step,
                100 * event.numbers.get("used_blocks", 0) / blocks,
                100 * event.numbers.get("used_slots", 0) / (blocks * block_size),
            )
            for event in events
        ]

    def number(self, value: float) -> str:
        return f"{value:.0f} %"

    def top(self, highest: float) -> float:
        return 100.0

    def restyle(self, theme: Theme) -> None:
        super().restyle(theme)
        self._gap.glyph.hatch_color = theme.waste

    def summary(self) -> str:
        if not self._history:
            return "Nothing is stored yet. The share of blocks in use appears with the first step."
        _, blocks, tokens = self._history[-1]
        return f"Blocks in use: {blocks:.0f} %. Tokens stored: {tokens:.0f} %. The dotted gap is unwritten slots."
