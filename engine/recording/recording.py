"""A recording as it is read: base, spans and what requests wrote. It never changes, and any thread may read it.

A state is rolled forward from the nearest one known: the base, or one of those that were made at the borders of spans by
whoever looked before. So the engine makes no keyframes, and a person who scrubs pays for them once.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..config import is_integer
from ..events import Event, EventKind
from ..info import EngineFacts
from ..outputs import RequestOutput
from ..snapshot import EngineSnapshot
from .delta import KIND_CODE, TOTALS, Delta
from .span import Span
from .state import State, moment_of
from .texts import RequestTrack
from .words import Words

if TYPE_CHECKING:
    from .moment import Moment

DEMO = Path(__file__).with_name("demo.kvscope")  # made by demo.py
KEYFRAME_BYTES = 4 << 20  # of the states at the borders of spans, at least two of them


@dataclass(frozen=True, slots=True)
class Series:
    """One entry a recorded step, oldest first. For a scrubber and for charts."""

    steps: np.ndarray  # int32, ascending
    time: np.ndarray  # float64, seconds, time.monotonic() of the engine's process
    used_blocks: np.ndarray  # int32: blocks with a reader at the end of the step
    evictions: np.ndarray  # int32: cached blocks that lost their text to someone who needed room
    preemptions: np.ndarray  # int32: samples that lost their blocks
    swaps: np.ndarray  # int32: blocks moved to host memory or back
    copies: np.ndarray  # int32: blocks copied on write


class Keyframes:
    """What the recordings of one tape need not make twice: states by moment, the least recently used of which go, and the
    columns of the series."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._states: OrderedDict[int, State] = OrderedDict()
        self._columns: tuple[tuple[int, int] | None, list[np.ndarray]] = (None, [])

    def before(self, moment: int, base: State) -> State:
        """The latest one known that is not after `moment`; never to be changed."""
        with self._lock:
            best = max((m for m in self._states if base.moment < m <= moment), default=None)
            if best is None:
                return base
            self._states.move_to_end(best)
            return self._states[best]

    def columns(self, spans: tuple[Span, ...], names: tuple[str, ...]) -> list[np.ndarray]:
        """These columns of the moments of all spans; made again only when there are other spans."""
        key = (spans[0].first, spans[-1].end) if spans else None
        with self._lock:
            if self._columns[0] != key or key is None:
                columns = [np.concatenate([np.zeros(0), *(span.moments[name] for span in spans)]) for name in names]
                self._columns = key, columns
            return self._columns[1]

    def keep(self, state: State) -> None:
        with self._lock:
            self._states[state.moment] = state
            while len(self._states) > 2 and sum(s.nbytes for s in self._states.values()) > KEYFRAME_BYTES:
                self._states.popitem(last=False)


