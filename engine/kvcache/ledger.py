"""The waste ledger: what every slot of the KV pool is good for, step by step.

    token      written: the KV of a token, a shared slot once
    reserved   taken, and its request will write it before it ends
    internal   taken, and its request never writes it
    external   of no use to anybody now: what rounding added to a request, and free slots while the head of the line
               waits for blocks that those cannot give it
    free       could be taken

Where KV groups have blocks of different sizes all blocks count alike, as the slots of a common block: beside blocks of 32 tokens
a slot of one of 16 counts twice. The five always add up to the capacity. How long a text becomes is known when it has ended, so
the split between reserved and internal is made afterwards, from the trace. Averages are over time, and only while someone waits:
memory that nobody asks for is not wasted. Source: arXiv 2309.06180, figures 2 and 3. Needs snapshots and events only, live or
recorded.

`divide` looks at one snapshot alone, where the future is not known: what an allocator has set aside is reserved, what is left
of a block that came with a token is internal.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ..events import Cause, Event, EventKind
from ..snapshot import BlockState, EngineSnapshot, RequestState

Sample = tuple[int, int]  # request id, child
PURPOSES = ("token", "reserved", "internal", "external", "free")


class Instant(NamedTuple):
    """Slots by purpose after one step; they add up to the capacity."""

    step: int
    time: float  # seconds, time.monotonic()
    waits: bool  # does anyone wait?
    token: int
    reserved: int
    internal: int
    external: int
    free: int


@dataclass(slots=True)
class _Taken:
    """Unwritten slots of taken blocks: row i belongs to `samples[i]`, whose text may reach positions start … end − 1 there."""

    step: int
    time: float
    waits: bool
    capacity: int
    written: int
    free: int
    is_blocked: bool  # by blocks
    samples: list[Sample]
    start: np.ndarray  # int64
    end: np.ndarray  # int64
    limit: np.ndarray  # int64: positions that the allocator was asked for; the rest is rounding
    weight: np.ndarray  # int64: as how many slots of a common block one of these counts


class Division(NamedTuple):
    """Slots of one snapshot by purpose; those down to `empty` add up to the capacity."""

    token: int  # written and read by someone, each slot once
    cached: int  # written, without a reader: can be evicted
    reserved: int  # unwritten, set aside for a request by a reservation allocator
    internal: int  # unwritten, at the end of a block that was taken for a token
    external: int  # what rounding added to a reservation; what lies free in pieces too small for the head of the line
    empty: int
    saved: int  # slots that sharing saves: read by more than one, counted for each reader after the first

    @property
    def capacity(self) -> int:
        return sum(self[:6])


def divide(snapshot: EngineSnapshot) -> Division:
    """The slots of this snapshot, without the null block."""
    size, ref, filled = snapshot.block_size, snapshot.ref_count, snapshot.written
    used = ref > 0
    used[0] = False
    written = int(filled[used].sum())
    cached = int(filled[snapshot.block_state == BlockState.CACHED].sum())
    unwritten = int(used.sum()) * size - written
    empty = int(snapshot.num_blocks - 1 - used.sum()) * size - cached
    shared = ref > 1
    shared[0] = False
    saved = int(((ref[shared] - 1) * filled[shared]).sum())
    if not any(state.num_reserved_tokens for state in snapshot.requests):
        return Division(written, cached, 0, unwritten, 0, empty, saved)
    _, start, end, limit, weight = _first_readers(snapshot)
    rounding = int(weight @ np.clip(end - np.maximum(limit, start), 0, None))
    lost = empty if any(state.blocked_cause == Cause.NO_FREE_BLOCK for state in snapshot.requests) else 0
    return Division(written, cached, unwritten - rounding, 0, rounding + lost, empty - lost, saved)


class WasteLedger:
    """Call `add` with each step's snapshot and the events since the one before."""

    def __init__(self):
        self._taken: list[_Taken] = []
        self._final: dict[Sample, int] = {}  # sample -> tokens with KV at its end; so far, while it lives
        self._prompts: dict[int, int] = {}

    def add(self, snapshot: EngineSnapshot, events: Iterable[Event]) -> None:
        for state in snapshot.requests:
            self._prompts[state.id] = state.num_prompt_tokens
            self._final[state.id, state.child] = max(
                state.num_computed_tokens, self._final.get((state.id, state.child), 0)
            )
        for event in events:
            if event.kind is EventKind.SUBMITTED:
                self._prompts[event.request_id] = int(event.numbers["prompt_tokens"])
            elif event.kind in (EventKind.FINISHED, EventKind.CANCELLED):
                computed = self._prompts[event.request_id] + int(event.numbers["output_tokens"]) - 1
                sample = (event.request_id, event.child)
                self._final[sample] = max(computed, self._final.get(sample, 0))
        used = snapshot.ref_count > 0
        used[0] = False
        size = snapshot.block_size
        samples, *spans = _first_readers(snapshot)
        waiting = [state for state in snapshot.requests if state.status in ("waiting", "preempted")]
        self._taken.append(
            _Taken(
                snapshot.step, snapshot.time, bool(waiting), (snapshot.num_blocks - 1) * size,
                int(snapshot.written[used].sum()), int(snapshot.num_blocks - 1 - used.sum()) * size,
                any(state.blocked_cause == Cause.NO_FREE_BLOCK for state in waiting), samples, *spans,
            )
        )  # fmt: skip

    @property
    def instants(self) -> list[Instant]:
        """One row a step. A text that has not ended counts as if it ended where it is."""
        return [self._instant(taken) for taken in self._taken]

    def _instant(self, taken: _Taken) -> Instant:
        final = np.array([self._final[sample] for sample in taken.samples], np.int64)
        unwritten = int(taken.weight @ (taken.end - taken.start))
        reserved = int(taken.weight @ np.clip(np.minimum(final, taken.end) - taken.start, 0, None))
        asked = np.maximum(np.maximum(final, taken.limit), taken.start)
        rounding = int(taken.weight @ np.clip(taken.end - asked, 0, None))
        internal = unwritten - reserved - rounding
        free, lost = (0, taken.free) if taken.is_blocked else (taken.free, 0)
        return Instant(taken.step, taken.time, taken.waits, taken.written, reserved, internal, rounding + lost, free)

    def shares(self) -> dict[str, float]:
        """Share of the capacity by purpose, averaged over the time in which someone waited. ValueError when nobody ever did."""
        instants = self.instants
        seconds = np.array([after.time - now.time for now, after in pairwise(instants)])
        waits = np.array([instant.waits for instant in instants[:-1]])
        weights = seconds * waits
        if not weights.sum():
            raise ValueError("nobody ever waited: the shares are over the time in which memory was asked for")
        slots = np.array([instant[3:] for instant in instants[:-1]], float)
        means = weights @ slots / weights.sum() / self._taken[0].capacity
        return dict(zip(PURPOSES, means.tolist(), strict=True))


