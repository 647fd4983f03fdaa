"""`Workbench`: an engine, its views and its controls. The last line of a cell shows it, live.

    wb = Workbench("default", num_blocks=256)      # or Workbench(engine)
    wb                                             # header, pool, requests, text, log
    wb.submit("Hello", max_tokens=64)              # everything on the page is also a method

It never makes the engine wait: views pull snapshots and events at their own pace. A workbench that made its engine
closes it too. Commands from the page run on the viewer's thread, methods on the caller's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from kvscope.engine.breakpoint import MAX_STEPS
from kvscope.engine.events import Event
from kvscope.engine.snapshot import EngineSnapshot

from .asking import ask, params_of, split
from .controls import Commands
from .display import Display
from .feeder import Feeder
from .layout import Screen
from .player import Player, require_count
from .recorder import Recorder, Recording, Replay
from .scenarios import Scenario, ScenarioRun, scenario
from .selection import Choices, parse
from .sentences import Context, lines
from .tables import Tables
from .theme import OwnerSlots
from .tick import Tick
from .trace_export import save_trace
from .traffic import Traffic
from .viewer import CPU_SHARE, STILL_SHARE
from .views.base import Selection
from .views.header import Status
from .views_of import Views
from .workshop import Workshop


class Workbench(Display):
    """`engine`: an Engine, or what `Engine` takes; `options` are then EngineConfig's fields.

    Attributes: `engine`, `choices` (what is selected and how it is shown), `player` (where in time all views stand),
    `views` (each view alone: `wb.views.block_map`).
    """

    def __init__(self, engine: Any = "default", **options: Any):
        super().__init__()
        self._owns_engine = not hasattr(engine, "snapshot")
        if self._owns_engine:
            from kvscope.engine import Engine

            engine = Engine(engine, **options)
        elif options:
            raise TypeError(f"{', '.join(options)}: options are for an engine that Workbench makes; this one exists")
        self.engine = engine
        self.choices = Choices()
        self._recorder = None if engine.state == "stopped" else Recorder(engine)
        shown = engine.recording if isinstance(engine, Replay) else None
        self.player = Player(None if shown else engine, self._record, shown=shown)
        self.views = Views(self)
        self._slots = {
            True: OwnerSlots(),
            False: OwnerSlots(),
        }  # of a recording shown in the engine's place; of the engine
        self._last_index = 0
        self._feeders: list[Feeder] = []
        self._traffic: Traffic | None = None
        self.current_workshop: Workshop | None = None
        self._commands = Commands(self)

    # -- everything that the page can do ------------------------------------------------------------------------------

    def submit(self, prompt: Any, params: Any = None, **options: Any) -> Any:
        """Queue a request and return its handle. `params` is a SamplingParams, or give its fields by name; priority=,
        deadline= and the options of chat messages are those of `Engine.submit`."""
        sampling, beside = split(options)
        if params is not None and sampling:
            raise TypeError(f"submit() got params and {', '.join(sampling)}; give one of them")
        return self.engine.submit(prompt, params_of(sampling) if params is None else params, **beside)

    def ask(self, question: str | Sequence[str], **options: Any) -> Any:
        """Submit a question as the model expects one: as a chat message where it has a template, else as it stands.
        A conversation is a list: question, answer, question, …. With beam_width=, a beam search; other options as in
        `submit`."""
        return ask(self.engine, question, options)

    def run(self, name: str | Scenario | None = None) -> list[Any]:
        """Go on after a pause; with the name of a scenario, ask its questions instead. Returns their handles: a list that
        grows where questions wait for answers, and whose `wait()` gives all outputs. Raises ValueError when none of them
        can be served here."""
        if name is None:
            self.engine.resume()
            return []
        run = ScenarioRun(scenario(name), self.engine)
        if run.advance() is not None:
            self._feed(run.advance)
        if run.refusals and not run:
            raise ValueError(run.refusals[0])
        return run

    def traffic(self, *, rate: float | None = None, shape: str = "poisson", **options: Any) -> Traffic:
        """Let requests arrive by themselves until `stop()`, in place of traffic that was on its way. `shape`: "poisson" |
        "bursts" | "steady" | "ramp"; or trace="requests.jsonl". `Traffic` says the other options. Ends with the workbench."""
        if self.is_replay:
            self.engine.refuse("traffic")
        traffic = Traffic(self.engine, rate=rate, shape=shape, **options)
        self.stop_traffic()
        self._traffic = traffic
        self._feed(traffic.advance)
        return traffic

    def workshop(self, name: str | None) -> Workshop | None:
        """Large type, and one idea at a time with the engine in the state that it speaks of: "paging" | "sharing" |
        "prefix-cache" | "preemption"; None ends it. It wants an engine that nobody else uses, and pauses it."""
        self.choices.room = name is not None
        self.current_workshop = None if name is None else Workshop(self, name)
        return self.current_workshop

    def stop_traffic(self) -> None:
        """No more requests by themselves; harmless where there is no traffic."""
        if self._traffic is not None:
            self._traffic.stop()

    def change_rate(self, rate: float) -> None:
        """Of the traffic that is on its way, if any."""
        if self._traffic is not None and self._traffic.shape != "replay":
            self._traffic.rate = rate

    def resume(self) -> None:
        """Go on after a pause."""
        self.engine.resume()

    def pause(self) -> None:
        """Stop after the step that runs now."""
        self.engine.pause()

    def step(self, n: int = 1) -> list[Any]:
        """Run `n` steps of a paused engine; their StepOutputs. Raises while it is running."""
        require_count(n, "steps")
        return [self.engine.step() for _ in range(n)]

    def run_until(
        self, kind: str | None = None, *, request: Any = None, step: int | None = None, max_steps: int = MAX_STEPS
    ) -> Event:
        """Go on and pause by itself after the very step that is named: "eviction", "preemption", "copy", "finish", …; the
        next change of a request (its handle or number); or a step. Returns the event. `Engine.run_until` says the rest."""
        number = getattr(request, "request_id", request)
        return self.engine.run_until(kind, request=number, step=step, max_steps=max_steps)

    # -- time ---------------------------------------------------------------------------------------------------------

    def _record(self) -> Recording | None:
        """What was recorded of the engine so far."""
        return None if self._recorder is None else self._recorder.recording

    @property
    def recording(self) -> Recording:
        """What was recorded up to now, or the recording that is shown. Never changes. Raises RuntimeError where there is none."""
        recording = self.player.recording
        if recording is None:
            raise RuntimeError("nothing was recorded: the engine was closed before this workbench came to it")
        return recording

    def state_at(self, step: int) -> EngineSnapshot:
        """The snapshot of the end of a recorded step, equal to what `engine.snapshot()` gave before the next one began. Raises
        ValueError, naming the steps that there are, for any other."""
        return self._up_to_now().state_at(step)

    def save(self, path: str | Path) -> Path:
        """Write what was recorded up to now to one file, which `Workbench.replay` and `kvscope replay` show anywhere, with no
        model. The engine may go on meanwhile."""
        return self._up_to_now().save(path)

    def save_html(
        self, path: str | Path, *, first: int | None = None, last: int | None = None, theme: str | None = None
    ) -> Path:
        """Write the steps `first` to `last` of what was recorded (default: all) to one HTML file that plays in any browser, with no
        Python, server or network; the path. It opens in `theme`, "light" or "dark" (default: the one on screen). ValueError with a
        sentence for a wrong option and for a path that cannot be written."""
        from .save_html import save_html

        recording = self._up_to_now()
        theme = ("dark" if self.choices.dark else "light") if theme is None else theme
        slots = deepcopy(self._slots[self.player.shows_file])
        return save_html(recording, path, title=_title(recording), first=first, last=last, theme=theme, slots=slots)

    @classmethod
    def replay(cls, recording: str | Path | Recording) -> Workbench:
        """A workbench on a recording: a file that `save` wrote, or "demo". It has no engine, so nothing can be submitted."""
        shown = recording if isinstance(recording, Recording) else Recording.load(recording)
        return cls(Replay(shown))

    @property
    def is_replay(self) -> bool:
        """Whether there is only a recording, and no engine."""
        return isinstance(self.engine, Replay)

    def _up_to_now(self) -> Recording:
        if self._recorder is not None and not self.player.shows_file:
            return self._recorder.catch_up()
        return self.recording

    @property
    def looking_at(self) -> int | None:
        """The step at which all views stand; None: live."""
        return self.player.at

    def goto(self, step: int) -> int:
        """Look at the end of a recorded step, in all views; the engine may go on. ValueError names the steps there are."""
        return self.player.goto(step)

    def back(self, n: int = 1) -> int:
        """`n` steps back from where one looks, at most to the first recorded one; returns the step."""
        return self.player.back(n)

    def now(self) -> None:
        """Back to live; in a recording, to its last step."""
        self.player.now()

    def play_demo(self) -> None:
        """Show the recording that came with kvscope in the engine's place, from its start. `player.leave()` goes back."""
        self.player.show(Recording.load("demo"), time.monotonic())
        self.select(None)

    def select(self, target: Selection | int | str | None = None, *, block: int | None = None) -> None:
        """Highlight one request (`select(3)`) or block (`select(block=41)`) in every view; `select(None)` clears."""
        self.choices.select(parse(target, block=block))

    def explain(self, request: Any = None) -> list[str]:
        """What happened so far, one sentence an entry, oldest first; given a request (its handle or number), only what
        happened to that one. As far back as the engine's event log reaches."""
        events, _, _ = self.engine.events.since(0)
        context = Context()
        context.learn(events, self.engine.snapshot())
        number = getattr(request, "request_id", request)
        told = lines([event for event in events if number in (None, event.request_id)], context)
        return [f"{line.headline} {line.consequence}".strip() for line in told]

    def save_trace(self, path: str | Path) -> Path:
        """Write steps and requests as a Chrome trace, for ui.perfetto.dev: as far back as the event log reaches."""
        events, _, _ = self.engine.events.since(0)
        outputs = {number: handle.partial() for number, handle in self.engine.handles().items()}
        return save_trace(
            path, events, outputs, title=self.engine.info.model_name, lost=events[0].index if events else 0
        )

    @property
    def tables(self) -> Tables:
        """What happened as pandas DataFrames: `tables.requests()`, `.steps()`, `.blocks()`, `.events()`."""
        return Tables(self.engine)

    def _feed(self, advance: Callable[[], float | None]) -> Feeder:
        feeder = Feeder(self, advance)
        self._feeders = [f for f in self._feeders if f.running] + [feeder]
        return feeder

    # -- ticks --------------------------------------------------------------------------------------------------------

    def _tick_now(self) -> Tick:
        player = self.player
        player.advance(time.monotonic())
        source, slots = player.source(), self._slots[player.shows_file]
        return Tick(
            source, self.choices.selection, slots, origin=player.origin, part=player.part, recording=player.recording
        )

    def _status(self) -> Status:
        traffic = self._traffic
        told = ("", False) if traffic is None else (traffic.summary(), traffic.running)
        player, error = self.player, self._error
        recording = player.recording
        return Status(
            at=player.at,
            part=player.part,
            newest=0 if recording is None else recording.last_step,
            engine=self.engine.state if player.has_engine else "",
            file=_title(recording) if recording is not None and player.shows_file else "",
            playing=player.playing,
            speed=self.engine.steps_per_second if player.has_engine else player.speed,
            error=error[0],
            traceback=error[1],
            closed=self._closed,
            traffic=told,
            idea=None if self.current_workshop is None else self.current_workshop.place,
        )

    def _make_screen(self, on_message: Callable[..., None], **options: Any) -> Screen:
        return Screen(self.choices, on_message, **options)

    def _engines(self) -> list[Any]:
        return [self.engine]

    # -- the end ------------------------------------------------------------------------------------------------------

    def _cpu_share(self) -> float:
        before, self._last_index = self._last_index, self.engine.events.next_index
        return CPU_SHARE if self._last_index != before else STILL_SHARE

    def _end(self) -> None:
        if self.player.can_leave:
            self.player.leave()
        self.player.now()  # what stays in the notebook is the newest state
        self.stop_traffic()
        for feeder in self._feeders:
            feeder.stop(wait=True)
        if self._recorder is not None:
            self._recorder.stop()

    def _end_engines(self) -> None:
        if self._owns_engine:
            self.engine.close()

    def __repr__(self) -> str:
        info = self.engine.info
        return (
            f"<Workbench {info.model_name}: {self.engine.state}, {info.num_blocks} blocks of {info.block_words}, "
            f"{len(self._screens)} displays>"
        )


def _title(recording: Recording) -> str:
    """What a recording is of, for the banner."""
    info = recording.info
    return "a run of an engine" if info is None else f"{info.model_name} with {info.num_blocks:,} blocks"
