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
CPU_SHARE = 0.02
STILL_SHARE = 0.25  # while no engine steps: there is nobody to disturb, and a recording should play smoothly
BURST = 0.25  # CPU seconds that may be saved up, for a tab change or a saved copy
BEAT = 1.0  # while a tick waits for its budget, the page is told at least this often that Python lives

_numbers = itertools.count(1)


class Pace:
    """How long to wait until the next tick: `PERIOD`, or longer where the ticks have used up their share of CPU time.

    A budget fills by `share` CPU seconds a second, up to `BURST`; every tick draws on it. Below zero the next tick waits
    until it is paid back, so that over any long time the share is never exceeded.
    """

    def __init__(self, share: float = CPU_SHARE):
        self.share = share
        self._budget = BURST
        self._forgiven = 0.0
        self._at: float | None = None

    def forgive(self, cpu_seconds: float) -> None:
        """Of the tick that runs now, these were spent while the engine had nothing to do: they took nothing from it."""
        self._forgiven += cpu_seconds

    def spent(self, cpu_seconds: float, now: float) -> float:
        """Draw on the budget; seconds to wait."""
        cpu_seconds, self._forgiven = max(0.0, cpu_seconds - self._forgiven), 0.0
        if self._at is not None:
            self._budget = min(BURST, self._budget + (now - self._at) * self.share)
        self._at = now
        self._budget -= cpu_seconds
        return max(PERIOD, -self._budget / self.share)


class Viewer:
    """Calls `tick(owner)` at its pace, `obey(owner, *message)` for every message, and `beat(owner)` in a long wait, all on
    its own thread."""

    def __init__(self, owner: Any, tick: Callable[[Any], None], obey: Callable[..., None], beat: Callable[[Any], None]):
        self._owner = weakref.ref(owner, lambda _: self.stop())
        self._tick, self._obey, self._beat = tick, obey, beat
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
            messages = self._wait(min(BEAT, next_tick - time.monotonic()))
            owner = self._owner()
            if owner is None or self._stopping:
                return
            begun = time.thread_time()
            for message in messages:
                self._obey(owner, *message)
            if messages or time.monotonic() >= next_tick:
                self._tick(owner)
            else:
                self._beat(owner)
            del owner  # between two ticks nobody but the user holds the workbench
            cost = time.thread_time() - begun
            self.cpu_seconds += cost
            self.ticks += 1
            now = time.monotonic()
            next_tick = now + self.pace.spent(cost, now)

    def _wait(self, seconds: float) -> list[tuple]:
        """Messages that came within `seconds`; returns at the first one, with all that wait behind it."""
        messages = []
        try:
            messages.append(self._messages.get(timeout=max(0.0, seconds)))
            while True:
                messages.append(self._messages.get_nowait())
        except queue.Empty:
            return [message for message in messages if message]
