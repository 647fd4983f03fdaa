"""What shows itself in a notebook: one viewer thread, the screens it draws, and their saved copies.

A subclass has `choices`, `_commands`, and says what a screen is made of, what a tick reads, what stands in the header, which
engines are waited for, and what closing it ends. It stays out of the engines' way: all of this runs on the viewer's thread.
"""

from __future__ import annotations

import threading
import time
import uuid
import weakref
from typing import Any

from .layout import Screen
from .selection import Choices
from .viewer import CPU_SHARE, Viewer
from .views.base import Selection
from .views.header import Status

MAX_SCREENS = 4  # displays of one object that are kept alive; the oldest gives way
TWIN_SECONDS = 1.0  # without a change, until the saved copies follow

_shown: dict[str, weakref.ref[Display]] = {}  # cell id -> what it shows


class Display:
    """`show()` in a cell, any number of times; `close()` once it is over."""

    choices: Choices
    _commands: Any
    _owns_engine = False

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._screens: list[_Shown] = []
        self._viewer: Viewer | None = None
        self._closed = False
        self._error = ("", "")
        self._changed_at = 0.0
        self._twins_due = False
        self._pump: Any = None

    def _make_screen(self, on_message: Any, **options: Any) -> Screen:
        """A page of this object; `options` as Screen's."""
        raise NotImplementedError

    def _tick_now(self) -> Any:
        raise NotImplementedError

    def _status(self) -> Status:
        raise NotImplementedError

    def _cpu_share(self) -> float:
        """How much of a CPU its viewer may use now."""
        return CPU_SHARE

    def _engines(self) -> list[Any]:
        """Those whose blocking calls keep the views moving where nothing else does (Colab)."""
        raise NotImplementedError

    def _end(self) -> None:
        """End the threads of this object, when it is closed and before its last state is shown."""

    def _end_engines(self) -> None:
        """Close the engines that were made here, last of all."""
        raise NotImplementedError

    # -- showing ------------------------------------------------------------------------------------------------------

    def show(self, view: str = "") -> None:
        """Display it, or one view of it by name, in the cell that runs now."""
        from . import notebook

        if notebook.kernel_shell() is None:
            print(repr(self))
            return
        from IPython.display import HTML, display

        if self._closed:
            raise RuntimeError(f"this {type(self).__name__.lower()} is closed; make a new one")
        self._take_cell(notebook.current_cell())
        viewer = self._start_viewer()
        with self._lock:
            shown = _Shown(self, viewer, view, notebook.current_cell())
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
        """A cell that is run again replaces what it showed; what nothing shows any more is closed."""
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
            self._viewer = Viewer(self, Display._on_tick, Display._on_message, Display._on_beat)
            from .notebook import on_colab

            if on_colab():
                own = weakref.ref(self)
                self._pump = lambda: own() and own()._on_tick()
                for engine in self._engines():
                    engine.while_waiting.append(self._pump)
        return self._viewer

    # -- ticks --------------------------------------------------------------------------------------------------------

    def _on_tick(self) -> None:
        """One tick on the thread that owns the documents. A fault in a view is told on the page and ends no thread."""
        with self._lock:
            if self._viewer is not None:
                self._viewer.pace.share = self._cpu_share()
            tick, changed, all_looked = self._tick_now(), False, True
            for shown in self._screens:
                if shown.widget is None or not shown.widget.awake:
                    continue
                if not shown.screen.due(tick.now):
                    all_looked = False
                    continue
                try:
                    changed |= shown.screen.update(tick, self._status())
                except Exception as error:
                    self._tell(error)
                shown.widget.flush()
            if changed:
                self._changed_at, self._twins_due = tick.now, True
            elif all_looked and self._twins_due and tick.now - self._changed_at >= TWIN_SECONDS:
                self._twins_due = False  # paused, or nothing left to do: a saved copy costs too much to make it sooner
                begun = time.thread_time()
                self._publish_twins(tick)
                if self._viewer is not None:
                    self._viewer.pace.forgive(time.thread_time() - begun)

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

    def _publish_twins(self, tick: Any) -> None:
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
        """Show the last state, end the viewer thread, drop every callback, and close the engines made here."""
        if self._closed:
            return
        self._closed = True
        self._end()
        if self._viewer is not None:
            self._viewer.stop(wait=True)
        for engine in self._engines():
            if self._pump is not None and self._pump in engine.while_waiting:
                engine.while_waiting.remove(self._pump)
        with self._lock:
            screens = self._screens
            if screens:
                self._publish_twins(self._tick_now())
            self._screens = []
        for shown in screens:
            if shown.widget is not None:
                shown.widget.flush()
            shown.close()
        self._end_engines()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _Shown:
    """One display: a screen, its widget, and the id of its saved copy. Keeps its owner not alive."""

    def __init__(self, owner: Display, viewer: Viewer, view: str, cell: str):
        choices = owner.choices
        self.twin = f"kvscope-{uuid.uuid4().hex[:8]}"
        self.cell = cell
        self.made = time.monotonic()
        self.widget: Any = None

        def on_select(selection: Selection | None) -> None:
            choices.select(selection)
            viewer.post(self.screen, "selected")

        self.screen = owner._make_screen(viewer.post, only=view, twin=self.twin, on_select=on_select)

    def close(self) -> None:
        """Close the widget and empty its output: only the saved copy stays in the notebook."""
        if self.widget is None:
            return
        from IPython.display import HTML, update_display

        self.widget.close()
        self.widget = None
        for output in ("script", "live"):
            update_display(HTML(""), display_id=f"{self.twin}-{output}")
