"""A thread that asks when its time has come: what scenarios and traffic run on, so that neither blocks the page.

It holds no strong reference to the workbench that it belongs to, and ends with it; a fault ends it and is kept in `error`.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable
from typing import Any

_numbers = itertools.count(1)


class Feeder:
    """Calls `advance()` until it returns None; else it returns after how many seconds it wants to be called again."""

    def __init__(self, owner: Any, advance: Callable[[], float | None]):
        self._owner = weakref.ref(owner, lambda _: self.stop())
        self._advance = advance
        self._stopping = threading.Event()
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name=f"kvscope-feeder-{next(_numbers)}", daemon=True)
        self.thread.start()

    @property
    def running(self) -> bool:
        return self.thread.is_alive() and not self._stopping.is_set()

    def stop(self, *, wait: bool = False) -> None:
        """Any thread, any number of times. `wait` returns when the thread has ended."""
        self._stopping.set()
        if wait and self.thread is not threading.current_thread():
            self.thread.join()

    def _run(self) -> None:
        seconds: float | None = 0.0
        while seconds is not None and not self._stopping.wait(seconds):
            try:
                seconds = self._advance()
            except Exception as error:  # an engine that was closed, most of the time
                self.error, seconds = error, None
