"""The workbench as a page of its own, served by Panel: `kvscope app`, `serve(...)`, `Workbench(...).servable()`.

Here the Bokeh server owns the documents, so each session is drawn by a periodic callback of its own document. All
sessions look at one engine; each has its own selection, tab and theme. A command from a page runs on a worker thread
and never makes another viewer wait.
"""

from __future__ import annotations

import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import panel as pn
from panel.io import hold

from .display import Display
from .layout import Screen
from .viewer import PERIOD, Pace
from .workbench import Workbench

_TITLE = "kvscope"
_ASKS_ENGINE = frozenset({"do", "submit", "traffic", "until"})  # these may wait for a step; the others do not


def serve(
    model: Any = "default",
    *,
    port: int = 5006,
    address: str = "127.0.0.1",
    show: bool = True,
    threaded: bool = False,
    **engine_options: Any,
) -> Any:
    """Serve one engine to any number of viewers until interrupted; with `threaded`, return the server at once.

    `model` is an Engine, or what `Engine` takes; `engine_options` are EngineConfig's fields. `address` other than this
    machine's own makes the page reachable from elsewhere: it has no password.
    """
    host = Workbench(model, **engine_options)
    sessions: weakref.WeakSet[Session] = weakref.WeakSet()
    origins = None if address in ("127.0.0.1", "localhost") else ["*"]

    def page() -> Any:
        session = Session(Workbench(host.engine), ends_it=True)
        sessions.add(session)
        return session.page()

    try:
        server = pn.serve(
            page, port=port, address=address, show=show, title=_TITLE, threaded=threaded, start=True,
            websocket_origin=origins, autoreload=False,
        )  # fmt: skip
    except OSError as error:
        host.close()
        raise ValueError(f"port={port}: cannot be used here ({error.strerror or error}); choose another") from None
    served = Served(server, host, sessions)
    if threaded:
        return served
    served.close()
    return None


class Served:
    """A running server. `close()` stops it, ends its sessions, and closes an engine that was made for it."""

    def __init__(self, server: Any, host: Workbench, sessions: weakref.WeakSet[Session]):
        self.server, self.host, self._sessions = server, host, sessions
        self._closed = False

    def close(self) -> None:
        """Any number of times."""
        if self._closed:
            return
        self._closed = True
        self.server.stop()
        for session in list(self._sessions):
            session.close()
        self.host.close()


class Session:
    """One viewer of an app: a screen that its document's own callback draws.

    Several may look at one workbench; what is selected is then the same for all. `ends_it`: the workbench was made for this
    viewer and is closed with it; any other stays open, and goes when nobody holds it any more.
    """

    def __init__(self, workbench: Display, *, ends_it: bool = False):
        self.workbench, self._ends_it = workbench, ends_it
        self.pace = Pace()
        self.worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvscope-session")
        own = weakref.ref(self)

        def on_message(screen: Screen, kind: str, *values: Any) -> None:
            session = own()
            if session is None:
                return
            screen.hurry()
            run = session.workbench._commands.run
            if kind in _ASKS_ENGINE:
                session.worker.submit(run, kind, *values)
            else:
                run(kind, *values)

        self.screen = workbench._make_screen(on_message, on_select=workbench.choices.select)

    def page(self) -> pn.viewable.Viewable:
        """A Panel object for the current session's document. Outside of a session it is drawn once: in a notebook the
        workbench itself, as the last line of a cell, is the live view."""
        page = pn.pane.Bokeh(self.screen.root, sizing_mode="stretch_width", margin=0)
        document = pn.state.curdoc
        if document is not None and document.session_context is not None:
            self.follow(document)
        else:
            self.screen.update(self.workbench._tick_now(), self.workbench._status(), everything=True)
        return page

    def follow(self, document: Any) -> None:
        """Draw now, for the page to start from; then ten times a second from when the page is there until it ends. What
        changes while the page is on its way would not reach it: Panel drops it."""
        self.screen.add_script(document)
        next_tick = 0.0

        def tick() -> None:
            nonlocal next_tick
            if time.monotonic() < next_tick or not self.screen.due(time.monotonic()):
                return
            begun = time.thread_time()
            self.pace.share = self.workbench._cpu_share()
            with self.workbench._lock, hold(document):
                self.screen.update(self.workbench._tick_now(), self.workbench._status())
            now = time.monotonic()
            next_tick = now + self.pace.spent(time.thread_time() - begun, now) - PERIOD / 2

        tick()
        pn.state.onload(lambda: document.add_periodic_callback(tick, int(PERIOD * 1000)))
        document.on_session_destroyed(lambda _context: self.close())

    def close(self) -> None:
        """Any number of times."""
        self.worker.shutdown(wait=False)
        if self._ends_it:
            self.workbench.close()
