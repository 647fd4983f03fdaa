"""An engine kept recorded for a workbench, and what takes the engine's place where there is only a recording.

    Recorder    keeps an engine recorded as long as somebody holds it
    Recording   what was recorded so far, or a file: never changes, any thread may read it
    Moment      a recording at one step, with the face of an engine: what `Tick` reads, and so what every view draws
    Replay      the engine of a workbench that has none: it shows the last step, and says so when it is asked to work

A *moment* is the state at the end of step s: the last one before step s + 1 begins. What was submitted, cancelled or paused
between the two belongs to it. `kvscope.engine.recording` does the work; needs numpy only.
"""

from __future__ import annotations

from typing import Any, NoReturn

from kvscope.engine.recording.moment import Moment
from kvscope.engine.recording.recording import Recording, Series

__all__ = ["Moment", "Recorder", "Recording", "Replay", "Series"]


class Recorder:
    """Keeps `engine` recorded while this object is held and not stopped. All recorders of an engine share one tape, so that ten
    viewers of one engine cost what one costs. Raises EngineClosed for an engine that is closed already."""

    def __init__(self, engine: Any):
        self._engine = engine
        self._tape = engine.record()
        self._stopped: Recording | None = None

    @property
    def recording(self) -> Recording:
        """Everything up to the newest step that has ended. Costs microseconds. Where recording failed: up to then."""
        return self._tape.recording() if self._stopped is None else self._stopped

    @property
    def fault(self) -> Exception | None:
        """Why nothing is recorded any more; the engine itself goes on."""
        return None if self._tape is None else self._tape.fault

    def catch_up(self) -> Recording:
        """The same, up to the state in which the engine is now; waits for one step at most."""
        if self._stopped is None:
            self._engine.snapshot()  # leaves its state on the tape
        return self.recording

    def stop(self) -> None:
        """Record no more, and hold the engine no more; what was recorded stays. Any number of times."""
        if self._stopped is None:
            self._stopped = self.catch_up()
            self._engine = self._tape = None


class Replay:
    """`recording` in the place of an engine. It reads as the engine did at its last step; whatever would make an engine work
    raises RuntimeError with a sentence."""

    state = "stopped"
    tokenizer = None

    def __init__(self, recording: Recording):
        self.recording = recording
        self.while_waiting: list[Any] = []
        self._last = recording.at(recording.last_step)
        self.info, self.events = recording.info, self._last.events
        self.snapshot, self.handles, self.decode_token = (
            self._last.snapshot,
            self._last.handles,
            self._last.decode_token,
        )

    def metrics(self) -> dict[str, float]:
        """Those of its last step."""
        return dict(self.snapshot().counters)

    def close(self) -> None:
        """There is nothing to close."""

    def __getattr__(self, name: str) -> Any:
        if name not in _WORK:
            raise AttributeError(f"a recording has no {name!r}")

        return lambda *arguments, **options: self.refuse(name)

    def refuse(self, name: str) -> NoReturn:
        raise RuntimeError(f"{name}() needs an engine, and this is a recording of one; Workbench() makes one")

    def __repr__(self) -> str:
        return f"<Replay of {self.recording!r}>"


_WORK = frozenset(
    {"submit", "generate", "chat", "pause", "resume", "step", "run_until", "wait_idle", "reset_prefix_cache",
     "check_integrity", "record"}
)  # fmt: skip
