"""Traffic: requests that keep arriving, at a rate that may be changed while they do.

    traffic = wb.traffic(rate=2, shape="poisson")
    traffic.rate = 4
    traffic.stop()

Its clock runs only while the engine does: a pause stops time for both. What the engine's queue has no room for is
refused by the engine, counted here, and told.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Iterator
from os import PathLike
from typing import Any

from kvscope.engine.config import is_integer

from .arrivals import MIXES, SHAPES, Arrival, drawn, read_trace
from .asking import ask, params_of
from .markup import plural

MOST_A_SECOND = 1000.0
_MOST_AT_ONCE = 100  # requests asked in one go, when the machine has kept this thread waiting
_LEAST_SLEEP, _MOST_SLEEP = 0.005, 0.1
_COUNT_EVERY = 0.5  # seconds between looks at who has finished


class Traffic:
    """`rate`: requests a second; of a replay, how many times as fast as the trace. Reads and changes from any thread.

    shape        "poisson" | "bursts" | "steady" | "ramp" (from nothing to `rate` in `ramp_seconds`)
    mix          "chats" | "one system prompt" | "documents" | "mixed"
    max_tokens   answers are from a quarter of it to all of it
    burstiness   of "bursts": below 1 burstier than Poisson
    trace        a JSONL file to replay instead (see `arrivals.read_trace`)
    limit        stop after so many requests
    seed         the same requests in the same order, with the same gaps

    `asked`, `refused` and `finished` count; `last_refusal` is the newest refusal's sentence.
    """

    def __init__(
        self,
        engine: Any,
        *,
        rate: float | None = None,
        shape: str = "poisson",
        mix: str = "mixed",
        max_tokens: int = 64,
        burstiness: float = 0.25,
        ramp_seconds: float = 30.0,
        trace: str | PathLike[str] | None = None,
        limit: int | None = None,
        seed: int = 0,
    ):
        _one_of("shape", shape, SHAPES)
        _one_of("mix", mix, MIXES)
        _require(is_integer(max_tokens) and max_tokens >= 1, "max_tokens", max_tokens, "a whole number of at least 1")
        _require(_real(burstiness) and 0.01 <= burstiness <= 100, "burstiness", burstiness, "from 0.01 to 100")
        _require(_real(ramp_seconds) and ramp_seconds > 0, "ramp_seconds", ramp_seconds, "more than 0")
        _require(limit is None or (is_integer(limit) and limit >= 1), "limit", limit, "at least 1, or None")
        _require(is_integer(seed), "seed", seed, "a whole number")
        self.shape, self.mix, self.seed = ("replay", str(trace), seed) if trace is not None else (shape, mix, seed)
        self.rate = rate if rate is not None else 1.0 if trace is not None else 2.0
        self.asked = self.refused = self.finished = 0
        self.last_refusal = ""
        self._engine = engine
        self._ramp = ramp_seconds if self.shape == "ramp" else 0.0
        source: Iterator[Arrival] = (
            drawn(shape, mix, max_tokens=max_tokens, burstiness=burstiness, seed=seed)
            if trace is None
            else iter(read_trace(trace))
        )
        self._arrivals = source if limit is None else itertools.islice(source, limit)
        self._next: Arrival | None = next(self._arrivals, None)
        self._ids = random.Random(f"{seed} ids")
        self._lock = threading.Lock()
        self._live: list[Any] = []
        self._clock = 0.0  # in units of 1/rate
        self._running_seconds = 0.0
        self._at: float | None = None
        self._counted_at = 0.0
        self._over = threading.Event()

    # -- for whoever watches it ---------------------------------------------------------------------------------------

    @property
    def rate(self) -> float:
        return self._rate

    @rate.setter
    def rate(self, value: float) -> None:
        limit = f"requests a second, above 0 and at most {MOST_A_SECOND:g}"
        _require(_real(value) and 0 < value <= MOST_A_SECOND, "rate", value, limit)
        self._rate = float(value)

    @property
    def running(self) -> bool:
        return not self._over.is_set()

    def stop(self) -> None:
        """No request after this; those that were asked go on. Any number of times."""
        self._over.set()

    def wait(self, timeout: float | None = None) -> bool:
        """Until it is stopped or has no more requests; False after `timeout` seconds."""
        return self._over.wait(timeout)

    def summary(self) -> str:
        """What it does and has done, in a sentence."""
        self._count_finished()
        speed = f"{self.rate:g} × as fast" if self.shape == "replay" else _per_second(self.rate)
        state = "Traffic" if self.running else "Traffic, ended"
        told = f"{state}: {speed}, {self.shape}; {plural(self.asked, 'request')}, {self.finished:,} of them over"
        return f"{told}, {self.refused:,} refused ({self.last_refusal})." if self.refused else f"{told}."

    def __repr__(self) -> str:
        return f"<{self.summary()[:-1]}>"

    # -- on the feeder's thread ---------------------------------------------------------------------------------------

    def advance(self) -> float | None:
        """Ask what is due; seconds until the next look, None when it is over."""
        now = time.monotonic()
        passed = 0.0 if self._at is None or self._engine.state != "running" else now - self._at
        self._at = now
        self._running_seconds += passed
        self._clock += passed * self._speed()
        for _ in range(_MOST_AT_ONCE):
            if self._next is None or self._over.is_set():
                self._over.set()
                return None
            if self._next.due > self._clock:
                break
            arrival, self._next = self._next, next(self._arrivals, None)
            self._ask(arrival)
        if now - self._counted_at > _COUNT_EVERY:
            self._count_finished()
            self._counted_at = now
        wait = (self._next.due - self._clock) / self._speed() if self._next else 0.0
        return min(_MOST_SLEEP, max(_LEAST_SLEEP, wait))

    def _speed(self) -> float:
        """Arrivals a second now; a ramp starts with a hundredth of its rate, else it would stand still."""
        return self._rate * (max(0.01, min(1.0, self._running_seconds / self._ramp)) if self._ramp else 1.0)

    def _ask(self, arrival: Arrival) -> None:
        sampling = {"max_tokens": arrival.max_tokens, "temperature": 0.8, "seed": self.seed + self.asked + self.refused}
        try:
            if isinstance(arrival.prompt, int):
                ids = [self._ids.randrange(self._engine.info.spec.vocab_size) for _ in range(arrival.prompt)]
                handle = self._engine.submit(ids, params_of(sampling))
            else:
                handle = ask(self._engine, arrival.prompt, sampling)
        except ValueError as refusal:  # the queue is full, or the pool too small for it
            self.refused += 1
            self.last_refusal = str(refusal)
            return
        with self._lock:
            self.asked += 1
            self._live.append(handle)

    def _count_finished(self) -> None:
        with self._lock:
            self._live = [handle for handle in self._live if not handle.done]
            self.finished = self.asked - len(self._live)


def _per_second(rate: float) -> str:
    return f"{rate:g} request a second" if rate == 1 else f"{rate:g} requests a second"


def _real(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _require(holds: bool, name: str, value: Any, limit: str) -> None:
    if not holds:
        raise ValueError(f"{name}={value!r}: must be {limit}")


def _one_of(name: str, value: Any, choices: dict[str, Any]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r}: must be one of {', '.join(choices)}")
