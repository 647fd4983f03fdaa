"""The waiting line: sequences that lost their blocks, and requests that never ran, each kind in its policy's order.

Whoever was preempted stands before whoever never ran, or in its place among them where the policy preempts for those that wait.
Looking at the head and taking it do not depend on the length of the line; adding moves pointers at most.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice

from ..request import Blocked, Sequence
from .policies import MAX_CACHE_AWARE, Find, Key, Policy, held_back


class WaitingQueue:
    """Of those that were preempted the oldest stands first, or with `smallest_first` the one of fewest tokens."""

    def __init__(self, policy: Policy, *, smallest_first: bool = False):
        self.policy = policy
        self.smallest_first = smallest_first
        self._preempted: list[Sequence] = []  # by _resume_key; at most as many as can run
        self._fresh: list[Sequence] = []  # by line_key, or as `arrange` put them
        self._is_arranged = False
        self.held: dict[Sequence, Blocked] = {}  # at the end of the line, by the latest `arrange`
        self.num_prompt_tokens = 0  # of requests that were never admitted
        self._admissions: deque[float] = deque(maxlen=32)  # when the latest were admitted, time.monotonic()

    def __len__(self) -> int:
        return len(self._preempted) + len(self._fresh)

    def __iter__(self) -> Iterator[Sequence]:
        return self._in_order(self._fresh)

    def _in_order(self, fresh: Iterable[Sequence]) -> Iterator[Sequence]:
        """Those that lost their blocks and these that never ran."""
        if self.policy.preempts:
            return heapq.merge(self._preempted, fresh, key=self.policy.run_key)
        return (seq for part in (self._preempted, fresh) for seq in part)

    @property
    def head(self) -> Sequence | None:
        return next(iter(self), None)

    @property
    def num_fresh(self) -> int:
        return len(self._fresh)

    def first(self, count: int) -> list[Sequence]:
        """All preempted ones and at most `count` that were never admitted, in order."""
        return list(self._in_order(islice(self._fresh, count)))

    def at(self, place: int) -> Sequence | None:
        return next(islice(iter(self), place, None), None)

    def first_places(self, count: int) -> list[Sequence]:
        return list(islice(iter(self), count))

    def add(self, seq: Sequence) -> None:
        """A new request; to the end, where the order is made at admission."""
        if self._is_arranged:
            self._fresh.append(seq)
        else:
            insort(self._fresh, seq, key=self.policy.line_key)
        self.num_prompt_tokens += seq.request.num_prompt_tokens

    def put_back(self, seq: Sequence) -> None:
        """A preempted sequence goes to its place among its kind."""
        insort(self._preempted, seq, key=self._resume_key)

    def _resume_key(self, seq: Sequence) -> Key:
        return (seq.num_tokens if self.smallest_first else 0, *self.policy.run_key(seq))

    def arrange(self, find: Find, running: list[Sequence], block_size: int) -> None:
        """Put those that never ran in the order that the cache suggests, where the policy asks it and the line is short enough;
        whoever is held back for the sake of a common prefix stands at the end, in `held`."""
        self.held = {}
        if self.policy.arrange is None or not self._fresh:
            return
        if len(self._fresh) <= MAX_CACHE_AWARE:
            hits = {seq: find(seq) for seq in sorted(self._fresh, key=self.policy.line_key)}
            order = self.policy.arrange(hits, block_size)
            self.held = held_back(order, hits, running, block_size)
            self._fresh, self._is_arranged = [seq for seq in order if seq not in self.held] + list(self.held), True
        elif self._is_arranged:
            self._fresh.sort(key=self.policy.line_key)
            self._is_arranged = False

    def remove(self, seq: Sequence) -> None:
        if seq in self._preempted:
            self._preempted.remove(seq)
        else:
            self._fresh.remove(seq)
            self.num_prompt_tokens -= seq.request.num_prompt_tokens

    def admit(self, seq: Sequence, now: float) -> None:
        self.remove(seq)
        self._admissions.append(now)

    def seconds_per_admission(self, now: float) -> float:
        """How often a place in the line has become free lately; at least 1 s."""
        if not self._admissions:
            return 1.0
        return max(1.0, (now - self._admissions[0]) / len(self._admissions))

    def check_integrity(self) -> None:
        preempted = [self._resume_key(seq) for seq in self._preempted]
        fresh = [self.policy.line_key(seq) for seq in self._fresh]
        if preempted != sorted(set(preempted)) or (not self._is_arranged and fresh != sorted(set(fresh))):
            raise RuntimeError(f"the waiting line is out of order: {preempted[:20]}, {fresh[:20]}")
        tokens = sum(seq.request.num_prompt_tokens for seq in self._fresh)
        if tokens != self.num_prompt_tokens or len(set(self._fresh)) != len(self._fresh):
            raise RuntimeError(f"{tokens} prompt tokens wait, the counter says {self.num_prompt_tokens}")
