"""The numbers of a comparison as paired bars: one group a number, one bar a side, all bars of a group on one scale."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from bokeh.models import Div, InlineStyleSheet

from ..compare_tally import NOW, SO_FAR, Metric
from ..markup import esc, plural
from ..theme import LIGHT, Theme
from . import legend
from .base import Frame, View
from .reserved_map import unused_svg

if TYPE_CHECKING:
    from ..compare_side import Side

_COLOURS = ("--decode", "--third", "--prefill", "--ok")  # of sides A to D; the letter stands beside each bar
CSS = """.cmp{display:grid;grid-template-columns:repeat(auto-fill,minmax(158px,1fr));gap:9px 14px;margin:2px 0 10px}
.cmp>div{border-left:2.5px solid var(--line);padding-left:9px;min-width:0}
.cmp small{display:block;font-size:13.5px;color:var(--muted);white-space:nowrap;overflow:hidden;text-overflow:ellipsis}
.cmp p{display:grid;grid-template-columns:14px minmax(0,1fr) auto;gap:6px;align-items:center;margin:1px 0;font-size:13.5px;color:var(--muted)}
.cmp i{height:13px;border:1px solid var(--line);box-sizing:border-box;display:block} .cmp i span{display:block;height:100%}
.cmp b{font-size:16px;font-weight:650;color:var(--ink);font-variant-numeric:tabular-nums;min-width:46px}
.lead{font-size:14px;font-weight:600;margin:4px 0 3px;color:var(--ink)}"""


class CompareNumbers(View):
    """Draws what the sides' tallies say now; the frame only tells that something has happened."""

    title = "The same requests, side by side"

    def __init__(
        self, theme: Theme = LIGHT, *, sides: Sequence[Side], stylesheets: Sequence[InlineStyleSheet] = (), **callbacks
    ):
        super().__init__(theme, **callbacks)
        self._sides = sides
        options: dict[str, Any] = {"sizing_mode": "stretch_width", "margin": 0, "stylesheets": list(stylesheets)}
        self.root = Div(**options)

    def update(self, frame: Frame) -> None:
        self.frame = frame
        html = self._group("Now", NOW) + self._group("So far", SO_FAR) + self._legend()
        if html != self.root.text:
            self.root.text = html

    def reset(self) -> None:
        """Numbers have no history here."""

    def restyle(self, theme: Theme) -> None:
        self.theme = theme
        if self.frame is not None:
            self.update(self.frame)

    def _group(self, lead: str, metrics: Sequence[Metric]) -> str:
        return f'<div class="lead">{lead}</div><div class="cmp">{"".join(map(self._bars, metrics))}</div>'

    def _bars(self, metric: Metric) -> str:
        values = [metric.of(side.tally) for side in self._sides]
        longest = max((value or 0 for value in values), default=0) or 1
        rows = "".join(
            f'<p>{side.letter}<i><span style="width:{100 * (value or 0) / longest:.0f}%;background:var({colour})"></span></i>'
            f"<b>{'–' if value is None else metric.show(value)}</b></p>"
            for side, value, colour in zip(self._sides, values, _COLOURS, strict=False)
        )
        return f'<div><small title="{esc(metric.name)}">{esc(metric.name)}</small>{rows}</div>'

    def _legend(self) -> str:
        dots, crosses = unused_svg(self.theme)
        items = [
            legend.icon(self.theme, 24, 24, dots) + "reserved, unwritten",
            legend.icon(self.theme, 24, 24, crosses) + "of no use to any request: rounded up, or a gap too small",
        ]
        return f'<style>{legend.style(self.theme)}</style><div aria-hidden="true">{legend.line(items)}</div>'

    def summary(self) -> str:
        running = [
            f"{'engine ' * (i == 0)}{side.letter} runs {plural(side.tally.count('running'), 'sequence')}"
            for i, side in enumerate(self._sides)
        ]
        most = max(self._sides, key=lambda side: side.tally.unwritten)
        told = f"Now {', '.join(running)}."
        if most.tally.unwritten > 0.1:
            used = most.tally.snapshot.num_used_blocks / max(1, most.tally.snapshot.num_blocks - 1)
            told += f" {most.letter} has taken {used:.0%} of its pool and written {most.tally.holding:.0%}.".replace(
                "%", " %"
            )
        return told

    def table(self) -> tuple[list[str], list[list[str]]]:
        rows = []
        for metric in (*NOW, *SO_FAR):
            values = [metric.of(side.tally) for side in self._sides]
            rows.append([metric.name, *("–" if value is None else metric.show(value) for value in values)])
        return ["Number", *(side.letter for side in self._sides)], rows
