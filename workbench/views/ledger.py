"""The memory ledger: what every slot of the pool is good for now, as one bar and its rows.

The division is `kvcache.ledger.divide`: the parts always add up to the pool. Textures say which part is which, so that no
meaning rests on colour: plain = tokens, hatched = cached, striped = reserved, dotted = unwritten, outline = empty, crossed =
of no use to anybody.
"""

from __future__ import annotations

from bokeh.models import ColumnDataSource
from kvscope.engine.kvcache.ledger import Division, divide

from ..theme import LIGHT, Theme
from .base import Frame, replace_if_changed
from .html import HtmlView

_PARTS = (  # field of a Division, class of its texture, words
    ("token", "tok", "Tokens of running requests"),
    ("cached", "cac", "Cached text, can be evicted"),
    ("reserved", "res", "Reserved, not written yet"),
    ("internal", "una", "Unwritten slots (internal)"),
    ("empty", "emp", "Empty blocks"),
    ("external", "ext", "Too small to use (external)"),
)


class Ledger(HtmlView):
    title = "Memory ledger"

    def __init__(self, theme: Theme = LIGHT, **options):
        super().__init__(theme, **options)
        self.parts = ColumnDataSource({"part": [words for *_, words in _PARTS], "slots": [0] * 6, "percent": [0.0] * 6})
        self.sources = {"parts": self.parts}
        self._division: Division | None = None

    def update(self, frame: Frame) -> None:
        self.frame = frame
        if not self._pace.due(frame):
            return
        division = self._division = divide(frame.snapshot)
        slots = [getattr(division, name) for name, *_ in _PARTS]
        percent = [round(100 * n / max(1, division.capacity), 1) for n in slots]
        replace_if_changed(self.parts, {"part": [words for *_, words in _PARTS], "slots": slots, "percent": percent})
        pieces = "".join(
            f'<i class="{kind}" style="flex-grow:{n}"></i>' for (_, kind, _), n in zip(_PARTS, slots, strict=True) if n
        )
        rows = "".join(
            f'<i class="{kind}"></i><span>{words}</span><b>{n:,}</b><span class="num">{share:.1f} %</span>'
            for (_, kind, words), n, share in zip(_PARTS, slots, percent, strict=True)
        )
        self.show(f'<div class="ledger" aria-hidden="true">{pieces}</div><div class="parts">{rows}</div>')

    def summary(self) -> str:
        division = self._division
        if division is None:
            return "The pool has not been looked at yet."
        wasted = 100 * (division.internal + division.external) / max(1, division.capacity)
        text = f"{wasted:.0f} % of all {division.capacity:,} slots are wasted."
        if division.reserved:
            text += f" {division.reserved:,} are reserved and not written yet."
        return f"{text} Sharing saves {division.saved:,} slots." if division.saved else text

    def table(self) -> tuple[list[str], list[list[str]]]:
        data = self.parts.data
        rows = [
            [part, f"{slots:,}", f"{percent:.1f} %"]
            for part, slots, percent in zip(data["part"], data["slots"], data["percent"], strict=True)
        ]
        saved = self._division.saved if self._division is not None else 0
        return ["Slots", "Number", "Share"], [*rows, ["Saved by sharing", f"{saved:,}", "–"]]
