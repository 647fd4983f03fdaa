"""One recorded step in six parts: what the engine decided, took, copied, computed, chose and gave back, one after the other.

    schedule > allocate > copy > forward > sample > free

A `SubStep` has the face of a `Moment`: the state before the step, with the events of the parts so far done to it in the order in
which they came. Tables are followed and readers counted from them, because an event tells only when a block lost its last
reader. What no event tells is taken from the end of the step, in the part in which it happens: who runs and what was found in the
cache by `schedule`, how much is written by `forward`, what was chosen by `sample`. After `free` it is the end of the step itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property

import numpy as np
from kvscope.engine.events import Cause, Event, EventKind
from kvscope.engine.recording.recording import Recording
from kvscope.engine.snapshot import NOT_CACHED, BlockState, EngineSnapshot, RequestState

PARTS = ("schedule", "allocate", "copy", "forward", "sample", "free")
PART_WORDS = (
    "It is decided who computes, who waits and who has to go.",
    "Blocks are taken for what will be written; cached text is evicted where none is free.",
    "Blocks that others read are copied before they are written.",
    "The model runs: keys and values are written, and full blocks can be found by their text.",
    "The next tokens are chosen; requests split into their samples.",
    "Who is done leaves, and gives its blocks back.",
)
_SCHEDULE, _ALLOCATE, _COPY, _FORWARD, _SAMPLE, _FREE = range(1, 7)
_PART_OF = {
    EventKind.EVICTED: _ALLOCATE, EventKind.ALLOCATED: _ALLOCATE, EventKind.COPIED: _COPY, EventKind.PUBLISHED: _FORWARD,
    EventKind.NULLED: _FORWARD, EventKind.FORKED: _SAMPLE, EventKind.FREED: _FREE, EventKind.FINISHED: _FREE,
    EventKind.CANCELLED: _FREE, EventKind.FAILED: _FREE, EventKind.STEP: _FREE, EventKind.SUBMITTED: _FREE,
}  # fmt: skip
_PART_OF_CAUSE = {
    Cause.FORK: _SAMPLE, Cause.PREEMPTED: _SCHEDULE, Cause.COPY_ON_WRITE: _COPY, Cause.OUT_OF_WINDOW: _FORWARD, Cause.LEFT: _FREE,
}  # fmt: skip
_LEFT = frozenset({EventKind.PREEMPTED, EventKind.FINISHED, EventKind.CANCELLED, EventKind.FAILED})
Key = tuple[int, int]  # request id, child


def part_of(event: Event) -> int:
    """In which part of its step an event happened, 1 to 6; what only tells of a decision is `schedule`."""
    if event.kind in (EventKind.SHARED, EventKind.FREED, EventKind.NULLED) or event.cause is Cause.LEFT:
        return _PART_OF_CAUSE.get(event.cause, _PART_OF.get(event.kind, _SCHEDULE))
    if event.kind is EventKind.ALLOCATED and event.cause is Cause.COPY_ON_WRITE:
        return _COPY
    return _PART_OF.get(event.kind, _SCHEDULE)


class SubStep:
    """`recording` inside of `step`, after its part `part` (1: schedule, to 6: free). Raises ValueError for a step whose beginning was
    not recorded."""

    state = "paused"

    def __init__(self, recording: Recording, step: int, part: int):
        self._before, self._after = recording.at(step - 1), recording.at(step)
        self.recording, self.step, self.part = recording, step, part
        self.info = recording.info
        self.events = self
        self.next_index = self._after.events.next_index
        self._texts = self._after if part >= _SAMPLE else self._before
        self.handles, self.decode_token = self._texts.handles, recording.decode_token

    @cached_property
    def done(self) -> list[Event]:
        """The events of the step so far, oldest first."""
        events, _, _ = self._after.events.since(self._before.events.next_index)
        return [event for event in events if part_of(event) <= self.part]

    def since(self, index: int) -> tuple[list[Event], int, int]:
        """As an event log's."""
        earlier, _, lost = self._before.events.since(index)
        return [*earlier, *(event for event in self.done if event.index >= index)], self.next_index, lost

    def snapshot(self) -> EngineSnapshot:
        """The same one every time."""
        return self._snapshot

    @cached_property
    def _snapshot(self) -> EngineSnapshot:
        after = self._after.snapshot()
        return after if self.part == _FREE else state_of(self._before.snapshot(), after, self.done, self.part)


