"""A recorded moment, rolled forward from one to a later one, and shown as the snapshot that it was."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .. import derived
from ..blocked import LEADS as LEADS_WORDS
from ..blocked import Blocked
from ..events import Cause
from ..kvcache.eviction import STRATEGIES
from ..snapshot import EngineSnapshot, RequestState
from .delta import BEHIND, CAUSES, LEADS, RUNS, STATES, STATUSES, Met, empty_blocks, totals_of
from .span import Span


@dataclass(frozen=True, slots=True)
class Facts:
    """What never changes while an engine is recorded."""

    block_size: int
    num_blocks: int
    num_groups: int
    num_host_blocks: int
    eviction_policy: str
    counters: tuple[str, ...]  # names, in order
    whole: tuple[bool, ...]  # which of them are whole numbers
    block_sizes: tuple[int, ...] = ()  # of the KV groups, where they differ


class _Sequence:
    __slots__ = ("computed", "first_token", "met", "standing", "tables", "tokens")

    def __init__(self, met: Met, num_tables: int):
        self.met = met
        self.computed = self.tokens = 0
        self.standing: list[int] = []  # as the columns of TABLES["standing"]
        self.first_token: float | None = None
        self.tables = [array("i") for _ in range(num_tables)]  # of the KV groups, then those in host memory

    def copy(self) -> _Sequence:
        new = _Sequence(self.met, 0)
        new.computed, new.tokens, new.standing, new.first_token = (
            self.computed,
            self.tokens,
            self.standing,
            self.first_token,
        )
        new.tables = [table[:] for table in self.tables]
        return new

    def edit(self, table: int, position: int, block: int) -> None:
        held = self.tables[table]
        if position < 0:
            del held[block:]
        elif position == len(held):
            held.append(block)
        else:
            held[position] = block


class State:
    """The state at one moment; new, an engine in which nothing has happened yet. `blocks`: BLOCK [num_blocks]; `sequences`:
    those that are shown, by number."""

    def __init__(self, facts: Facts):
        self.facts = facts
        self.moment = -1  # counted from the start of the recording
        self.is_known = False  # False: nothing was rolled into it yet, and it shows no moment
        self.step, self.time, self.state = 0, 0.0, 0
        self.leader = -1
        self.blocks = empty_blocks(facts.num_blocks)
        self.sequences: dict[int, _Sequence] = {}
        self.line: list[int] = []
        self.counters = np.zeros(len(facts.counters))

    def copy(self) -> State:
        new = State(self.facts)
        new.__dict__.update(self.__dict__)
        new.blocks, new.counters = self.blocks.copy(), self.counters.copy()
        new.sequences = {no: sequence.copy() for no, sequence in self.sequences.items()}
        return new

    @property
    def nbytes(self) -> int:
        return self.blocks.nbytes + sum(200 + 4 * sum(map(len, s.tables)) for s in self.sequences.values())

    @property
    def totals(self) -> tuple[int, ...]:
        """As the columns of TOTALS."""
        return totals_of(self.facts.counters)(self.counters.tolist())

    # --- forward --------------------------------------------------------------------------------------------------

    def roll(self, span: Span, stop: int) -> None:
        """Forward to moment `stop − 1` of the span, counted from its first. This moment is the span's or the one before it."""
        start = self.moment + 1 - span.first
        if start >= stop:
            return
        self._roll_blocks(span, start, stop)
        self._roll_sequences(span, start, stop)
        self.counters[span.part("counters", start, stop)[:, 0]] = span.part("counter_values", start, stop)[:, 0]
        at = stop - 1
        self.moment, self.is_known = span.first + at, True
        self.step, self.time = int(span.steps[at]), float(span.moments["time"][at])
        self.state, self.leader = int(span.moments["state"][at]), int(span.moments["leader"][at])

    def _roll_blocks(self, span: Span, start: int, stop: int) -> None:
        blocks, fills = span.part("blocks", start, stop)[:, 0], span.part("fills", start, stop)
        rows = span.rows[span.place("blocks", start) : span.place("blocks", stop)]
        self.blocks[blocks] = rows  # of several rows of one block the last stays
        moments = np.arange(start, stop)
        at = np.concatenate([np.repeat(moments, span.counts[name][start:stop]) for name in ("blocks", "fills")])
        order = np.argsort(at, kind="stable")
        self.blocks["filled"][np.concatenate([blocks, fills[:, 0]])[order]] = np.concatenate(
            [rows["filled"], fills[:, 1]]
        )[order]

    def _roll_sequences(self, span: Span, start: int, stop: int) -> None:
        sequences, first = self.sequences, span.first
        for moment, met in span.met:
            if first + start <= moment < first + stop:
                sequences[met.no] = _Sequence(met, 2 * self.facts.num_groups)
        for no, computed, tokens in span.part("progress", start, stop).tolist():
            sequence = sequences[no]
            sequence.computed, sequence.tokens = computed, tokens
        for row in span.part("standing", start, stop).tolist():
            sequences[row[0]].standing = row
        for no, table, position, block in span.part("edits", start, stop).tolist():
            sequences[no].edit(table, position, block)
        times = span.part("first_times", start, stop)[:, 0].tolist()
        for no, time in zip(span.part("firsts", start, stop)[:, 0].tolist(), times, strict=True):
            sequences[no].first_token = time
        for no in span.part("gone", start, stop)[:, 0].tolist():
            del sequences[no]
        told = np.flatnonzero(span.moments["has_line"][start:stop])
        if len(told):
            last = start + int(told[-1])
            self.line = span.part("line", last, last + 1)[:, 0].tolist()

    # --- as a snapshot --------------------------------------------------------------------------------------------

    def snapshot(self) -> EngineSnapshot:
        facts, blocks = self.facts, self.blocks
        requests = self._requests()
        ref_count, is_cached = blocks["ref_count"].copy(), blocks["is_cached"].copy()
        ordered = STRATEGIES[facts.eviction_policy].ordered(_Statistics(blocks))
        counters = self.counters.tolist()
        return EngineSnapshot(
            step=self.step,
            time=self.time,
            state=STATES[self.state],
            block_size=facts.block_size,
            num_blocks=facts.num_blocks,
            block_state=derived.block_states(ref_count, is_cached),
            ref_count=ref_count,
            generation=blocks["generation"].copy(),
            filled=blocks["filled"].copy(),
            owner=derived.owners(requests, facts.num_blocks),
            last_used_step=derived.last_used(blocks["last_used_step"], ref_count, self.step),
            eviction_order=ordered.astype(np.int32),
            parent=derived.parents(blocks["before"], is_cached, blocks["is_alone"]),
            num_hits=blocks["hits"].copy(),
            computed_for=blocks["computed_for"].copy(),
            requests=requests,
            num_host_blocks=facts.num_host_blocks,
            counters={
                name: int(value) if whole else value
                for name, value, whole in zip(facts.counters, counters, facts.whole, strict=True)
            },
            block_sizes=facts.block_sizes,
            group=blocks["group"].copy() if facts.block_sizes else np.zeros(0, np.int8),
        )

    def _requests(self) -> tuple[RequestState, ...]:
        places = {no: place for place, no in enumerate(self.line)}
        shown = sorted(self.sequences.values(), key=lambda s: (s.met.id, s.met.child))
        return tuple(self._request(sequence, places.get(sequence.met.no, -1)) for sequence in shown)

    def _request(self, sequence: _Sequence, place: int) -> RequestState:
        met, groups = sequence.met, self.facts.num_groups
        (
            _, status, reserved, cached, since, passed, in_host, why, needed, available, kept, behind,
        ) = sequence.standing  # fmt: skip
        blocked = self._blocked(why, needed, available, kept, behind)
        tables = [np.array(table, np.int32) for table in sequence.tables]
        return RequestState(
            id=met.id,
            child=met.child,
            status=STATUSES[status],
            num_samples=met.num_samples,
            num_prompt_tokens=met.num_prompt,
            num_computed_tokens=sequence.computed,
            num_cached_tokens=cached,
            num_output_tokens=sequence.tokens - met.num_prompt,
            block_tables=tuple(tables[:groups]),
            blocked_because="" if why == RUNS else LEADS_WORDS if blocked is None else blocked.sentence(),
            blocked_cause="" if blocked is None else blocked.cause.value,
            num_reserved_tokens=reserved,
            label=met.label,
            priority=met.priority,
            deadline=met.deadline,
            arrival=met.arrival,
            first_token=sequence.first_token,
            queue_place=place,
            waiting_since_step=since,
            num_times_passed=passed,
            host_tables=tuple(tables[groups:]) if in_host else (),
        )

    def _blocked(self, why: int, *numbers: int) -> Blocked | None:
        if why in (RUNS, LEADS):
            return None
        return Blocked(Cause.BEHIND, behind=self.leader) if why == BEHIND else Blocked(CAUSES[why], *numbers)


class _Statistics:
    """Columns of the pool by name, for an eviction strategy."""

    def __init__(self, blocks: np.ndarray):
        self._blocks = blocks

    def __getattr__(self, name: str) -> np.ndarray:
        return self._blocks[name]


def moment_of(spans: Sequence[Span], step: int) -> tuple[int, int]:
    """(which span, how many of its moments) are up to the end of this step; (0, 0) where none is."""
    lo, hi = 0, len(spans)
    while lo < hi:
        middle = (lo + hi) // 2
        if spans[middle].steps[0] <= step:
            lo = middle + 1
        else:
            hi = middle
    if not lo:
        return 0, 0
    return lo - 1, int(np.searchsorted(spans[lo - 1].steps, step, side="right"))
