"""A scenario on its way: asks each turn when what it waits for is over."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping
from typing import Any

from ..asking import ask
from .turns import Scenario, Turn

_POLL_SECONDS = 0.05
_LEAST_ANSWER = 16  # tokens, where `fill` decides


class ScenarioRun(list):
    """The handles of what has been asked so far, in order: a list that grows as answers come.

    `advance()` asks what can be asked; somebody calls it until `to_come` is 0. A turn whose forerunners were all cancelled
    or failed is dropped, and so is one that is refused: `refusals` has the sentences. `info` (default: the engine's) is of the
    engine whose pool is to be filled, where several are given the same.
    """

    def __init__(self, scenario: Scenario, engine: Any, info: Any = None):
        super().__init__()
        self.scenario = scenario
        self.refusals: list[str] = []
        self._engine = engine
        self._info = engine.info if info is None else info
        self._lock = threading.RLock()
        self._left = list(range(len(scenario.turns)))
        self._asked: dict[int, tuple[Any, tuple[str, ...]]] = {}  # turn -> handle, conversation so far
        self._dropped: set[int] = set()

    @property
    def to_come(self) -> int:
        """Turns that wait for an answer."""
        return len(self._left)

    def advance(self) -> float | None:
        """Ask every turn whose time has come. Seconds until it is worth while to look again; None: all have been asked."""
        with self._lock:
            for number in tuple(self._left):
                if self._ready(self.scenario.turns[number]):
                    self._left.remove(number)
                    self._ask(number)
            return _POLL_SECONDS if self._left else None

    def wait(self, timeout: float | None = None) -> list[Any]:
        """The outputs, once every turn has been asked and is over. Raises what `RequestHandle.result` raises."""
        until = math.inf if timeout is None else time.monotonic() + timeout
        outputs: list[Any] = []
        while self.advance() is not None or len(outputs) < len(self):
            for handle in self[len(outputs) :]:
                outputs.append(handle.result(None if timeout is None else max(0.0, until - time.monotonic())))
            if self.to_come:
                time.sleep(_POLL_SECONDS)
        return outputs

    def _ready(self, turn: Turn) -> bool:
        return all(n in self._dropped or (n in self._asked and self._asked[n][0].done) for n in turn.after)

    def _ask(self, number: int) -> None:
        turn = self.scenario.turns[number]
        talk: tuple[str, ...] = (turn.question,)
        if turn.after:
            before = self._likeliest(turn)
            if before is None:
                self._dropped.add(number)
                return
            talk = (*before, turn.question)
        try:
            handle = ask(self._engine, talk, self._sampling(turn))
        except ValueError as refusal:  # a small pool may have no room for one of them
            self._dropped.add(number)
            self.refusals.append(str(refusal))
            return
        self._asked[number] = (handle, talk)
        self.append(handle)

    def _likeliest(self, turn: Turn) -> tuple[str, ...] | None:
        """The conversation to continue, its answer included; None when there is none."""
        best, best_score = None, -math.inf
        for number in turn.after:
            if number in self._dropped:
                continue
            handle, talk = self._asked[number]
            outputs = handle.partial().outputs
            answer = outputs[min(turn.sample, len(outputs) - 1)]
            if handle.status != "finished":
                continue
            score = (answer.cumulative_logprob or 0.0) / max(1, len(answer.token_ids))
            if best is None or score > best_score:
                best, best_score = (*talk, answer.text.strip()), score
        return best

    def _sampling(self, turn: Turn) -> Mapping[str, Any]:
        if not self.scenario.fill:
            return turn.sampling
        info = self._info
        slots = (info.num_blocks - 1) * info.block_size
        answer = (
            self.scenario.fill * slots / len(self.scenario.turns) - len(turn.question) / 4
        )  # letters a token, about
        most = info.max_model_len // 2
        return {**turn.sampling, "max_tokens": int(min(most, max(_LEAST_ANSWER, answer)))}
