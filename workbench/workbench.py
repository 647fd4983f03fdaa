"""`Workbench`: an engine, its views and its controls. The last line of a cell shows it, live.

    wb = Workbench("default", num_blocks=256)      # or Workbench(engine)
    wb                                             # header, pool, requests, text, log
    wb.submit("Hello", max_tokens=64)              # everything on the page is also a method

It never makes the engine wait: views pull snapshots and events at their own pace. A workbench that made its engine
closes it too. Commands from the page run on the viewer's thread, methods on the caller's.
"""

from __future__ import annotations

import threading
import time
import uuid
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from .asking import ask, params_of
from .controls import Commands
from .feeder import Feeder
from .layout import Screen
from .scenarios import Scenario, ScenarioRun, scenario
from .selection import Choices, parse
from .sentences import Context, lines
from .theme import OwnerSlots
from .tick import Tick
from .traffic import Traffic
from .viewer import Viewer
from .views.base import Selection
from .views.header import Status
from .views_of import Views

MAX_SCREENS = 4  # displays of one workbench that are kept alive; the oldest gives way
TWIN_SECONDS = 1.0  # without a change, until the saved copies follow

_shown: dict[str, weakref.ref[Workbench]] = {}  # cell id -> what it shows


class Workbench:
    """`engine`: an Engine, or what `Engine` takes; `options` are then EngineConfig's fields.

    Attributes: `engine`, `choices` (what is selected and how it is shown), `views` (each view alone:
    `wb.views.block_map`).
    """

    def __init__(self, engine: Any = "default", **options: Any):
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
        self._lock = threading.RLock()
        self._screens: list[_Shown] = []
        self._viewer: Viewer | None = None
        self._feeders: list[Feeder] = []
        self._traffic: Traffic | None = None
        self._commands = Commands(self)
        self._closed = False
        self._error = ("", "")
        self._changed_at = 0.0
        self._twins_due = False
        self._pump: Any = None

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

    # -- showing ------------------------------------------------------------------------------------------------------

    def show(self, view: str = "") -> None:
        """Display the workbench, or one view of it by name, in the cell that runs now."""
        from . import notebook

        if notebook.kernel_shell() is None:
            print(repr(self))
            return
        from IPython.display import HTML, display

        if self._closed:
            raise RuntimeError("this workbench is closed; make a new one with Workbench(...)")
        self._take_cell(notebook.current_cell())
        viewer = self._start_viewer()
        with self._lock:
            shown = _Shown(self.choices, viewer, view, notebook.current_cell())
            tick = self._tick_now()
            shown.screen.update(tick, self._status(), everything=True)
            shown.widget = notebook.ScreenWidget(shown.screen, self._lock)
            self._screens.append(shown)
            oldest = self._screens.pop(0) if len(self._screens) > MAX_SCREENS else None
            saved = shown.screen.saved_copy(tick)
        if oldest is not None:
            oldest.close()
        display(HTML(notebook.bokehjs_html()), display_id=f"{shown.twin}-script")
        display(shown.widget, display_id=f"{shown.twin}-live")
        display(HTML(saved), display_id=shown.twin)

    def _ipython_display_(self) -> None:
        self.show()

    def servable(self, **options: Any) -> Any:
        """The page as a Panel object in the current session's document: `Workbench(...).servable()` in an app."""
        from .app import Session

        return Session(self).page().servable(**options)

    def __panel__(self) -> Any:
        from .app import Session

        return Session(self).page()

    def _take_cell(self, cell: str) -> None:
        """A cell that is run again replaces what it showed; a workbench that nothing shows any more is closed."""
        if not cell:
            return
        before = _shown[cell]() if cell in _shown else None
        _shown[cell] = weakref.ref(self)
        if before is None:
            return
        with before._lock:
            gone = [shown for shown in before._screens if shown.cell == cell]
            before._screens = [shown for shown in before._screens if shown.cell != cell]
        for shown in gone:
            shown.close()
        if before is not self and not before._screens and before._owns_engine:
            before.close()

    def _start_viewer(self) -> Viewer:
        if self._viewer is None:
            self._viewer = Viewer(self, Workbench._on_tick, Workbench._on_message, Workbench._on_beat)
            from .notebook import on_colab

            if on_colab():
                own = weakref.ref(self)
                self._pump = lambda: own() and own()._on_tick()
                self.engine.while_waiting.append(self._pump)
        return self._viewer

    # -- ticks --------------------------------------------------------------------------------------------------------

    def _tick_now(self) -> Tick:
        return Tick(self.engine, self.choices.selection, self._slots)

    def _status(self) -> Status:
        traffic = self._traffic
        told = ("", False) if traffic is None else (traffic.summary(), traffic.running)
        return Status(error=self._error[0], traceback=self._error[1], closed=self._closed, traffic=told)

    def _on_tick(self) -> None:
        """One tick on the thread that owns the documents. A fault in a view is told on the page and ends no thread."""
        with self._lock:
            tick, changed = self._tick_now(), False
            for shown in self._screens:
                if shown.widget is None or not shown.widget.awake or not shown.screen.due(tick.now):
                    continue
                try:
                    changed |= shown.screen.update(tick, self._status())
                except Exception as error:
                    self._tell(error)
                shown.widget.flush()
            if changed:
                self._changed_at, self._twins_due = tick.now, True
            elif self._twins_due and tick.now - self._changed_at >= TWIN_SECONDS:
                self._twins_due = False  # paused, or nothing left to do: a saved copy costs too much to make it sooner
                self._publish_twins(tick)

    def _on_beat(self) -> None:
        with self._lock:
            for shown in self._screens:
                if shown.widget is not None and shown.widget.awake:
                    shown.screen.beat(time.monotonic(), self._closed)
                    shown.widget.flush()

    def _on_message(self, screen: Screen, kind: str, *values: Any) -> None:
        screen.hurry()
        if kind in ("hello", "resync"):
            with self._lock:
                for shown in self._screens:
                    if shown.screen is screen and shown.widget is not None:
                        getattr(shown.widget, kind)()
        self._commands.run(kind, *values)

    def _tell(self, error: BaseException) -> None:
        import traceback

        self._error = (f"A view failed: {error}.", "".join(traceback.format_exception(error)))

    def _publish_twins(self, tick: Tick) -> None:
        from IPython.display import HTML, update_display

        for shown in self._screens:
            try:
                shown.screen.update(tick, self._status(), everything=True)
                update_display(HTML(shown.screen.saved_copy(tick)), display_id=shown.twin)
            except Exception as error:  # a saved copy that cannot be made must not stop the live view
                self._tell(error)

    # -- the end ------------------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Show the last state, end the viewer thread, drop every callback, and close an engine made here."""
        if self._closed:
            return
        self._closed = True
        self.stop_traffic()
        for feeder in self._feeders:
            feeder.stop(wait=True)
        if self._viewer is not None:
            self._viewer.stop(wait=True)
        if self._pump is not None and self._pump in self.engine.while_waiting:
            self.engine.while_waiting.remove(self._pump)
        with self._lock:
            screens, self._screens = self._screens, []
            if screens:
                tick = self._tick_now()
                self._screens = screens
                self._publish_twins(tick)
                self._screens = []
        for shown in screens:
            if shown.widget is not None:
                shown.widget.flush()
            shown.close()
        if self._owns_engine:
            self.engine.close()

    def __enter__(self) -> Workbench:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        info = self.engine.info
        return (
            f"<Workbench {info.model_name}: {self.engine.state}, {info.num_blocks} blocks of {info.block_size}, "
            f"{len(self._screens)} displays>"
        )


class _Shown:
    """One display: a screen, its widget, and the id of its saved copy. Knows no workbench, so that it keeps none alive."""

    def __init__(self, choices: Choices, viewer: Viewer, view: str, cell: str):
        self.twin = f"kvscope-{uuid.uuid4().hex[:8]}"
        self.cell = cell
        self.made = time.monotonic()
        self.widget: Any = None

        def on_select(selection: Selection | None) -> None:
            choices.selection, choices.sample = selection, 0
            viewer.post(self.screen, "selected")

        self.screen = Screen(choices, viewer.post, only=view, twin=self.twin, on_select=on_select)

    def close(self) -> None:
        """Close the widget and empty its output: only the saved copy stays in the notebook."""
        if self.widget is None:
            return
        from IPython.display import HTML, update_display

        self.widget.close()
        self.widget = None
        for output in ("script", "live"):
            update_display(HTML(""), display_id=f"{self.twin}-{output}")
