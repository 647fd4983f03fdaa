"""A recording of a `FakeEngine`: all of its snapshots, kept as they were, with the face of `Recording` and `Moment`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from fake_frames import FakeEngine
from kvscope.engine.events import EventKind
from kvscope.workbench.recorder import Series


class FakeRecording:
    """`record()` after every step of the engine."""

    info = None
    config: dict = {}  # noqa: RUF012

    def __init__(self, engine: FakeEngine):
        self.engine = engine
        self._snapshots: dict[int, object] = {}
        self._ends: dict[int, int] = {}

    @property
    def first_step(self) -> int:
        return min(self._snapshots, default=0)

    @property
    def last_step(self) -> int:
        return max(self._snapshots, default=-1)

    def record(self) -> None:
        step = self.engine.step_number
        self._snapshots[step] = replace(self.engine.snapshot(), state="paused")
        self._ends[step] = self.engine.events.next_index

    def forget(self, before: int) -> None:
        self._snapshots = {s: snapshot for s, snapshot in self._snapshots.items() if s >= before}

    @property
    def series(self) -> Series:
        steps = np.array(sorted(self._snapshots), np.int32)
        counts = {kind: np.zeros(len(steps), np.int64) for kind in ("evicted", "preempted", "swapped_out", "copied")}
        for event in self.engine.events.since(0)[0]:
            if event.kind in counts and self.first_step <= event.step <= self.last_step:
                counts[event.kind][np.searchsorted(steps, event.step)] += 1
        used = np.array([self._snapshots[s].num_used_blocks for s in steps], np.int64)
        return Series(steps, steps * 0.05, used, *counts.values())

    def steps_with(self, *kinds: EventKind) -> np.ndarray:
        found = {e.step for e in self.engine.events.since(0)[0] if e.kind in kinds and e.step >= self.first_step}
        return np.array(sorted(found), np.int32)

    def moment_at(self, step: int) -> int:
        return step

    def events_between(self, start: int, stop: int) -> list:
        return [e for e in self.engine.events.since(0)[0] if start <= e.step < stop]

    def at(self, step: int) -> FakeMoment:
        if step not in self._snapshots:
            raise ValueError(f"step={step}: recorded are steps {self.first_step} to {self.last_step}")
        return FakeMoment(self, step)


class FakeMoment:
    info, state = None, "paused"

    def __init__(self, recording: FakeRecording, step: int):
        self._recording, self._step = recording, step
        self.events = self
        self.next_index = recording._ends[step]

    def since(self, index: int):
        if index >= self.next_index:
            return [], self.next_index, 0
        return (
            [e for e in self._recording.engine.events.since(index)[0] if e.index < self.next_index],
            self.next_index,
            0,
        )

    def snapshot(self):
        return self._recording._snapshots[self._step]

    def handles(self):
        return {}

    def decode_token(self, token_id: int) -> str:
        return f"<{token_id}>"