def state_of(before: EngineSnapshot, after: EngineSnapshot, events: Iterable[Event], part: int) -> EngineSnapshot:
    """The state in which `events` of a step leave the one `before` it, after its part `part`."""
    tables: dict[Key, list[list[int]]] = {
        (r.id, r.child): [table.tolist() for table in r.block_tables] for r in before.requests
    }
    columns = {name: getattr(before, name).copy() for name in _COLUMNS}
    cached = before.parent != NOT_CACHED
    num_groups = max((len(r.block_tables) for r in (*before.requests, *after.requests)), default=1)
    sharing: Key | None = None  # whose tables are begun with the blocks of another
    for event in events:
        begins = event.kind is EventKind.SHARED and event.cause is not Cause.SWAPPED_IN
        who = (event.request_id, event.child) if begins else None
        if begins and who != sharing:
            tables.pop(who, None)
        sharing = who
        block, own = event.block_id, tables.setdefault((event.request_id, event.child), [[] for _ in range(num_groups)])
        if event.kind is EventKind.ALLOCATED:
            logical, table = int(event.numbers["logical"]), own[event.group]
            table.extend([0] * (logical + 1 - len(table)))
            table[logical], cached[block] = block, False
            columns["generation"][block], columns["filled"][block] = event.generation, 0
            if before.block_sizes:
                columns["group"][block] = event.group
        elif event.kind is EventKind.SHARED:
            own[event.group].append(block)
        elif event.kind is EventKind.COPIED:
            columns["filled"][block] = event.numbers["tokens"]
        elif event.kind is EventKind.NULLED:
            own[event.group][int(event.numbers["logical"])] = 0
        elif event.kind is EventKind.PUBLISHED:
            cached[block] = True
        elif event.kind is EventKind.FREED:
            cached[block] = bool(event.numbers["cached"])
            columns["filled"][block] *= cached[block]
        elif event.kind is EventKind.EVICTED:
            cached[block], columns["filled"][block] = False, 0
        elif event.kind in _LEFT:
            for table in own:
                table.clear()
    requests = tuple(_requests(before, after, tables, part))
    places: dict[Key, int] = {(r.id, r.child): i for i, r in enumerate(requests)}
    readers: dict[int, list[int]] = {}
    for key, i in places.items():
        for block in {b for table in tables.get(key, ()) for b in table if b > 0}:
            readers.setdefault(block, []).append(i)
    return _counted(before, after, requests, columns, cached, readers, part)


_COLUMNS = ("generation", "filled", "last_used_step", "parent", "num_hits", "computed_for", "group")


def _requests(
    before: EngineSnapshot, after: EngineSnapshot, tables: dict[Key, list[list[int]]], part: int
) -> Iterable[RequestState]:
    """Who is there; of samples that are over, what they were before."""
    first = {(r.id, r.child): r for r in before.requests}
    last = {(r.id, r.child): r for r in after.requests}
    there = first.keys() | last.keys() if part >= _SAMPLE else first.keys()
    for key in sorted(there):
        old, new = first.get(key) or last[key], last.get(key) or first[key]
        over = key not in last
        known = new if part >= _FORWARD and not over else old
        yield replace(
            new,
            status="running" if over and tables.get(key, [[]])[0] else new.status,
            num_computed_tokens=known.num_computed_tokens if known.num_computed_tokens else new.num_cached_tokens,
            num_output_tokens=(new if part >= _SAMPLE else old).num_output_tokens,
            block_tables=tuple(np.array(table, np.int32) for table in tables.get(key, ())),
        )


def _counted(
    before: EngineSnapshot,
    after: EngineSnapshot,
    requests: tuple[RequestState, ...],
    columns: dict[str, np.ndarray],
    cached: np.ndarray,
    readers: dict[int, list[int]],
    part: int,
) -> EngineSnapshot:
    """A snapshot with the readers counted; `columns` are what events changed of the blocks."""
    held = list(readers)
    ref_count, owner = np.zeros_like(before.ref_count), np.full_like(before.owner, -1)
    ref_count[held] = [len(readers[block]) for block in held]
    owner[held] = [readers[block][0] for block in held]
    pinned = (before.block_state == BlockState.PINNED) | (after.block_state == BlockState.PINNED)
    state = np.select([pinned, ref_count > 1, ref_count == 1, cached], _STATES, BlockState.EMPTY).astype(np.uint8)
    ref_count[pinned] = before.ref_count[pinned]
    columns["last_used_step"][held] = after.step
    if part >= _FORWARD:
        same = (after.generation == columns["generation"]) & ((ref_count > 0) | cached)
        columns["filled"] = np.where(same, np.maximum(after.filled, columns["filled"]), columns["filled"])
    for name in ("parent", "num_hits", "computed_for"):
        columns[name] = np.where(
            cached, np.where(before.parent == NOT_CACHED, getattr(after, name), columns[name]), _NONE[name]
        )
    free = state == BlockState.CACHED
    left = [block for block in before.eviction_order.tolist() if free[block]]
    order = [*left, *sorted(set(np.flatnonzero(free).tolist()) - set(left))]
    return replace(
        before, step=after.step, time=after.time, state="paused", requests=requests, block_state=state, ref_count=ref_count,
        owner=owner, eviction_order=np.array(order, np.int32), counters=before.counters, **columns,
    )  # fmt: skip


_STATES = [BlockState.PINNED, BlockState.SHARED, BlockState.ACTIVE, BlockState.CACHED]
_NONE = {"parent": NOT_CACHED, "num_hits": 0, "computed_for": -1}
