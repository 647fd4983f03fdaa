"""What an engine did, kept in bounded memory: any recorded moment can be looked at again, while the engine goes on.

A *moment* is the state at the end of step s: the last one before step s + 1 begins. What was submitted, cancelled or paused
between the two belongs to it. The engine's side is `kvscope.engine.recording`; here it is joined to a workbench:

    Recorder    keeps an engine recorded as long as somebody holds it
    Recording   what was recorded so far, or a file: never changes, any thread may read it
    Moment      a recording at one step, with the face of an engine: what `Tick` reads, and so what every view draws

This module needs numpy only.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from kvscope.engine.events import Event, EventKind
from kvscope.engine.info import EngineInfo
from kvscope.engine.outputs import RequestOutput
from kvscope.engine.snapshot import EngineSnapshot


@dataclass(frozen=True, slots=True)
class Series:
    """One entry a recorded step, oldest first; entry i is about step `first_step + i`. For a scrubber and charts."""

    steps: np.ndarray  # int32
    time: np.ndarray  # float64, seconds, time.monotonic() of the engine's process
    used_blocks: np.ndarray  # int32: blocks with a reader at the end of the step
    evictions: np.ndarray  # int32: blocks that lost their text to someone who needed room
    preemptions: np.ndarray  # int32: samples
    swaps: np.ndarray  # int32: moves to host memory or back
    copies: np.ndarray  # int32: blocks copied on write


class Recording:
    """What an engine did from `first_step` to `last_step`, both included. Immutable; reading it asks no engine."""

    first_step: int
    last_step: int
    info: EngineInfo  # as Engine.info, without `spec`: model_name, num_blocks, dtype, weights_source, …
    config: dict[str, Any]  # EngineConfig's fields as plain values
    series: Series

    def state_at(self, step: int) -> EngineSnapshot:
        """The snapshot of the end of this step, equal to the live one in every field but `time`, which is when it was
        recorded. Raises ValueError, naming the steps that there are, for any other."""
        raise NotImplementedError

    def events_until(self, step: int) -> list[Event]:
        """Every recorded event up to the end of this step, oldest first."""
        raise NotImplementedError

    def steps_with(self, *kinds: EventKind) -> np.ndarray:
        """Steps in which an event of one of these kinds came, ascending, each once: int32. For "next eviction"."""
        raise NotImplementedError

    def outputs_at(self, step: int) -> dict[int, RequestOutput]:
        """What each request had written by the end of this step, by id: those that lived then and the latest that were over.
        Text, token ids, log-probabilities, finish reasons and times are those that its handle's `partial()` gave."""
        raise NotImplementedError

    def decode_token(self, token_id: int) -> str:
        """One token as it reads inside a text, as Engine.decode_token."""
        raise NotImplementedError

    def at(self, step: int) -> Moment:
        """This recording at one step. Raises ValueError as `state_at`."""
        raise NotImplementedError

    def save(self, path: str | Path) -> Path:
        """Write it to one file, as a whole or not at all; the path."""
        raise NotImplementedError

    @classmethod
    def load(cls, path: str | Path) -> Recording:
        """Read a file that `save` wrote; "demo" is the recording that came with kvscope. Raises ValueError with a sentence for
        a file that is none, is damaged or is of a later version, and FileNotFoundError."""
        raise NotImplementedError


class Moment:
    """A recording at the end of one step, as an engine that stands still there.

    `events.next_index` and `events.since(index)` end with that step's last event; an index behind it, of a view that was
    further on, gives ([], next_index, 0): a view that goes back begins anew with since(0). `state` is "paused", and so is that of
    `snapshot()`, since nothing moves while one looks; `recording.state_at(step).state` says what it was.
    """

    recording: Recording
    step: int
    info: EngineInfo
    state: str
    events: Any

    def snapshot(self) -> EngineSnapshot:
        raise NotImplementedError

    def handles(self) -> dict[int, Any]:
        """By request id; each has `request_id`, `status`, `done`, `prompt_text` and `partial() -> RequestOutput`."""
        raise NotImplementedError

    def decode_token(self, token_id: int) -> str:
        raise NotImplementedError


class Recorder:
    """Keeps `engine` recorded while this object is held and not stopped. All recorders of an engine share one record, so that
    ten viewers of one engine cost what one costs."""

    def __init__(self, engine: Any):
        raise NotImplementedError

    @property
    def recording(self) -> Recording:
        """Everything up to now. Costs microseconds; a running engine's newest step may be missing."""
        raise NotImplementedError

    def catch_up(self) -> Recording:
        """The same, up to the state in which the engine is now; waits for one step at most."""
        raise NotImplementedError

    def stop(self) -> None:
        """Record no more; what was recorded stays. Any number of times."""
        raise NotImplementedError


# --- what the workbench makes of it (workbench.py) ----------------------------------------------------------------------
#
# wb.recording            Recording up to now (of a replay: the file)
# wb.is_replay            True for Workbench.replay(...): wb.engine is then a `Moment`-like object whose submit, pause,
#                         resume, step … raise RuntimeError with a sentence
# wb.looking_at           int | None: the step at which all views stand; None: live (a replay always stands at a step)
# wb.goto(step)           look at the end of this step; the engine may go on
# wb.back(n=1)            n steps back from where one looks, at most to the first recorded one; returns the step
# wb.now()                back to live; in a replay, to the last step
# wb.state_at(step)       EngineSnapshot
# wb.save(path), Workbench.replay(path | "demo" | Recording)
