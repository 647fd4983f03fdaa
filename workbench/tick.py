"""One tick: the newest state of an engine, read once and handed to every view that asks.

The snapshot, the handles and the texts are each read at most once a tick, however many views and screens look; events
are read once for each place in the log that a view has reached.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

from kvscope.engine.events import EventKind
from kvscope.engine.outputs import RequestOutput
from kvscope.engine.snapshot import EngineSnapshot

from .theme import OwnerSlots
from .views.base import Frame, Selection, View

if TYPE_CHECKING:
    from .recorder import Recording

MOST_EVENTS = 1000  # a tick of a view that follows: what a very small model does in a tenth of a second
MOST_MISSED = 20_000  # when a view is seen again after a while, or time has jumped


class Tick:
    """`engine` is whatever has `events`, `snapshot()`, `handles()`, `decode_token()`, `info` and `state`: an engine, or a
    `Moment` of a recording. `origin` differs where another recording is shown; `part` says how much of the step is done, as
    `Player.part`; `recording` is what the player's track draws."""

    def __init__(
        self,
        engine: Any,
        selection: Selection | None,
        slots: OwnerSlots,
        *,
        origin: int = 0,
        part: int = 0,
        recording: Recording | None = None,
    ):
        self._engine, self._selection, self._slots = engine, selection, slots
        self.origin, self.part, self.recording = origin, part, recording
        self.now = time.monotonic()
        self.asked = (
            origin,
            part,
            engine.events.next_index,
            engine.state,
        )  # differs exactly when something has happened
        self._snapshot: EngineSnapshot | None = None
        self._frames: dict[tuple[int, int], tuple[Frame, int]] = {}
        self._handles: dict[int, Any] | None = None
        self._outputs: dict[int, RequestOutput | None] = {}

    @property
    def snapshot(self) -> EngineSnapshot:
        if self._snapshot is None:
            self._snapshot = self._engine.snapshot()
        return self._snapshot

    def frame(self, index: int, most: int = MOST_EVENTS) -> tuple[Frame, int]:
        """The frame for a view that has read the log up to `index`, and the index to ask with next time. Of more than
        `most` events the oldest count as lost: a view must never cost more because the engine is fast."""
        if (index, most) not in self._frames:
            snapshot = self.snapshot
            events, next_index, lost = self._engine.events.since(index)
            # The engine may be further by now: what came after the snapshot is left for the next tick. Requests arrive
            # between two steps, so the step alone does not tell it.
            seen = (snapshot.step, snapshot.time)
            later = next((i for i, e in enumerate(events) if e.step > seen[0] or e.time > seen[1]), len(events))
            if later < len(events):
                next_index = events[later].index
                events = events[:later]
            skipped = max(0, len(events) - most)
            events, lost = events[skipped:], lost + skipped
            frame = Frame(snapshot, events, lost, self._selection, self._engine.info, self.now, self._slots)
            self._frames[index, most] = (frame, next_index)
        return self._frames[index, most]

    def output(self, request_id: int) -> RequestOutput | None:
        """What a request has written so far; None for one that is not known any more."""
        if request_id not in self._outputs:
            if self._handles is None:
                self._handles = self._engine.handles()
            handle = self._handles.get(request_id)
            self._outputs[request_id] = None if handle is None else handle.partial()
        return self._outputs[request_id]

    def arrival(self, request_id: int) -> int | None:
        """The step after this one with which a request arrives in what was recorded; None where it does not."""
        recording, step = self.recording, self.snapshot.step
        if recording is None or step >= recording.last_step:
            return None
        here, end = (recording.moment_at(at) for at in (max(step, recording.first_step), recording.last_step))
        later = recording.events_between(here + 1, end + 1)
        return next((e.step for e in later if e.kind is EventKind.SUBMITTED and e.request_id == request_id), None)

    def decode(self, token_id: int) -> str:
        return self._engine.decode_token(token_id)


class Reader:
    """How far a view has read the log. `read` gives it its next frame; where time went back, or another recording is
    shown, the view is reset first and gets everything from the start."""

    def __init__(self) -> None:
        self.next_index = 0
        self._at = (0, 0, 0)  # origin, part, step
        self._read_at = -math.inf
        self._ran = False

    def read(self, tick: Tick, view: View, *, drawn_at: float = -math.inf) -> Frame:
        """`drawn_at` is when the view's page was drawn before: a view that was no part of it, because its tab was hidden, may
        catch up. How long ago that was says nothing: a page waits for its share of CPU time, and would wait for ever longer
        if the wait itself made it read more."""
        snapshot = tick.snapshot
        origin, part, step = self._at
        # Inside of a step its events come in another order than in the log: then too everything is read anew.
        if (tick.origin, tick.part) != (origin, part) or snapshot.step < step:
            view.reset()
            self.next_index = 0
        runs = snapshot.state == "running"
        follows = runs and self._ran and self._read_at >= drawn_at
        frame, self.next_index = tick.frame(self.next_index, MOST_EVENTS if follows else MOST_MISSED)
        self._at, self._read_at, self._ran = (tick.origin, tick.part, snapshot.step), tick.now, runs
        return frame
