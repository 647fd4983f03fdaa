"""Throughput: decode (solid) and prefill (dashed) tokens a second, each the mean of 10 steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from kvscope.engine.events import Event

from ..theme import LIGHT, Theme
from .charts import LineChart, Series

MEAN_OF = 10  # steps


class Throughput(LineChart):
    title = "Throughput"
    series = (Series("decode", "decode"), Series("prefill", "prefill", "dashed"))

    def __init__(self, theme: Theme = LIGHT, **callbacks):
        self._last: deque[Event] = deque(maxlen=MEAN_OF)
        super().__init__(theme, **callbacks)

    def reset(self) -> None:
        super().reset()
        self._last.clear()

    def values(self, events: Sequence[Event]) -> list[tuple[float, ...]]:
        rows = []
        for event in events:
            self._last.append(event)
            seconds = sum(e.numbers.get("seconds", 0.0) for e in self._last)
            decode, prefill = (
                sum(e.numbers.get(k, 0) for e in self._last) for k in ("decode_tokens", "prefill_tokens")
            )
            rows.append((event.step, decode / seconds if seconds else 0.0, prefill / seconds if seconds else 0.0))
        return rows

    def summary(self) -> str:
        if not self._history:
            return "Nothing has run yet. Tokens a second appear with the first step."
        _, decode, prefill = self._history[-1]
        return (
            f"Decode writes {decode:,.0f} tokens/s; prefill computes {prefill:,.0f} prompt tokens/s (mean of 10 steps)."
        )