class Recording:
    """What an engine did from `first_step` to `last_step`, both included.

    Attributes: `info` (as Engine.info, without `spec`; None of a core alone), `config` (EngineConfig's fields as plain values).
    """

    def __init__(
        self,
        *,
        base: State,
        spans: tuple[Span, ...],
        deltas: tuple[Delta, ...],
        words: Words,
        requests: dict[int, RequestTrack],
        info: EngineFacts | None,
        config: dict[str, Any],
        decode: Callable[[list[int]], str],
        decode_token: Callable[[int], str],
        keyframes: Keyframes | None = None,
    ):
        self._base, self._sealed, self._deltas, self._words = base, spans, deltas, words
        self._requests, self._decode, self._decode_token = requests, decode, decode_token
        self.info, self.config = info, config
        self._keyframes = Keyframes() if keyframes is None else keyframes

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """All moments as columns."""
        if not self._deltas:
            return self._sealed
        first = self._sealed[-1].end if self._sealed else self._base.moment + 1
        return (*self._sealed, Span.of(first, list(self._deltas), Words()))

    @property
    def base(self) -> State:
        """The state before the first moment of the first span: never to be changed."""
        return self._base

    @property
    def requests(self) -> dict[int, RequestTrack]:
        """What each request has written, by id; of what came after the last moment its tracks may tell too."""
        return self._requests

    # --- time -----------------------------------------------------------------------------------------------------

    @property
    def first_step(self) -> int:
        if self._base.is_known:
            return self._base.step
        return int(self._sealed[0].steps[0]) if self._sealed else self._deltas[0].step

    @property
    def last_step(self) -> int:
        return self._deltas[-1].step if self._deltas else int(self._sealed[-1].steps[-1])

    @property
    def num_moments(self) -> int:
        return (self._sealed[-1].end if self._sealed else self._base.moment + 1) + len(self._deltas)

    @cached_property
    def series(self) -> Series:
        names = ("step", "time", *TOTALS)
        base = [(self._base.step, self._base.time, *self._base.totals)] if self._base.is_known else []
        late = [(delta.step, delta.time, *delta.totals) for delta in self._deltas]
        columns = self._keyframes.columns(self._sealed, names)
        moments = {
            name: np.concatenate([[row[i] for row in base], columns[i], [row[i] for row in late]])
            for i, name in enumerate(names)
        }
        last = np.flatnonzero(np.diff(moments["step"], append=-1))  # of a step with several moments the last counts
        grown = {name: np.diff(moments[name][last], prepend=moments[name][0]) for name in list(TOTALS)[1:]}
        counts = {name: value.astype(np.int32) for name, value in grown.items()}
        steps, used = (moments[name][last].astype(np.int32) for name in ("step", "used_blocks"))
        return Series(steps, moments["time"][last], used, **counts)

    # --- what was ---------------------------------------------------------------------------------------------------

    def state_at(self, step: int) -> EngineSnapshot:
        """The snapshot of the end of this step, equal to the live one in every field but `time`, which is when it was
        recorded. Raises ValueError, naming the steps that there are, for any other."""
        return self.moment_state(self.moment_at(step)).snapshot()

    def moment_at(self, step: int) -> int:
        """The number of the last moment of this step."""
        if not is_integer(step):
            raise ValueError(f"step={step!r}: must be the number of a step")
        if not self.first_step <= step <= self.last_step:
            raise ValueError(f"step={step}: recorded are steps {self.first_step} to {self.last_step}")
        number, stop = moment_of(self.spans, int(step))
        return self.spans[number].first + stop - 1 if stop else self._base.moment

    def moment_state(self, moment: int) -> State:
        """The state at a moment, the caller's own."""
        state = self._keyframes.before(moment, self._base)
        if state.moment == moment:
            return state.copy()
        for span in self.spans:
            if span.end - 1 <= state.moment:
                continue
            if moment < span.end:
                state = state.copy()
                state.roll(span, moment - span.first + 1)
                return state
            state = state.copy()
            state.roll(span, len(span))
            self._keyframes.keep(state)
        return state.copy()

    def events_until(self, step: int) -> list[Event]:
        """Every recorded event up to the end of this step, oldest first."""
        return self.events_between(0, self.moment_at(step) + 1)

    def events_between(self, start: int, stop: int) -> list[Event]:
        """Those that came with moments `start` … `stop − 1`."""
        found: list[Event] = []
        for span in self.spans:
            if start < span.end and span.first < stop:
                found += span.events(max(0, start - span.first), min(stop, span.end) - span.first)
        return found

    def steps_with(self, *kinds: EventKind) -> np.ndarray:
        """Steps in which an event of one of these kinds came, ascending, each once: int32. For "the next eviction"."""
        codes = [KIND_CODE[EventKind(kind)] for kind in kinds]
        parts = [span.tables["events"][np.isin(span.tables["events"][:, 1], codes), 0] for span in self.spans]
        return np.unique(np.concatenate(parts)) if parts else np.zeros(0, np.int32)

    def outputs_at(self, step: int) -> dict[int, RequestOutput]:
        """What each request had written by the end of this step, by id: those that lived then and the latest that were over.
        Equal to what its handle's `partial()` gave then."""
        moment = self.moment_at(step)
        found = ((request_id, self._requests[request_id].at(moment)) for request_id in sorted(self._requests))
        return {request_id: output for request_id, output in found if output is not None}

    def decode_token(self, token_id: int) -> str:
        """One token as it reads inside a text, as Engine.decode_token."""
        return self._decode_token(token_id)

    def prompt_text(self, track: RequestTrack) -> str:
        """A request's prompt as text; one of token ids is decoded."""
        return self._decode(track.prompt_token_ids) if track.prompt_text is None else track.prompt_text

    def at(self, step: int) -> Moment:
        """This recording at one step, with the face of an engine. Raises ValueError as `state_at`."""
        from .moment import Moment

        return Moment(self, int(step))

    # --- files ------------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> Path:
        """Write it to one file, as a whole or not at all; the path."""
        from .file import write

        return write(self, Path(path))

    @classmethod
    def load(cls, path: str | Path) -> Recording:
        """Read a file that `save` wrote; "demo" is the one that comes with kvscope. Raises ValueError with a sentence for one
        that is none, is damaged or is of another version, and FileNotFoundError."""
        from .file import read

        return read(DEMO if path == "demo" else Path(path))

    def __repr__(self) -> str:
        name = "" if self.info is None else f" {self.info.model_name}:"
        return f"<Recording{name} steps {self.first_step} to {self.last_step}, {len(self._requests)} requests>"
