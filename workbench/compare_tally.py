"""What one engine of a comparison has done so far, in numbers, from its own events and snapshots.

Time is the engine's own: the sum of its steps. Engines of one process take turns, so the clock on the wall would charge each
with the steps of the others. A request waits from the step after its arrival; its first token comes at the end of a step.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from kvscope.engine.events import Event, EventKind
from kvscope.engine.snapshot import EngineSnapshot

from .markup import duration

_RATE_STEPS = 10  # tokens/s of the moment is the mean of so many steps


class Tally:
    """`add` with every step's snapshot and the events since the one before; `start` is what had been done before."""

    def __init__(self, start: EngineSnapshot):
        self._start = start.counters
        self._known = {request.id for request in start.requests}
        self.snapshot = start
        self.steps = self.computed = self.written = self.finished = 0
        self.seconds = 0.0
        self.peak_blocks = start.num_used_blocks
        self.ttft: list[float] = []  # seconds
        self.tpot: list[float] = []
        self._arrived: dict[int, float] = {}
        self._first: dict[int, float] = {}
        self._ended: dict[int, int] = {}  # request -> output tokens of its longest sample
        self._unwritten_seconds = 0.0
        self._recent: deque[tuple[int, float]] = deque(maxlen=_RATE_STEPS)

    def add(self, snapshot: EngineSnapshot, events: Iterable[Event]) -> None:
        slots = (snapshot.num_blocks - 1) * snapshot.block_size
        for event in events:
            numbers = event.numbers
            if event.kind is EventKind.SUBMITTED:
                self._arrived[event.request_id] = self.seconds
            elif event.kind in (EventKind.FINISHED, EventKind.CANCELLED):
                tokens = int(numbers["output_tokens"])
                self._ended[event.request_id] = max(tokens, self._ended.get(event.request_id, 0))
            elif event.kind is EventKind.FAILED:
                self._ended[event.request_id] = 0
            elif event.kind is EventKind.STEP:
                self.steps += 1
                self.seconds += numbers["seconds"]
                unwritten = numbers["used_blocks"] * snapshot.block_size - numbers["used_slots"]
                self._unwritten_seconds += numbers["seconds"] * unwritten / slots
                self.peak_blocks = max(self.peak_blocks, int(numbers["used_blocks"]))
                written = self._since("vllm:generation_tokens_total", snapshot)
                self._recent.append((written - self.written, numbers["seconds"]))
                self.written = written
        self.computed = self._since("kvscope:computed_tokens_total", snapshot)
        self.snapshot = snapshot
        self._follow_requests(snapshot)

    def _since(self, counter: str, snapshot: EngineSnapshot) -> int:
        return int(snapshot.counters.get(counter, 0) - self._start.get(counter, 0))

    def _follow_requests(self, snapshot: EngineSnapshot) -> None:
        """First tokens and ends, which came with the step that has just been counted."""
        for request in snapshot.requests:
            if request.num_output_tokens and request.id not in self._known:
                self._has_token(request.id)
        live = {request.id for request in snapshot.requests}
        for request_id in self._ended.keys() - live:
            tokens = self._ended.pop(request_id)
            if tokens and request_id not in self._known:
                self._has_token(request_id)
                if tokens > 1:
                    self.tpot.append((self.seconds - self._first[request_id]) / (tokens - 1))
            self.finished += 1
            self._first.pop(request_id, None)
            self._arrived.pop(request_id, None)

    def _has_token(self, request_id: int) -> None:
        if request_id not in self._first:
            self._first[request_id] = self.seconds
            self.ttft.append(self.seconds - self._arrived.get(request_id, 0.0))

    # -- numbers ------------------------------------------------------------------------------------------------------

    def count(self, status: str) -> int:
        """Sequences in this state now; of those that wait, requests."""
        if status == "running":
            return sum(request.status == status for request in self.snapshot.requests)
        return len({request.id for request in self.snapshot.requests if request.status != "running"})

    @property
    def rate(self) -> float:
        """Output tokens a second, over the last steps."""
        seconds = sum(s for _, s in self._recent)
        return sum(t for t, _ in self._recent) / seconds if seconds else 0.0

    @property
    def holding(self) -> float:
        """Share of the pool that holds tokens of requests."""
        slots = (self.snapshot.num_blocks - 1) * self.snapshot.block_size
        return self.snapshot.counters.get("kvscope:num_slots_used", 0) / slots

    @property
    def unwritten(self) -> float:
        """Share of the pool that is taken and not written."""
        return self.snapshot.num_used_blocks / max(1, self.snapshot.num_blocks - 1) - self.holding

    @property
    def mean_unwritten(self) -> float:
        """The same, averaged over the time so far."""
        return self._unwritten_seconds / self.seconds if self.seconds else 0.0

    @property
    def mean_rate(self) -> float:
        """Output tokens a second, over all of the time so far."""
        return self.written / self.seconds if self.seconds else 0.0

    @property
    def preemptions(self) -> int:
        return self._since("vllm:num_preemptions_total", self.snapshot)

    @property
    def cached(self) -> int:
        """Prompt tokens that were found in the prefix cache."""
        return self._since("vllm:prefix_cache_hits_total", self.snapshot)


class Metric(NamedTuple):
    """`show` writes a value; None is a number that is not there yet."""

    name: str
    of: Callable[[Tally], float | None]
    show: Callable[[float], str]


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _percent(value: float) -> str:
    return f"{value:.0%}".replace("%", " %")


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


NOW = (
    Metric("Sequences running", lambda t: t.count("running"), _count),
    Metric("Tokens per second", lambda t: t.rate, _count),
    Metric("Pool holding tokens", lambda t: t.holding, _percent),
    Metric("Reserved, unwritten", lambda t: t.unwritten, _percent),
    Metric("Requests waiting", lambda t: t.count("waiting"), _count),
    Metric("Requests finished", lambda t: t.finished, _count),
)
SO_FAR = (
    Metric("Time", lambda t: t.seconds, duration),
    Metric("Steps", lambda t: t.steps, _count),
    Metric("Tokens computed", lambda t: t.computed, _count),
    Metric("Tokens/s, mean", lambda t: t.mean_rate, _count),
    Metric("Peak blocks", lambda t: t.peak_blocks, _count),
    Metric("Unwritten, mean", lambda t: t.mean_unwritten, _percent),
    Metric("Preemptions", lambda t: t.preemptions, _count),
    Metric("Tokens from the cache", lambda t: t.cached, _count),
    Metric("First token, median", lambda t: _median(t.ttft), duration),
    Metric("Further token, median", lambda t: _median(t.tpot), duration),
)
