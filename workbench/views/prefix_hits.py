"""Prefix cache hits: of all prompt tokens that were admitted so far, how many came from the cache.

Both are counters that only rise, so the line never falls back to nothing because traffic stopped. Counted once a request, at
its first admission; what a preempted one finds again when it resumes is not a hit.
"""

from __future__ import annotations

from collections.abc import Sequence

from bokeh.models import PrintfTickFormatter
from kvscope.engine.events import Event, EventKind

from ..theme import LIGHT, Theme
from .base import Frame
from .charts import LineChart, Series


class PrefixHits(LineChart):
    title = "Prefix cache hits"
    series = (Series("of tokens", "ok"),)
    room = 0.36

    def __init__(self, theme: Theme = LIGHT, **callbacks):
        self._found = self._asked = 0
        self._events: Sequence[Event] = ()
        super().__init__(theme, **callbacks)
        self.figure.yaxis.formatter = PrintfTickFormatter(format="%d %%")

    def reset(self) -> None:
        super().reset()
        self._found = self._asked = 0

    def update(self, frame: Frame) -> None:
        self._events = frame.events
        super().update(frame)

    def values(self, events: Sequence[Event]) -> list[tuple[float, ...]]:
        rows = []
        for event in self._events:
            if event.kind is EventKind.ADMITTED:
                self._asked += int(event.numbers["prompt_tokens"])
                self._found += int(event.numbers["cached_tokens"])
            elif event.kind is EventKind.STEP and self._asked:
                rows.append((event.step, 100 * self._found / self._asked))
        return rows

    def number(self, value: float) -> str:
        return f"{value:.0f} %"

    def top(self, highest: float) -> float:
        return 100.0

    def summary(self) -> str:
        if not self._asked:
            return "No prompt has been admitted yet."
        return f"{self._found:,} of {self._asked:,} prompt tokens came from the cache since the start."
