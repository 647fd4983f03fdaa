"""What has changed in an engine since the last look: for the engine's thread, in tens of microseconds.

Blocks: the pool notes which ones it has changed. Sequences: those that run are compared with what was seen last; of those
that wait only whoever was told about (an event names its request), was passed, leads the line, or has a reason of its own.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import numpy as np

from ..observe import MAX_WAITING_SHOWN
from .delta import BEHIND, BLOCK, CAUSE_CODE, LEADS, RUNS, STATUSES, Delta, Met, empty_blocks
from .state import Facts

if TYPE_CHECKING:
    from ..core import EngineCore
    from ..kvcache.block_pool import BlockPool
    from ..request import Sequence

_STATUS = {name: code for code, name in enumerate(STATUSES)}
_RUNNING = "running"


class BlockWatch:
    """Of one pool."""

    def __init__(self, pool: BlockPool):
        self._pool = pool
        self._columns = [(name, np.asarray(getattr(pool, name))) for name in BLOCK.names or ()]  # the pool's own memory

    def note_all(self, delta: Delta) -> None:
        """Every block that is not as in an empty pool."""
        self._pool.take_changes()
        rows = self._rows(np.arange(self._pool.num_blocks))
        used = np.flatnonzero(rows != empty_blocks(len(rows)))
        delta.blocks, delta.block_rows = used.tolist(), rows[used]

    def note(self, delta: Delta) -> None:
        changed, filled = self._pool.take_changes()
        if changed:
            delta.blocks = list(changed)
            delta.block_rows = self._rows(np.array(delta.blocks))
        slots = self._pool.filled
        for block in filled:
            if block not in changed:
                delta.fills += (block, slots[block])

    def _rows(self, blocks: np.ndarray) -> np.ndarray:
        rows = np.empty(len(blocks), BLOCK)
        for name, column in self._columns:
            rows[name] = column[blocks]
        return rows


class _Seen:
    """A sequence as it was seen last."""

    __slots__ = ("computed", "first_token", "no", "passed", "standing", "tables", "tokens")

    def __init__(self, no: int, num_tables: int):
        self.no = no
        self.computed = self.tokens = self.passed = -1
        self.standing: tuple[int, ...] = ()
        self.first_token: float | None = None
        self.tables = [array("i") for _ in range(num_tables)]


class SequenceWatch:
    """Of one core: the sequences that a snapshot shows, which are those that run and the beginning of the line."""

    def __init__(self, core: EngineCore):
        self._core = core
        self._groups = core.num_groups
        self._seen: dict[Sequence, _Seen] = {}
        self._next = 0
        self._shown: list[Sequence] = []
        self._line: list[Sequence] = []
        self._with_reason: set[Sequence] = set()

    def note(self, delta: Delta, told: set[int] | None) -> None:
        """`told`: ids of the requests that events since the last look are about; None: it is not known, all may be."""
        scheduler = self._core.scheduler
        running, line = scheduler.running, scheduler.waiting.first(MAX_WAITING_SHOWN)
        shown = [*running, *line]
        if shown != self._shown:
            self._meet(shown, delta)
        if line != self._line or not self._seen:
            self._line, delta.has_line = line, True
            delta.line = [self._seen[seq].no for seq in line]
        for seq in running:
            seen = self._seen[seq]
            if told is None or not seen.standing or seq.request.id in told:
                self._note_standing(seq, seen, delta)
            self._note_progress(seq, seen, seq.block_tables, delta)
        self._note_line(line, delta, told)

    def _note_line(self, line: list[Sequence], delta: Delta, told: set[int] | None) -> None:
        reasons = self._core.scheduler.reasons
        leader, found = reasons.leader, reasons.found
        delta.leader = -1 if leader is None else leader.request.id
        changed = {*found, leader}
        changed, self._with_reason = changed | self._with_reason, changed
        for seq in line:
            seen = self._seen[seq]
            is_told = told is None or not seen.standing or seq.request.id in told
            if is_told:
                self._note_progress(seq, seen, (*seq.block_tables, *self._host_tables(seq)), delta)
            if is_told or seq in changed or seq.num_times_passed != seen.passed:
                self._note_standing(seq, seen, delta)

    def _meet(self, shown: list[Sequence], delta: Delta) -> None:
        seen = self._seen
        for seq in shown:
            if seq not in seen:
                seen[seq] = _Seen(self._next, 2 * self._groups)
                request = seq.request
                delta.met.append(
                    Met(
                        self._next, request.id, seq.child, request.params.n, request.num_prompt_tokens, request.label,
                        request.priority, request.deadline, request.metrics.arrival,
                    )
                )  # fmt: skip
                self._next += 1
        for seq in seen.keys() - set(shown):
            delta.gone.append(seen.pop(seq).no)
        self._shown = shown

    def _note_progress(self, seq: Sequence, seen: _Seen, tables: tuple[array, ...], delta: Delta) -> None:
        computed, tokens = seq.num_computed_tokens, len(seq.token_ids)
        if computed != seen.computed or tokens != seen.tokens:
            seen.computed, seen.tokens = computed, tokens
            delta.progress += (seen.no, computed, tokens)
        for g, table in enumerate(tables):
            if table != seen.tables[g]:
                _note_edits(seen, g, table, delta)
        first_token = seq.request.metrics.first_token
        if seen.first_token is None and first_token is not None:
            seen.first_token = first_token
            delta.firsts.append(seen.no)
            delta.first_times.append(first_token)

    def _note_standing(self, seq: Sequence, seen: _Seen, delta: Delta) -> None:
        core, seen.passed = self._core, seq.num_times_passed
        status = seq.status.value
        why = (RUNS, 0, 0, 0, -1) if status == _RUNNING else self._why(seq)
        standing = (
            _STATUS[status], core.tables.reserved_tokens(seq), seq.num_cached_tokens, seq.waiting_since_step,
            seen.passed, bool(core.scheduler.swap.slots(seq)), *why,
        )  # fmt: skip
        if standing != seen.standing:
            seen.standing = standing
            delta.standing += (seen.no, *standing)
            if status == _RUNNING:  # what it had in host memory is back
                for g in range(self._groups, 2 * self._groups):
                    _note_edits(seen, g, array("i"), delta)

    def _why(self, seq: Sequence) -> tuple[int, int, int, int, int]:
        reasons = self._core.scheduler.reasons
        blocked = reasons.found.get(seq)
        if blocked is not None:
            return (CAUSE_CODE[blocked.cause], *blocked[1:])
        return (LEADS if seq is reasons.leader else BEHIND, 0, 0, 0, -1)

    def _host_tables(self, seq: Sequence) -> tuple[array, ...]:
        return self._core.scheduler.swap.slots(seq) or (array("i"),) * self._groups


def _note_edits(seen: _Seen, g: int, table: array, delta: Delta) -> None:
    """What makes the table that was seen last into this one."""
    held, no = seen.tables[g], seen.no
    common = min(len(held), len(table))
    if len(held) > common:
        delta.edits += (no, g, -1, common)
    if held[:common] != table[:common]:
        for position in range(common):
            if held[position] != table[position]:
                delta.edits += (no, g, position, table[position])
    for position in range(common, len(table)):
        delta.edits += (no, g, position, table[position])
    seen.tables[g] = table[:]


def facts_of(core: EngineCore) -> Facts:
    metrics = core.metrics()
    return Facts(
        block_size=core.tables.common_size,
        num_blocks=core.tables.pool.num_blocks,
        num_groups=core.num_groups,
        num_host_blocks=core.scheduler.swap.num_blocks,
        eviction_policy=core.config.eviction_policy,
        counters=tuple(metrics),
        whole=tuple(not isinstance(value, float) for value in metrics.values()),
        block_sizes=core.tables.unequal_sizes,
    )
