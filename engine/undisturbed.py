"""Keeps the rest of the process from disturbing steps, by two settings of the interpreter that are the user's again as
soon as all engines are idle.

**The switch interval.** A step gives up the interpreter lock hundreds of times, once in each kernel, and then has to get
it back. From a thread that computes in Python (a notebook cell) it gets it only after the switch interval: 5 ms by
default, so a step of 10 ms takes a second. Measured with such a cell on 2 cores, decode at batch 4, share of the speed
beside an idle cell: 0.15 with 5 ms, 0.66 with 1 ms, 0.79 with 0.5 ms, 0.85 with 0.2 ms.

**Full garbage collections.** One walks through every object of torch and transformers, half a million, while nothing else
runs: 150 to 280 ms. It is put off to a moment when nobody waits for a step; while steps never cease it comes ten times
more rarely, so that garbage stays bounded. Freezing these objects would spare the walk, but for good: what dies in a
cycle among a user's own objects would then never be freed.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

SWITCH_SECONDS = 0.0002
RARER = 10  # of full collections

_lock = threading.Lock()
_num_stepping = 0
_users = 0.0, (0, 0, 0)  # interval and thresholds before the first engine began to step
_ours = _users  # and what they were changed to


def _current() -> tuple[float, tuple[int, int, int]]:
    return sys.getswitchinterval(), gc.get_threshold()


@contextmanager
def undisturbed() -> Iterator[None]:
    """Inside, threads that wait for the interpreter get it after 0.2 ms at most, and full collections are rare. Counts,
    so that engines may overlap. What somebody else changes meanwhile stays as they set it."""
    global _num_stepping, _users, _ours
    with _lock:
        _num_stepping += 1
        if _num_stepping == 1:
            _users = interval, (young, middle, old) = _current()
            sys.setswitchinterval(min(interval, SWITCH_SECONDS))
            gc.set_threshold(young, middle, RARER * old)
            _ours = _current()
    try:
        yield
    finally:
        with _lock:
            _num_stepping -= 1
            if _num_stepping == 0:
                now = _current()
                if now[0] == _ours[0]:
                    sys.setswitchinterval(_users[0])
                if now[1] == _ours[1]:
                    gc.set_threshold(*_users[1])
