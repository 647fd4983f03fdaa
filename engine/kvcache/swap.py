"""Swapping: the KV of preempted sequences waits in host memory, and comes back without being computed again.

Sequences of one request go out together as a `Unit` and come back together. Every distinct block is moved once, and whoever
shared one shares it again:

    tables before   a [7 2 9]   b [7 2 4]
    host slots      a [0 1 2]   b [0 1 3]      4 blocks out, 4 blocks in
    tables after    a [5 8 6]   b [5 8 3]

Nothing is moved here. Moves are listed, and the runner makes them before the step writes anything, those that go out first:
a block that went out may have been given to someone else in the same step. A host slot that is read in a step is free for
others only after that step has been planned. A sequence whose KV is in host memory holds no block of the pool. When the
host pool has too little room nothing changes and the caller preempts by recomputation. Source: arXiv 2309.06180, section 4.5.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..events import Cause, EventKind, Journal
from ..metrics import Metrics
from .block_pool import NULL_BLOCK

if TYPE_CHECKING:
    from ..request import Sequence
    from .block_table import BlockTables

NO_SLOT = -1  # in the place of the null block
Moves = list[tuple[int, int]]


@dataclass(slots=True)
class Unit:
    """Samples of one request that went out together. `slots`: a host table per sequence and KV group."""

    slots: dict[Sequence, tuple[array, ...]]
    computed: dict[Sequence, int]  # tokens whose KV is there

    def distinct(self) -> set[int]:
        return {slot for tables in self.slots.values() for table in tables for slot in table if slot != NO_SLOT}


class SwapSpace:
    """`num_blocks` blocks of host memory, and who waits in them."""

    def __init__(self, num_blocks: int, tables: BlockTables, journal: Journal, metrics: Metrics):
        self.num_blocks = num_blocks
        self.tables = tables
        self.journal = journal
        self.metrics = metrics
        self._free = list(range(num_blocks - 1, -1, -1))
        self._unit_of: dict[Sequence, Unit] = {}
        self._out: Moves = []  # (block, host slot)
        self._in: Moves = []  # (host slot, block)
        self._on_their_way: list[Unit] = []  # went out, and no step has been computed since

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    @property
    def sequences(self) -> Iterable[Sequence]:
        """Who waits in host memory."""
        return self._unit_of.keys()

    def members(self, seq: Sequence | None) -> list[Sequence]:
        """Who went out with it and still waits, itself included; nobody when it is not in host memory."""
        unit = self._unit_of.get(seq) if seq is not None else None
        return [] if unit is None else list(unit.slots)

    def slots(self, seq: Sequence) -> tuple[array, ...]:
        """Its host blocks, a table a KV group, NO_SLOT in the place of the null block; () when it is not in host memory."""
        unit = self._unit_of.get(seq)
        return () if unit is None else unit.slots[seq]

    # --- out ------------------------------------------------------------------------------------------------------

    def swap_out(self, sequences: list[Sequence], cause: Cause) -> bool:
        """Move the blocks of these samples of one request to host memory, before they are released. False, and nothing has
        changed, when the host has too little room or nothing is computed yet."""
        blocks = dict.fromkeys(
            block for seq in sequences for table in seq.block_tables for block in table if block != NULL_BLOCK
        )
        if not all(seq.num_computed_tokens for seq in sequences) or len(blocks) > len(self._free):
            return False
        slot_of = {block: self._free.pop() for block in blocks} | {NULL_BLOCK: NO_SLOT}
        unit = Unit(
            {seq: tuple(array("i", map(slot_of.get, table)) for table in seq.block_tables) for seq in sequences},
            {seq: seq.num_computed_tokens for seq in sequences},
        )
        self._unit_of |= dict.fromkeys(sequences, unit)
        self._on_their_way.append(unit)
        self._out += [(block, slot_of[block]) for block in blocks]
        self._tell(EventKind.SWAPPED_OUT, sequences, cause, len(blocks))
        return True

    # --- in -------------------------------------------------------------------------------------------------------

    def blocks_to_return(self, seq: Sequence) -> int:
        """Free blocks that its unit needs to come back and to go on: what went out, what is left of prefills and the next
        token, and a copy of a partly filled last block for each of its readers but one. Of beams that is never more than what
        the door has made sure of."""
        unit, tables, tails = self._unit_of[seq], self.tables, []
        needed = len(unit.distinct())
        for member, slots in unit.slots.items():
            held = sum(slot != NO_SLOT for table in slots for slot in table)
            needed += max(0, tables.blocks_for(member.num_tokens) - held)
            sizes = zip(slots, tables.block_sizes, strict=True)
            tails += [table[-1] for table, size in sizes if unit.computed[member] % size]
        return needed + len(tails) - len(set(tails))

    def shrink(self, seq: Sequence) -> None:
        """Where the pool, all of it free, is too small for its unit to go on, the last members are computed again instead."""
        while len(members := self.members(seq)) > 1 and self.blocks_to_return(seq) > self.tables.pool.num_free:
            self.drop(members[-1])

    def swap_in(self, seq: Sequence) -> list[Sequence]:
        """Give its unit blocks again and have them filled from host memory. Returns its members, in order."""
        unit = self._unit_of[seq]
        members, block_of = list(unit.slots), {}
        for member, slots in unit.slots.items():
            self.tables.restore(member, slots, unit.computed[member], block_of)
            del self._unit_of[member]
        if unit in self._on_their_way:
            self._on_their_way.remove(unit)
        self._in += block_of.items()
        self._tell(EventKind.SWAPPED_IN, members, Cause.CAPACITY, len(block_of))
        return members

    def drop(self, seq: Sequence) -> None:
        """It does not come back from host memory: it is over, or will be computed again. Slots that only it reads are free, and
        what was still to be moved there stays where it is: the next owner's blocks go there, perhaps in the same step."""
        unit = self._unit_of.pop(seq, None)
        if unit is None:
            return
        before = unit.distinct()
        del unit.slots[seq]
        freed = before - unit.distinct()
        self._free += freed
        self._out = [move for move in self._out if move[1] not in freed]

    # --- the moves ------------------------------------------------------------------------------------------------

    def take_moves(self) -> tuple[Moves, Moves]:
        """(out, in) since the last call. The host slots that are read are free from now on."""
        moves = self._out, self._in
        self._out, self._in = [], []
        self._free += [slot for slot, _ in moves[1]]
        return moves

    def arrived(self) -> None:
        """The moves of the step were made."""
        self._on_their_way.clear()

    def lost(self) -> list[Sequence]:
        """The moves of the step may not have been made. Returns who was on the way out and is to be computed again."""
        self.take_moves()
        gone = [seq for unit in self._on_their_way for seq in unit.slots]
        for seq in gone:
            self.drop(seq)
        self._on_their_way.clear()
        return gone

    def _tell(self, kind: EventKind, sequences: list[Sequence], cause: Cause, blocks: int) -> None:
        request = sequences[0].request
        numbers = {"blocks": blocks, "bytes": blocks * self.tables.block_bytes, "samples": len(sequences),
                   "used_host_blocks": self.num_used - (blocks if kind is EventKind.SWAPPED_IN else 0)}  # fmt: skip
        if request.advances_together:
            numbers["beam_width"] = request.params.n
        self.journal.emit(kind, request.id, sequences[0].child, cause=cause, numbers=numbers)
        self.metrics.count(f"kvscope:blocks_{kind.value}_total", blocks)

    def check_integrity(self, waiting: Iterable[Sequence]) -> None:
        """Raise RuntimeError where slots and those who wait in them contradict each other."""
        units = {id(unit): unit for unit in self._unit_of.values()}.values()
        used = [slot for unit in units for slot in unit.distinct()] + [slot for slot, _ in self._in]
        if sorted(used + self._free) != list(range(self.num_blocks)):
            raise RuntimeError(
                f"host blocks {sorted(used)} are used and {sorted(self._free)} free, of {self.num_blocks}"
            )
        targets = [slot for _, slot in self._out]
        if len(set(targets)) != len(targets) or not set(targets) <= set(used):
            raise RuntimeError(f"blocks go out to host blocks {targets}, of which {sorted(used)} are used")
        waiting = set(waiting)
        for seq, unit in self._unit_of.items():
            if seq not in waiting or seq not in unit.slots or len({s.request for s in unit.slots}) != 1:
                raise RuntimeError(f"{seq} is in host memory and does not wait there with its request")
            lengths = [len(table) for table in unit.slots[seq]]
            if lengths != [-(-unit.computed[seq] // size) for size in self.tables.block_sizes]:
                raise RuntimeError(f"{seq} has {lengths} host blocks for {unit.computed[seq]} tokens")
