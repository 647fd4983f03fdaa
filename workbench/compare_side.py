"""One side of a comparison: an engine that is stepped, or a recording that is played. Both look like an engine that stands
still after its latest step, and at any earlier one as far as its recording reaches.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvscope.engine.snapshot import EngineSnapshot

from .asking import ask, params_of
from .compare_tally import Tally
from .recorder import Recorder, Recording
from .scenarios import Scenario, ScenarioRun
from .theme import OwnerSlots

PACES: dict[str, Callable[[Tally], float]] = {
    "tokens": lambda tally: tally.computed,
    "time": lambda tally: tally.seconds,
    "steps": lambda tally: tally.steps,
}


class SideSlots(OwnerSlots):
    """The hues of one side: a request has the same hue on all sides, as long as it lives on one of them."""

    def __init__(self, common: OwnerSlots, live: dict[str, list[int]], letter: str):
        super().__init__()
        self._common, self._live_on, self._letter = common, live, letter

    def update(self, live_request_ids: Iterable[int]) -> None:
        self._live_on[self._letter] = list(live_request_ids)
        self._common.update(sorted({i for ids in self._live_on.values() for i in ids}))

    def slot(self, request_id: int) -> int:
        return self._common.slot(request_id)


class Side:
    """Base of both. `source` is the engine, or the moment of a recording; for a tick a side is that, as it was counted last.
    `state` says what the comparison does: "running" | "paused" | "stopped"."""

    recording: Recording
    tally: Tally
    slots: OwnerSlots  # set by the comparison

    def __init__(self, source: Any, letter: str, name: str, sentence: str, state: Callable[[], str]):
        self.letter, self.name, self.sentence, self._state = letter, name, sentence, state
        self._source, self.info = source, source.info
        self._next_index = source.events.next_index

    @property
    def has_work(self) -> bool:
        raise NotImplementedError

    def advance(self) -> bool:
        """One step; whether it computed anything."""
        raise NotImplementedError

    @property
    def step(self) -> int:
        return self.tally.snapshot.step

    def at(self, step: int) -> Any:
        """This side as it was after `step`, or after the oldest step that is still recorded."""
        return self.recording.at(min(max(step, self.recording.first_step), self.recording.last_step))

    def look(self) -> None:
        """Count what has happened."""
        snapshot = self._source.snapshot()
        events, self._next_index, _ = self._source.events.since(self._next_index)
        self.tally.add(snapshot, events)

    # -- as an engine, for a tick -------------------------------------------------------------------------------------

    @property
    def events(self) -> Any:
        return self._source.events

    @property
    def state(self) -> str:
        return self._state()

    def snapshot(self) -> EngineSnapshot:
        return replace(self.tally.snapshot, state=self.state)

    def handles(self) -> dict[int, Any]:
        return self._source.handles()

    def decode_token(self, token_id: int) -> str:
        return self._source.decode_token(token_id)


class EngineSide(Side):
    """Takes an engine over: it is paused as long as it is compared, and goes on afterwards if it did before."""

    def __init__(self, engine: Any, letter: str, name: str, sentence: str, state: Callable[[], str]):
        self.engine = engine
        self._goes_on = engine.state == "running"
        engine.pause()
        super().__init__(engine, letter, name, sentence, state)
        self._recorder = Recorder(engine)
        self._runs: list[ScenarioRun] = []
        self.tally = Tally(engine.snapshot())

    @property
    def recording(self) -> Recording:  # type: ignore[override]
        return self._recorder.recording

    @property
    def has_work(self) -> bool:
        return bool(self.tally.snapshot.requests) or any(run.to_come for run in self._runs)

    def submit(self, workload: Any, sampling: Mapping[str, Any], info: Any) -> Callable[[], None]:
        """`workload` as Comparison.submit; `info` is of the engine whose pool a scenario's lengths follow. Returns what takes
        it back, and has taken it back where something of it is refused: ValueError that names the side."""
        before = self.engine.handles().keys()

        def take_back() -> None:
            self._runs[:] = [run for run in self._runs if run is not begun]
            for number, handle in self.engine.handles().items():
                if number not in before:
                    handle.cancel()
            self.look()

        begun = ScenarioRun(workload, self.engine, info) if isinstance(workload, Scenario) else None
        try:
            if begun is not None:
                self._runs.append(begun)
                begun.advance()
                if begun.refusals:
                    raise ValueError(begun.refusals[0])
            else:
                for prompt in workload:
                    self._ask(prompt, sampling)
        except ValueError as refusal:
            take_back()
            raise ValueError(f"engine {self.letter}: {refusal}") from refusal
        self.look()
        return take_back

    def _ask(self, prompt: Any, sampling: Mapping[str, Any]) -> None:
        from kvscope.engine.bench.trace import Job, greedy

        if isinstance(prompt, Job):
            self.engine.submit(prompt.prompt, greedy(prompt.num_new))
        elif isinstance(prompt, str):
            ask(self.engine, prompt, sampling)
        else:
            self.engine.submit(prompt, params_of(sampling))

    def advance(self) -> bool:
        output = self.engine.step()
        self.look()
        for run in self._runs:
            if run.to_come:
                run.advance()
                self.look()
        return bool(output.scheduled)

    def release(self) -> None:
        """Give the engine back as it was."""
        self._recorder.stop()
        if self._goes_on and self.engine.state == "paused":
            self.engine.resume()


class RecordedSide(Side):
    """Plays a recording from its first step."""

    def __init__(self, recording: Recording, letter: str, name: str, sentence: str, state: Callable[[], str]):
        super().__init__(recording.at(recording.first_step), letter, name, sentence, state)
        self.recording = recording
        self.tally = Tally(self._source.snapshot())

    @property
    def has_work(self) -> bool:
        return self.step < self.recording.last_step

    def submit(self, workload: Any, sampling: Mapping[str, Any], info: Any) -> Callable[[], None]:
        raise RuntimeError(f"side {self.letter} is a recording: it has its requests; press Run, or call run()")

    def advance(self) -> bool:
        self._source = self.recording.at(self.step + 1)
        self.look()
        return True

    def release(self) -> None:
        """There is nothing to give back."""


def side_of(given: Any, letter: str, title: tuple[str, str] | None, state: Callable[[], str]) -> Side:
    """The side of an engine, of a recording or of the file of one. `title`: name and sentence; None: what it is."""
    if isinstance(given, str | os.PathLike):
        given = Recording.load(given)
    if isinstance(given, Recording):
        return RecordedSide(given, letter, *(title or (f"Recording of {given.info.model_name}", "")), state)
    if not (hasattr(given, "submit") and hasattr(given, "snapshot")):
        raise TypeError(f"side {letter}={given!r}: must be an Engine, a dict of engine options, or a Recording")
    info = given.info
    name = f"{info.model_name}, {info.num_blocks} blocks of {info.block_words}"
    return EngineSide(given, letter, *(title or (name, "")), state)


def readable(options: Mapping[str, Any]) -> str:
    """Engine options as a title."""
    return ", ".join(f"{name}={value}" for name, value in options.items()) or "as it is by default"


def workload_of(workload: Any) -> Any:
    """A Scenario, or a list of prompts. Raises TypeError, ValueError for anything else."""
    from .scenarios import scenario

    if isinstance(workload, str | Scenario):
        return scenario(workload)
    if isinstance(workload, Sequence) and workload:
        return list(workload)
    raise TypeError(f"workload={workload!r}: must be the name of a scenario, or a list of prompts or jobs")
