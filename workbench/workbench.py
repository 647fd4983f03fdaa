"""`Workbench`: an engine, its views and its controls. The last line of a cell shows it, live.

    wb = Workbench("default", num_blocks=256)      # or Workbench(engine)
    wb                                             # header, pool, requests, text, log
    wb.submit("Hello", max_tokens=64)              # everything on the page is also a method

It never makes the engine wait: views pull snapshots and events at their own pace. A workbench that made its engine
closes it too. Commands from the page run on the viewer's thread, methods on the caller's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .asking import ask, params_of
from .controls import Commands
from .display import Display
from .feeder import Feeder
from .layout import Screen
from .scenarios import Scenario, ScenarioRun, scenario
from .selection import Choices, parse
from .sentences import Context, lines
from .theme import OwnerSlots
from .tick import Tick
from .traffic import Traffic
from .views.base import Selection
from .views.header import Status
from .views_of import Views


class Workbench(Display):
    """`engine`: an Engine, or what `Engine` takes; `options` are then EngineConfig's fields.

    Attributes: `engine`, `choices` (what is selected and how it is shown), `views` (each view alone:
    `wb.views.block_map`).
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
        self.views = Views(self)
        self._slots = OwnerSlots()
        self._feeders: list[Feeder] = []
        self._traffic: Traffic | None = None
        self._commands = Commands(self)

    # -- everything that the page can do ------------------------------------------------------------------------------

    def submit(self, prompt: Any, params: Any = None, **sampling: Any) -> Any:
        """Queue a request and return its handle. `params` is a SamplingParams, or give its fields by name."""
        if params is not None and sampling:
            raise TypeError(f"submit() got params and {', '.join(sampling)}; give one of them")
        return self.engine.submit(prompt, params_of(sampling) if params is None else params)

    def ask(self, question: str | Sequence[str], **sampling: Any) -> Any:
        """Submit a question as the model expects one: as a chat message where it has a template, else as it stands.
        A conversation is a list: question, answer, question, …. With beam_width=, a beam search."""
        return ask(self.engine, question, sampling)

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
        traffic = Traffic(self.engine, rate=rate, shape=shape, **options)
        self.stop_traffic()
        self._traffic = traffic
        self._feed(traffic.advance)
        return traffic

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
        if not isinstance(n, int) or isinstance(n, bool) or n < 1:
            raise ValueError(f"n={n!r}: must be a number of steps, at least 1")
        return [self.engine.step() for _ in range(n)]

    def select(self, target: Selection | int | str | None = None, *, block: int | None = None) -> None:
        """Highlight one request (`select(3)`) or block (`select(block=41)`) in every view; `select(None)` clears."""
        self.choices.selection = parse(target, block=block)
        self.choices.sample = 0

    def explain(self, request: Any = None) -> list[str]:
        """What happened so far, one sentence an entry, oldest first; given a request (its handle or number), only what
        happened to that one. As far back as the engine's event log reaches."""
        events, _, _ = self.engine.events.since(0)
        context = Context()
        context.learn(events, self.engine.snapshot())
        number = getattr(request, "request_id", request)
        told = lines([event for event in events if number in (None, event.request_id)], context)
        return [f"{line.headline} {line.consequence}".strip() for line in told]

    def _feed(self, advance: Callable[[], float | None]) -> Feeder:
        feeder = Feeder(self, advance)
        self._feeders = [f for f in self._feeders if f.running] + [feeder]
        return feeder

    # -- ticks --------------------------------------------------------------------------------------------------------

    def _tick_now(self) -> Tick:
        return Tick(self.engine, self.choices.selection, self._slots)

    def _status(self) -> Status:
        traffic = self._traffic
        told = ("", False) if traffic is None else (traffic.summary(), traffic.running)
        return Status(error=self._error[0], traceback=self._error[1], closed=self._closed, traffic=told)

    def _make_screen(self, on_message: Callable[..., None], **options: Any) -> Screen:
        return Screen(self.choices, on_message, **options)

    def _engines(self) -> list[Any]:
        return [self.engine]

    # -- the end ------------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        self.stop_traffic()
        for feeder in self._feeders:
            feeder.stop(wait=True)

    def _end_engines(self) -> None:
        if self._owns_engine:
            self.engine.close()

    def __repr__(self) -> str:
        info = self.engine.info
        return (
            f"<Workbench {info.model_name}: {self.engine.state}, {info.num_blocks} blocks of {info.block_size}, "
            f"{len(self._screens)} displays>"
        )
