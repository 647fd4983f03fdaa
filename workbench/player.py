"""Where in time a workbench stands, and how it moves: live, in its engine's past, or in a recording shown in its place.

    engine, live ───────────────────────────┐
    engine's recording, at a step ── Moment ─┼─▶ `source()`, which a `Tick` reads and so every view draws
    a file, or the demo, at a step ─ Moment ─┘

Back, step, run and the scrubber mean the same everywhere: where there is no newer recorded step they move the engine, before
that they move through what was recorded. The engine may go on while one looks at the past. Any thread may call anything.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from kvscope.engine.breakpoint import NAMES
from kvscope.engine.config import is_integer
from kvscope.engine.events import EventKind

from .sub_step import PARTS, SubStep

if TYPE_CHECKING:
    from .recorder import Recording

PLAYED = 20.0  # recorded steps a second, where no speed is set
_MOST_BEHIND = 0.5  # seconds of play that a late tick may catch up with


class Player:
    """`engine` None: there is only a recording. `record()` gives the engine's own recording up to now, or None."""

    def __init__(self, engine: Any, record: Callable[[], Recording | None], *, shown: Recording | None = None):
        self._engine, self._record = engine, record
        self._lock = threading.RLock()
        self._file = shown
        self._at = None if shown is None else shown.last_step
        self._part = len(PARTS)  # of the step that is looked at, how much of it is done; the last: all
        self._moment: tuple[Any, Any] = (None, None)
        self._playing = False
        self._played_at = 0.0
        self.speed: float | None = None  # recorded steps a second; None: PLAYED
        self.origin = 0  # another number when another recording is shown: nothing that was drawn holds any more

    # -- where it stands ----------------------------------------------------------------------------------------------

    @property
    def recording(self) -> Recording | None:
        """What one can look back in: the shown file, or what was recorded of the engine so far."""
        return self._file if self._file is not None else self._record()

    @property
    def at(self) -> int | None:
        """The step that is looked at; None: live."""
        return self._at

    @property
    def part(self) -> int:
        """How many of the six parts of the step that is looked at are done: 6 but inside of a step."""
        return self._part

    @property
    def shows_file(self) -> bool:
        return self._file is not None

    @property
    def has_engine(self) -> bool:
        return self._engine is not None

    @property
    def can_leave(self) -> bool:
        """A file is shown in the place of an engine."""
        return self.shows_file and self.has_engine

    @property
    def playing(self) -> bool:
        return self._playing

    def source(self) -> Any:
        """The engine, or a `Moment`: what has `events`, `snapshot()`, `handles()`, `decode_token()`, `info` and `state`."""
        with self._lock:
            if self._at is None:
                return self._engine
            recording = self.recording
            assert recording is not None
            self._at = max(self._at, recording.first_step)  # an old step may have been dropped to make room
            wanted = (self.origin, self._at, self._part)
            if self._moment[0] != wanted:
                inside = self._part < len(PARTS) and self._at > recording.first_step
                self._moment = wanted, SubStep(recording, *wanted[1:]) if inside else recording.at(self._at)
            return self._moment[1]

    # -- moving -------------------------------------------------------------------------------------------------------

    def goto(self, step: int) -> int:
        """Look at the end of this step. Raises ValueError, naming the steps that there are, for one that was not recorded."""
        with self._lock:
            moment = self._require().at(step)
            self._at, self._part, self._playing = step, len(PARTS), False
            self._moment = (self.origin, step, self._part), moment
            return step

    def back(self, n: int = 1) -> int:
        """`n` steps back from where one looks, at most to the first that is recorded."""
        require_count(n, "steps")
        with self._lock:
            recording = self._require()
            here = recording.last_step if self._at is None else self._at
            return self.goto(max(recording.first_step, here - n))

    def forward(self, n: int = 1) -> None:
        """`n` steps on in what was recorded; from its end on, live."""
        with self._lock:
            recording = self._require()
            if self._at is None or self._at + n >= recording.last_step:
                self.now()
            else:
                self.goto(self._at + n)

    def first(self) -> int:
        return self.goto(self._require().first_step)

    def now(self) -> None:
        """Back to live; in a file, to its last step."""
        with self._lock:
            self._playing, self._part = False, len(PARTS)
            self._at = None if self._file is None else self._file.last_step

    def sub_step(self, by: int) -> bool:
        """One part of a step on (`by` 1), from the end of a step into the next one, or back (−1); False where nothing is recorded
        there. After the last part of the newest step it is live."""
        with self._lock:
            recording = self._require()
            step = recording.last_step if self._at is None else self._at
            parts = (step - recording.first_step) * len(PARTS) + self._part - len(PARTS) + by
            if not 0 <= parts <= (recording.last_step - recording.first_step) * len(PARTS):
                return False
            step, part = recording.first_step + -(-parts // len(PARTS)), (parts - 1) % len(PARTS) + 1
            if part == len(PARTS) and step == recording.last_step:
                self.now()
            else:
                self.goto(step)
                self._part = part
            return True

    def seek(self, by: int, kinds: frozenset[EventKind] = NAMES["event"][1]) -> bool:
        """To the next (`by` 1) or previous (−1) recorded step with such an event; False where there is none."""
        with self._lock:
            recording = self._require()
            steps = recording.steps_with(*kinds)
            here = recording.last_step if self._at is None else self._at
            place = int(np.searchsorted(steps, here, "right" if by > 0 else "left")) + (0 if by > 0 else -1)
            if not 0 <= place < len(steps) or int(steps[place]) < recording.first_step:
                return False
            self.goto(int(steps[place]))
            return True

    # -- playing ------------------------------------------------------------------------------------------------------

    def play(self, now: float) -> None:
        """Let the recorded steps pass, from here or, at the end of a file, from its start."""
        with self._lock:
            if self._at is None:
                return
            self._part = len(PARTS)
            if self._file is not None and self._at >= self._file.last_step:
                self._at = self._file.first_step
            self._playing, self._played_at = True, now

    def stop(self) -> None:
        self._playing = False

    def advance(self, now: float) -> None:
        """Called before every tick: while it plays, move on by the time that has passed."""
        with self._lock:
            if not self._playing or self._at is None:
                return
            rate = self.speed or PLAYED
            self._played_at = max(self._played_at, now - _MOST_BEHIND)
            steps = int((now - self._played_at) * rate)
            if steps:
                self._played_at += steps / rate
                last = self._require().last_step
                if self._at + steps >= last:
                    self.now()
                else:
                    self._at += steps

    # -- another recording in place -----------------------------------------------------------------------------------

    def show(self, recording: Recording, now: float) -> None:
        """Show a recording in the place of the engine, from its start, playing. The engine is left alone."""
        with self._lock:
            self._file, self._at, self._part = recording, recording.first_step, len(PARTS)
            self.origin += 1
            self._playing, self._played_at = True, now

    def leave(self) -> None:
        """Back to the engine, live."""
        with self._lock:
            if not self.can_leave:
                raise RuntimeError("this workbench shows a recording and has no engine to go back to")
            self._file, self._at, self._part, self._playing = None, None, len(PARTS), False
            self.origin += 1

    def _require(self) -> Recording:
        recording = self.recording
        if recording is None or recording.last_step < recording.first_step:
            raise ValueError("nothing has been recorded yet; run a step first")
        return recording


def require_count(n: Any, of: str) -> None:
    """Raise ValueError where `n` is no number of steps or turns to go."""
    if not is_integer(n) or n < 1:
        raise ValueError(f"n={n!r}: must be a number of {of}, at least 1")
