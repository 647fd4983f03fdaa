"""Latencies: time to first token and time per output token of each request, and the gaps between tokens.

The definitions are those of `engine.latency`. TTFT and TPOT are one number a request, so each is a chip with the request's
number; inter-token latency is one a gap, and there are many, so it is a histogram. A step tells how many gaps it closed,
their sum and the longest: that one counts as it is, the others of the step with their mean.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from bokeh.events import Tap
from bokeh.models import Column, InlineStyleSheet
from kvscope.engine.events import Event, EventKind
from kvscope.engine.latency import time_per_output_token

from ..markup import duration
from ..theme import LIGHT, Theme
from .base import Frame, View, Whose, capped
from .dot_strip import Dot, DotStrip
from .html import Pace

_KEPT = 2000  # finished requests
_GAPS = 4000  # entries of gaps
_SIDE_BY_SIDE = (
    ":host{display:grid!important;gap:6px 18px;grid-template-columns:repeat(auto-fit,minmax(220px,1fr));width:auto}"
)


class Latency(View):
    title = "Latency"

    def __init__(self, theme: Theme = LIGHT, **callbacks):
        super().__init__(theme, **callbacks)
        self.strips = {
            "ttft": DotStrip(theme, "Time to first token (TTFT)"),
            "tpot": DotStrip(theme, "Time per output token (TPOT)"),
            "itl": DotStrip(theme, "Between two tokens (ITL)"),
        }
        self.sources = {
            f"{name}_{part}": getattr(strip, part) for name, strip in self.strips.items() for part in ("dots", "bars", "marks")
        }  # fmt: skip
        for strip in self.strips.values():
            strip.figure.on_event(Tap, lambda event, strip=strip: self._tapped(strip, event))
        self.root = Column(
            *(strip.figure for strip in self.strips.values()), stylesheets=[InlineStyleSheet(css=_SIDE_BY_SIDE)],
            sizing_mode="stretch_width", margin=0, spacing=0,
        )  # fmt: skip
        self._pace = Pace()
        self._forget()

    def _forget(self) -> None:
        self.ttft: dict[int, float] = {}  # seconds, by request id, in the order of their ends
        self.tpot: dict[int, float] = {}
        self.gaps: deque[tuple[float, float]] = deque(maxlen=_GAPS)  # (seconds, how many)
        self._longest_output: dict[int, int] = {}

    def reset(self) -> None:
        self._forget()
        self._pace.reset()

    # -- what happened ------------------------------------------------------------------------------------------------

    def update(self, frame: Frame) -> None:
        self.frame = frame
        for event in frame.events:
            if event.kind is EventKind.FINISHED and "e2e" in event.numbers:
                self._ended(event)
            elif event.kind is EventKind.STEP and event.numbers.get("gaps"):
                self._count_gaps(event)
        if self._pace.due(frame):
            self._draw(frame)

    def _ended(self, event: Event) -> None:
        """One sample of a request; the last one's end is the request's, as `outputs.RequestMetrics` has it."""
        request, ttft, e2e = event.request_id, event.numbers["ttft"], event.numbers["e2e"]
        longest = max(self._longest_output.get(request, 0), int(event.numbers["output_tokens"]))
        self._longest_output[request], self.ttft[request] = longest, ttft
        if longest > 1:
            self.tpot[request] = time_per_output_token(ttft, e2e, longest)
        for kept in (self.ttft, self.tpot, self._longest_output):
            while len(kept) > _KEPT:
                del kept[next(iter(kept))]

    def _count_gaps(self, event: Event) -> None:
        number, longest = int(event.numbers["gaps"]), event.numbers["longest_gap"]
        self.gaps.append((longest, 1))
        if number > 1:
            self.gaps.append(((event.numbers["gap_seconds"] - longest) / (number - 1), number - 1))

    def _draw(self, frame: Frame) -> None:
        for name, values in (("ttft", self._now()), ("tpot", self.tpot)):
            chosen = frame.selected_requests
            dots = [
                Dot(s, i, frame.slots.slot(i), frame.selection is not None and i not in chosen)
                for i, s in values.items()
            ]
            seconds = list(values.values())
            self.strips[name].update(dots, *percentiles(seconds, [1] * len(seconds)))
        values, weights = [g for g, _ in self.gaps], [n for _, n in self.gaps]
        self.strips["itl"].histogram(values, weights, *percentiles(values, weights))

    def _tapped(self, strip: DotStrip, event: Tap) -> None:
        data = strip.dots.data
        if self.frame is None or event.x is None or event.y is None or not data["x"]:
            return
        width = strip.figure.x_range.end
        far = [
            abs(x - event.x) / width * 14 + abs(y + 0.46 - event.y) for x, y in zip(data["x"], data["y"], strict=True)
        ]
        nearest = int(np.argmin(far))
        if far[nearest] < 1:
            self.choose("request", int(data["label"][nearest]))

    # -- words --------------------------------------------------------------------------------------------------------

    @property
    def empty(self) -> bool:
        return self.frame is None or not (self.strips["ttft"].marks.data["x"] or self.gaps)

    def restyle(self, theme: Theme) -> None:
        self.theme = theme
        for strip in self.strips.values():
            strip.paint(theme)

    def whose(self) -> dict[str, Whose]:
        dots = {f"{name}_dots": strip.dots.data["label"] for name, strip in self.strips.items()}
        return {name: Whose("request", list(map(int, labels)), {"dim": 1, "bar": 1}) for name, labels in dots.items()}

    def summary(self) -> str:
        if self.empty:
            return "No request has a token yet."
        parts = []
        first = self._now()
        if first:
            half, _ = percentiles(list(first.values()), [1] * len(first))
            parts.append(f"Half of the requests had their first token within {duration(half)}, the slowest in {duration(max(first.values()))}.")  # fmt: skip
        if self.tpot:
            half, _ = percentiles(list(self.tpot.values()), [1] * len(self.tpot))
            parts.append(f"Half needed {duration(half)} or less for each further token.")
        if self.gaps:
            parts.append(f"The longest gap between two tokens was {duration(max(g for g, _ in self.gaps))}.")
        return " ".join(parts)

    def _now(self) -> dict[int, float]:
        live = self.frame.snapshot.requests if self.frame is not None else ()
        return self.ttft | {r.id: r.first_token - r.arrival for r in live if r.first_token is not None}

    def table(self) -> tuple[list[str], list[list[str]]]:
        rows = [
            [str(i), duration(ttft), duration(self.tpot[i]) if i in self.tpot else "–"]
            for i, ttft in sorted(self._now().items(), reverse=True)
        ]
        return ["Request", "TTFT", "TPOT"], capped(rows)


def percentiles(values: Sequence[float], weights: Sequence[float]) -> tuple[float, float]:
    """The median and the 95th percentile of values that count `weights` times: the smallest that so many do not exceed."""
    if not values:
        return 0.0, 0.0
    order = np.argsort(values)
    reached = np.cumsum(np.array(weights, float)[order])
    places = np.searchsorted(reached, np.array([0.5, 0.95]) * reached[-1])
    half, most = np.array(values, float)[order][places]
    return float(half), float(most)
