"""The waiting line, oldest first: preempted sequences, then requests that were never admitted.

Admission is strictly in order of arrival, so whatever was preempted is older than whatever was never admitted; the line
is the one sorted list followed by the other. Adding, looking at the head and removing do not depend on its length.
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict, deque
from collections.abc import Iterator
from itertools import islice

from ..request import Sequence


class WaitingQueue:
    def __init__(self):
        self._preempted: list[Sequence] = []  # by age; at most as many as can run
        self._fresh: OrderedDict[Sequence, None] = OrderedDict()  # by arrival, which is by age
        self.num_prompt_tokens = 0  # of requests that were never admitted
        self._admissions: deque[float] = deque(maxlen=32)  # when the latest were admitted, time.monotonic()

    def __len__(self) -> int:
        return len(self._preempted) + len(self._fresh)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._preempted
        yield from self._fresh

    @property
    def head(self) -> Sequence | None:
        return self._preempted[0] if self._preempted else next(iter(self._fresh), None)

    @property
    def num_fresh(self) -> int:
        return len(self._fresh)

    def first(self, count: int) -> list[Sequence]:
        """All preempted ones and at most `count` that were never admitted."""
        return [*self._preempted, *islice(self._fresh, count)]

    def add(self, seq: Sequence) -> None:
        """A new request goes to the end."""
        self._fresh[seq] = None
        self.num_prompt_tokens += seq.request.num_prompt_tokens

    def put_back(self, seq: Sequence) -> None:
        """A preempted sequence goes to its place by age, before every new request."""
        insort(self._preempted, seq, key=lambda s: s.key)

    def remove(self, seq: Sequence) -> None:
        if seq in self._fresh:
            del self._fresh[seq]
            self.num_prompt_tokens -= seq.request.num_prompt_tokens
        else:
            self._preempted.remove(seq)

    def admit(self, seq: Sequence, now: float) -> None:
        self.remove(seq)
        self._admissions.append(now)

    def seconds_per_admission(self, now: float) -> float:
        """How often a place in the line has become free lately; at least 1 s."""
        if not self._admissions:
            return 1.0
        return max(1.0, (now - self._admissions[0]) / len(self._admissions))

    def check_integrity(self) -> None:
        keys = [seq.key for seq in self]
        if keys != sorted(set(keys)):
            raise RuntimeError(f"the waiting line is out of order: {keys[:20]}")
        tokens = sum(seq.request.num_prompt_tokens for seq in self._fresh)
        if tokens != self.num_prompt_tokens:
            raise RuntimeError(f"{tokens} prompt tokens wait, the counter says {self.num_prompt_tokens}")
