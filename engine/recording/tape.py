"""The engine's side of a recording: at every mark it keeps what has changed since the last one, within a bound of memory.

`mark` is called by the engine's thread alone, before every step and before it sleeps. Whoever wants to look takes a
`Recording` with `recording()`, in any thread, and costs the engine nothing but a lock for microseconds. Moments are kept one
by one at first; 64 of them become columns. When there is more than `max_bytes` the oldest columns go into the base, which
is the state from which all others are rolled forward.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from ..events import Event
from ..info import EngineFacts
from .delta import Delta, totals_of
from .recording import Keyframes, Recording
from .span import SPAN, Span
from .state import State
from .texts import Texts
from .watch import BlockWatch, SequenceWatch, facts_of
from .words import Words

if TYPE_CHECKING:
    from ..config import EngineConfig
    from ..core import EngineCore
    from ..registry import RequestRegistry

MAX_BYTES = 16 << 20  # of columns and of the texts of requests that are over; some 10,000 steps with 16 sequences


class Tape:
    """Made by the engine's thread. `registry` None: a core alone, whose requests nobody reads."""

    def __init__(
        self,
        core: EngineCore,
        registry: RequestRegistry | None = None,
        *,
        state: str = "running",
        info: EngineFacts | None = None,
        config: EngineConfig | None = None,
        decode: Callable[[list[int]], str] = lambda token_ids: "",  # of a whole text
        decode_token: Callable[[int], str] = str,
        max_bytes: int = MAX_BYTES,
    ):
        self._lock = threading.Lock()
        self._core: EngineCore | None = core
        self._registry = registry
        self._info, self._config = info, _plain(config)
        self._decode, self._decode_token = decode, decode_token
        self.max_bytes = max_bytes
        self.fault: Exception | None = None  # why nothing is recorded any more
        self._blocks, self._sequences, self._texts = BlockWatch(core.tables.pool), SequenceWatch(core), Texts()
        self._words, self._keyframes = Words(), Keyframes()
        self._ended_bytes = 0  # of texts that ended in the moments at hand
        facts = facts_of(core)
        self._base = State(facts)
        self._counters: list[float] = [0.0] * len(facts.counters)
        self._totals_of = totals_of(facts.counters)
        self._spans: list[Span] = []
        self._bytes: list[int] = []  # of each span, with the texts that end in it
        self._deltas: list[Delta] = []
        self._next_event = core.events.next_index
        self._marked: tuple[Any, ...] = ()
        self._record(core, state, None, self._blocks.note_all)

    # --- the engine's thread --------------------------------------------------------------------------------------

    def mark(self, state: str) -> None:
        """The core stands still between two steps, and `state` is the driver's word. Costs nothing when nothing has
        happened since the last mark. A fault ends the recording, not the engine."""
        core = self._core
        if core is None or self.fault is not None:
            return
        if (core.events.next_index, core.journal.step, state) == self._marked:
            return
        try:
            events, index, lost = core.events.since(self._next_event)
            told = None if lost else {event.request_id for event in events}
            self._record(core, state, told, self._blocks.note, events)
            self._next_event = index
        except Exception as fault:
            self.fault = fault

    def end(self) -> None:
        """The engine is closed: this was the last mark. Nothing of the engine is held any more."""
        with self._lock:
            self._core = self._registry = None
            del self._blocks, self._sequences

    def _record(
        self,
        core: EngineCore,
        state: str,
        told: set[int] | None,
        note_blocks: Callable[[Delta], None],
        events: list[Event] | None = None,
    ) -> None:
        delta = Delta(core.journal.step, time.monotonic(), state)
        note_blocks(delta)
        self._sequences.note(delta, told)
        self._note_counters(core, delta)
        if events:
            delta.events, delta.first_event = events, events[0].index
        else:
            delta.first_event = self._next_event
        ended = 0
        with self._lock:
            if len(self._deltas) >= SPAN:
                self._seal()
            moment = self._moment
            if self._registry is not None:
                if told is None:
                    concerned = {record.request_id for record in self._registry.records()}
                else:
                    concerned = told | {seq.request.id for seq in core.scheduler.running}
                ended = self._texts.follow(self._registry, concerned, moment)
            self._deltas.append(delta)
            self._ended_bytes = ended + (self._ended_bytes if len(self._deltas) > 1 else 0)
        self._marked = (core.events.next_index, core.journal.step, state)

    @property
    def _moment(self) -> int:
        """The number of the next moment."""
        return (self._spans[-1].end if self._spans else self._base.moment + 1) + len(self._deltas)

    def _note_counters(self, core: EngineCore, delta: Delta) -> None:
        values = list(core.metrics().values())
        held = self._counters
        for i, value in enumerate(values):
            if value != held[i]:
                delta.counters.append(i)
                delta.counter_values.append(value)
        self._counters = values
        delta.totals = self._totals_of(values)

    def _seal(self) -> None:
        """The moments at hand become columns; the oldest columns go where there are too many."""
        first = self._moment - len(self._deltas)
        span = Span.of(first, self._deltas, self._words)
        self._spans.append(span)
        self._bytes.append(span.nbytes + self._ended_bytes)
        self._deltas = []
        if sum(self._bytes) > self.max_bytes and len(self._spans) > 1:
            base = self._base.copy()  # recordings that were taken before go on reading theirs
            while sum(self._bytes) > self.max_bytes and len(self._spans) > 1:
                base.roll(self._spans[0], len(self._spans[0]))
                del self._spans[0], self._bytes[0]
            self._base = base
            self._texts.forget(base.moment)

    # --- any thread -----------------------------------------------------------------------------------------------

    def recording(self) -> Recording:
        """Everything up to the last mark."""
        with self._lock:
            return Recording(
                base=self._base,
                spans=tuple(self._spans),
                deltas=tuple(self._deltas),
                words=self._words,
                requests=self._texts.view(),
                info=self._info,
                config=self._config,
                decode=self._decode,
                decode_token=self._decode_token,
                keyframes=self._keyframes,
            )


def _plain(config: EngineConfig | None) -> dict[str, Any]:
    """EngineConfig's fields as a file can hold them."""
    if config is None:
        return {}
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    return {
        name: value if isinstance(value, bool | int | float | str | None) else str(value)
        for name, value in values.items()
    }
