"""Run until: where a running engine pauses by itself.

A `Breakpoint` is a predicate over the events of one step. The driver arms one (`Armed`) and looks after every step,
before anything else happens, so that the engine never runs past it. It always ends: when the breakpoint is reached, when
no request is left that could reach it, after `max_steps`, or when somebody pauses the engine first. Then the engine is
paused, and whoever waits gets the event or a sentence that says why there is none.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .config import is_integer
from .events import Event, EventKind

if TYPE_CHECKING:
    from .core import EngineCore

MAX_STEPS = 10_000

# What people call it, besides the kinds' own names.
NAMES: dict[str, tuple[str, frozenset[EventKind]]] = {
    "admission": ("a request was admitted", frozenset({EventKind.ADMITTED})),
    "cache hit": ("a prompt hit the cache", frozenset({EventKind.CACHE_HIT})),
    "cache miss": ("a prompt missed the cache", frozenset({EventKind.CACHE_MISS})),
    "copy": ("a block was copied on write", frozenset({EventKind.COPIED})),
    "eviction": ("a block was evicted", frozenset({EventKind.EVICTED})),
    "fork": ("a request split", frozenset({EventKind.FORKED})),
    "preemption": ("a request was preempted", frozenset({EventKind.PREEMPTED})),
    "swap": ("blocks moved to host memory or back", frozenset({EventKind.SWAPPED_OUT, EventKind.SWAPPED_IN})),
    "finish": (
        "a request ended",
        frozenset({EventKind.FINISHED, EventKind.CANCELLED, EventKind.FAILED}),
    ),
}
_CHANGES = frozenset().union(*(kinds for _, kinds in NAMES.values())) | {EventKind.RESUMED}
NAMES["event"] = ("something worth a look happened", _CHANGES)


@dataclass(frozen=True)
class Breakpoint:
    """After the first step with an event of `kinds`, about `request` where one is named; or after step `step`."""

    words: str  # "a block was evicted": after "because" when it is reached
    kinds: frozenset[EventKind] = frozenset()
    request: int | None = None
    step: int | None = None
    at_end: bool = False  # of a request: not one of its samples, the whole

    def reached(self, events: Sequence[Event], core: EngineCore) -> Event | None:
        """The event that it waits for, if it is among `events`, those since the last look."""
        if self.step is not None:
            return next((e for e in events if e.kind is EventKind.STEP and e.step >= self.step), None)
        if self.at_end and self.request is not None and not core.get(self.request).finished:
            return None
        return next((e for e in events if e.kind in self.kinds and self.request in (None, e.request_id)), None)


def breakpoint_at(kind: str | None = None, *, request: int | None = None, step: int | None = None) -> Breakpoint:
    """A kind of event ("eviction", "finish", or an EventKind), a request's next change, the kind for one request, or a step.

    Raises ValueError for anything else.
    """
    if step is not None:
        if kind is not None or request is not None:
            raise ValueError(f"step={step!r} with {kind or f'request={request}'}: name a step or an event, not both")
        if not is_integer(step) or step < 1:
            raise ValueError(f"step={step!r}: must be the number of a step, at least 1")
        return Breakpoint(f"step {step:,} was reached", step=step)
    if request is not None and (not is_integer(request) or request < 1):
        raise ValueError(f"request={request!r}: must be the number of a request, at least 1")
    if kind is None:
        if request is None:
            raise ValueError("run until what? Name a kind of event, request= or step=")
        return Breakpoint(f"request {request} changed", _CHANGES, request)
    if kind in NAMES:
        words, kinds = NAMES[kind]
    elif kind in EventKind.__members__.values():
        words, kinds = f"the event “{EventKind(kind).replace('_', ' ')}” came", frozenset({EventKind(kind)})
    else:
        raise ValueError(f"kind={kind!r}: must be one of {', '.join(NAMES)}, or an EventKind")
    about = "" if request is None else f" (request {request})"
    return Breakpoint(words + about, kinds, request, at_end=kind == "finish")


class Armed:
    """A breakpoint that an engine runs to. Made and asked by the driver thread; `outcome`, under `lock`, is for whoever
    waits for `ended`: the event, or why it did not come."""

    def __init__(self, goal: Breakpoint, core: EngineCore, max_steps: int):
        """Raises RuntimeError or ValueError with a sentence where `goal` cannot be reached any more."""
        if not is_integer(max_steps) or max_steps < 1:
            raise ValueError(f"max_steps={max_steps!r}: must be at least 1, and an integer")
        now = core.journal.step
        if goal.step is not None and goal.step <= now:
            raise ValueError(f"step={goal.step}: the engine is at step {now} already; it only runs forwards")
        if goal.request is not None:
            _require_live(core, goal.request)
        if not core.has_work:
            raise RuntimeError("nothing runs or waits, so that no step comes; submit a request first")
        self.goal = goal
        self.lock = threading.RLock()  # as a record's: Ctrl-C may end a wait
        self.ended = threading.Condition(self.lock)
        self.outcome: Event | Exception | None = None
        self._index = core.events.next_index
        self._last_step = now + max_steps
        self._max_steps = max_steps

    def look(self, core: EngineCore) -> str:
        """Whether it is over, as the words after "the engine was paused because"; "" while it runs on."""
        events, self._index, _ = core.events.since(self._index)
        event = self.goal.reached(events, core)
        if event is not None:
            self.end(event)
            return self.goal.words
        if not core.has_work:
            return self._give_up("no request is left")
        if core.journal.step >= self._last_step:
            return self._give_up(f"{self._max_steps:,} steps have passed")
        if self.goal.request is not None and core.get(self.goal.request).finished:
            return self._give_up(f"request {self.goal.request} is over")
        return ""

    def _give_up(self, why: str) -> str:
        self.end(RuntimeError(f"the engine was paused because {why}, before {self.goal.words}"))
        return f"{why}, before {self.goal.words}"

    def end(self, outcome: Event | Exception) -> None:
        """Tell whoever waits."""
        with self.lock:
            self.outcome = outcome
            self.ended.notify_all()


def _require_live(core: EngineCore, request: int) -> None:
    try:
        over = core.get(request).finished
    except KeyError:
        raise ValueError(f"request={request}: no such request lives") from None
    if over:
        raise ValueError(f"request={request}: this request is over, so nothing more happens to it")
