"""The queue: how many run and wait, and who waits in which order for what.

The lines are from the events of steps; the list is the line as it stands now, the one that goes next at its head, each with
the reason in words, how long it has waited, how often younger ones went past it, and its priority and deadline if it has one.
"""

from __future__ import annotations

from collections.abc import Sequence

from bokeh.layouts import column
from bokeh.models import Div
from kvscope.engine.events import Event
from kvscope.engine.snapshot import RequestState

from ..markup import ITEM, chip, esc, one_stop, plural
from ..theme import LIGHT, Theme
from .base import Frame, capped
from .charts import LineChart, Series
from .html import Pace

_SHOWN = 6  # of the line


class Queue(LineChart):
    title = "Queue"
    needs = ("stylesheets",)
    series = (Series("running", "decode"), Series("waiting", "third", "dashed"))
    room = 0.36

    def __init__(self, theme: Theme = LIGHT, *, stylesheets: Sequence = (), **callbacks):
        super().__init__(theme, **callbacks)
        self.line_up = Div(stylesheets=list(stylesheets), sizing_mode="stretch_width", margin=0, disable_math=True)
        self.root = column(self.figure, self.line_up, sizing_mode="stretch_width", margin=0, spacing=0)
        self._pace = Pace()

    def reset(self) -> None:
        super().reset()
        self._pace.reset()

    def values(self, events: Sequence[Event]) -> list[tuple[float, ...]]:
        return [(e.step, e.numbers.get("running", 0), e.numbers.get("waiting", 0)) for e in events]

    def update(self, frame: Frame) -> None:
        super().update(frame)
        if not self._pace.due(frame):
            return
        line = waiting_line(frame)
        rows = "".join(self._row(frame, request) for request in line[:_SHOWN])
        more = f'<p class="sum">and {len(line) - _SHOWN:,} more</p>' if len(line) > _SHOWN else ""
        html = one_stop("line", "Who waits", rows) + more if rows else ""
        if self.line_up.text != html:
            self.line_up.text = html

    def _row(self, frame: Frame, request: RequestState) -> str:
        dimmed = " dim" if frame.selection is not None and request.id not in frame.selected_requests else ""
        return (
            f'<div class="row{dimmed}" data-r="{request.id}" {ITEM} role="button">'
            f"{chip(str(request.id), request.id, frame.slots)}<span>{esc(_why(request))}"
            f" <em>{esc('; '.join(_facts(frame, request)))}</em></span></div>"
        )

    def summary(self) -> str:
        if self.frame is None:
            return "Nobody has come yet."
        line = waiting_line(self.frame)
        preempted = len({r.id for r in line if r.status == "preempted"})
        running = len({r.id for r in self.frame.snapshot.requests if r.status == "running"})
        counters = self.frame.snapshot.counters
        waiting = int(counters.get("vllm:num_requests_waiting", len({r.id for r in line}))) - preempted
        samples = sum(r.status == "running" for r in self.frame.snapshot.requests)
        in_samples = f" in {samples} sequences" if samples > running else ""
        return f"{running} running{in_samples}, {waiting:,} waiting, {preempted} preempted or swapped out."

    def table(self) -> tuple[list[str], list[list[str]]]:
        headers = ["Place", "Request", "Waits because", "Waited", "Skipped", "Priority", "Deadline"]
        if self.frame is None:
            return headers, []
        rows = []
        for place, request in enumerate(waiting_line(self.frame), 1):
            left = _seconds_left(self.frame, request)
            rows.append([
                str(place), str(request.id), request.blocked_because, plural(_waited(self.frame, request), "step"),
                str(request.num_times_passed), str(request.priority), "–" if left is None else f"in {left:.1f} s",
            ])  # fmt: skip
        return headers, capped(rows)


def waiting_line(frame: Frame) -> list[RequestState]:
    """Who waits, the one that goes next first; samples that were preempted together are one."""
    waiting = [r for r in frame.snapshot.requests if r.queue_place >= 0]
    first: dict[int, RequestState] = {}
    for request in sorted(waiting, key=lambda r: r.queue_place):
        first.setdefault(request.id, request)
    return list(first.values())


def _why(request: RequestState) -> str:
    state = "was swapped out" if request.host_tables else "was preempted" if request.status == "preempted" else ""
    waits = f"Blocked because {request.blocked_because}."
    return f"It {state}. {waits}" if state else waits


def _waited(frame: Frame, request: RequestState) -> int:
    return max(0, frame.snapshot.step - request.waiting_since_step)


def _seconds_left(frame: Frame, request: RequestState) -> float | None:
    return None if request.deadline is None else request.deadline - frame.snapshot.time


def _facts(frame: Frame, request: RequestState) -> list[str]:
    facts = [f"waited {plural(_waited(frame, request), 'step')}"]
    if request.num_times_passed:
        facts.append(f"{request.num_times_passed} younger went past it")
    if request.priority:
        facts.append(f"priority {request.priority}")
    left = _seconds_left(frame, request)
    if left is not None:
        facts.append(f"deadline in {left:.0f} s" if left > 0 else "its deadline has passed")
    return facts
