"""The one thread that owns a workbench's documents in a notebook.

It wakes ten times a second, and at once when the page sends something; it is the only one that changes the documents,
under the workbench's lock. A loop of the kernel would stop while a cell blocks; a thread does not. It measures its own
CPU time and slows down until that is at most 2 % of wall time. It holds no strong reference to the workbench, so that a
workbench that nobody holds any more ends it.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

PERIOD = 0.1  # seconds between two ticks at best
SLOWEST = 2.0
CPU_SHARE = 0.02
_SMOOTHING = 0.25  # of a new measurement in the running mean

_numbers = itertools.count(1)


class Pace:
    """How long to wait until the next tick: `PERIOD`, or longer where a tick costs more CPU time than its share."""

    def __init__(self, share: float = CPU_SHARE):
        self._share = share
        self.mean = 0.0  # CPU seconds a tick

    def spent(self, cpu_seconds: float) -> None:
        self.mean += _SMOOTHING * (cpu_seconds - self.mean)

    @property
    def period(self) -> float:
        return min(SLOWEST, max(PERIOD, self.mean / self._share))


class Viewer:
    """Calls `tick(workbench)` at its pace and `obey(workbench, *message)` for every message, on its own thread."""

    def __init__(self, owner: Any, tick: Callable[[Any], None], obey: Callable[..., None]):
        self._owner = weakref.ref(owner, lambda _: self.stop())
        self._tick, self._obey = tick, obey
        self._messages: queue.SimpleQueue[tuple] = queue.SimpleQueue()
        self._stopping = False
        self.pace = Pace()
        self.cpu_seconds = 0.0  # of this thread, all ticks together
        self.ticks = 0
        self.started = time.monotonic()
        self.thread = threading.Thread(target=self._run, name=f"kvscope-viewer-{next(_numbers)}", daemon=True)
        self.thread.start()

    def post(self, *message: Any) -> None:
        """Any thread: have `obey` called with this, soon."""
        self._messages.put(message)

    def stop(self, *, wait: bool = False) -> None:
        """Any thread, any number of times. `wait` returns when the thread has ended."""
        self._stopping = True
        self._messages.put(())
        if wait and self.thread is not threading.current_thread():
            self.thread.join()

    def _run(self) -> None:
        next_tick = time.monotonic()
        while not self._stopping:
            messages = self._wait(next_tick - time.monotonic())
            owner = self._owner()
            if owner is None or self._stopping:
                return
            begun = time.thread_time()
            for message in messages:
                self._obey(owner, *message)
            self._tick(owner)
            del owner  # between two ticks nobody but the user holds the workbench
            cost = time.thread_time() - begun
            self.cpu_seconds += cost
            self.ticks += 1
            self.pace.spent(cost)
            next_tick = time.monotonic() + self.pace.period

    def _wait(self, seconds: float) -> list[tuple]:
        """Messages that came within `seconds`; returns at the first one, with all that wait behind it."""
        messages = []
        try:
            messages.append(self._messages.get(timeout=max(0.0, seconds)))
            while True:
                messages.append(self._messages.get_nowait())
        except queue.Empty:
            return [message for message in messages if message]