def _first_readers(snapshot: EngineSnapshot) -> tuple[list[Sample], np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(sample, start, end, limit, weight) of the unwritten slots of every block that is not full, as its first reader has it."""
    rows = [row for state in snapshot.requests for row in _unwritten(state, snapshot)]
    first = {block: row for block, *row in reversed(rows)}
    spans = np.array([row[1:] for row in first.values()], np.int64).reshape(-1, 4)
    return [row[0] for row in first.values()], *spans.T


def _unwritten(state: RequestState, snapshot: EngineSnapshot):
    """(block, sample, start, end, limit, weight) for each of its blocks that is not full: the positions of its unwritten slots, up
    to which position memory was asked for, and as how many slots of a common block each counts. Runs of samples that have yet
    to fork stand behind each other in a table."""
    filled = snapshot.filled
    seats = state.num_samples if state.num_reserved_tokens and not state.num_output_tokens else 1
    for group, table in enumerate(state.block_tables):
        size = snapshot.block_size_of(group)
        weight, run = snapshot.block_size // size, len(table) // seats
        for logical in np.flatnonzero((table > 0) & (filled[table] < size)).tolist():
            block, first = int(table[logical]), logical % run * size
            limit = state.num_reserved_tokens or first + size
            yield block, (state.id, state.child), first + int(filled[block]), first + size, limit, weight
