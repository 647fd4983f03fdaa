"""The pool of KV blocks: who may take one, who still reads one, and which is given up next.

A block is free when nobody reads it. Free blocks stand in one line:

    [ empty blocks ............ | cached: the next to be evicted .... the last ]
      taken first, last in first    taken when no empty block is left

A freed block that still holds findable text (it is *cached*) goes where the eviction strategy puts it, one without to the
front, so a taken block costs nothing as long as an empty one is left. Taking a cached block evicts it: its text is
removed from the prefix cache before the id is given out. Every id carries a generation, raised each time it is given out.

Cached text may continue that of another block, which stands `before` it in a table. Whoever reads a block reads the one
before it too, and a block goes only when nothing cached continues it, so that empty, cached and read blocks always add up
to the pool and every free one can be had.

Block 0 is the null block: padding of block tables, never given out, always pinned. All operations are O(1), or
O(log n) with a strategy other than lru. This module knows ids only: no request, no token and no tensor.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence

import numpy as np

from .. import derived
from ..events import Cause
from .eviction import STRATEGIES, EvictionQueue

NULL_BLOCK = 0


class BlockPool:
    """Reference counts, generations and the free blocks of `num_blocks` blocks (the null block included).

    The scalars live in `array.array`: indexing gives plain Python integers, and numpy views of the same memory make a
    snapshot a few array copies. `slot_weights`: how much of a block a slot is, by KV group, so that all blocks count alike.
    """

    def __init__(self, num_blocks: int, eviction_policy: str = "lru", slot_weights: Sequence[int] = (1,)):
        if num_blocks < 2:
            raise ValueError(f"num_blocks={num_blocks}: must be at least 2, the null block and one to give out")
        self.num_blocks = num_blocks
        self._slot_weights = slot_weights
        self.ref_count = array("i", bytes(4 * num_blocks))
        self.generation = array("i", bytes(4 * num_blocks))
        self.filled = array("i", bytes(4 * num_blocks))  # slots written
        self.group = array("b", bytes(num_blocks))  # the KV group that it was given out to last
        self.last_used_step = array("i", bytes(4 * num_blocks))  # when its last reader left, or it was hit
        self.is_cached = array("b", bytes(num_blocks))  # 1: the prefix cache can find its text
        self.before = array("i", bytes(4 * num_blocks))  # the cached block whose text it continues, 0 none
        self.num_after = array("i", bytes(4 * num_blocks))  # cached blocks that continue its text
        # What eviction goes by; uses and publications are counted together, so that a number says which came later.
        self.last_use = array("q", bytes(8 * num_blocks))
        self.published = array("q", bytes(8 * num_blocks))
        self.hits = array("i", bytes(4 * num_blocks))  # since it was published, 0 while it is not cached
        self.priority = array("q", bytes(8 * num_blocks))  # of its most important request: the lowest number
        # What is told to those who look, and decides nothing.
        self.computed_for = array("i", [-1]) * num_blocks  # the request that computed a cached block, else −1
        self.is_alone = array("b", bytes(num_blocks))  # 1: its KV group has a window, where blocks form no chains
        self._uses = 0
        self.ref_count[NULL_BLOCK] = 1
        self._empty = OrderedDict.fromkeys(range(num_blocks - 1, 0, -1))  # a stack
        self._cached: EvictionQueue = STRATEGIES[eviction_policy](self)  # without a reader
        self.num_free_cached = 0
        # For those who look, who would else have to read the whole pool: ids since the last `take_changes`.
        self._changed: set[int] = set()
        self._filled: set[int] = set()
        self.used_slots = 0  # slots written in blocks that have a reader, each block once, by weight

    @property
    def num_free(self) -> int:
        """Blocks without a reader, empty and cached ones."""
        return len(self._empty) + self.num_free_cached

    @property
    def num_used(self) -> int:
        """Blocks with at least one reader, the null block aside."""
        return self.num_blocks - 1 - self.num_free

    # --- the four things that happen to a block -------------------------------------------------------------------

    @property
    def front(self) -> int:
        """The block that `take` gives out next; the null block when none is free."""
        if self._empty:
            return next(reversed(self._empty))
        return self._cached.first() if self.num_free_cached else NULL_BLOCK

    def take(self, group: int = 0) -> int:
        """Give out the block at the front to a KV group, empty and with one reader. Whoever calls removes a cached block's text
        first (`uncache`); taking a block whose text can still be found is an error, as is taking when none is free."""
        if not self._empty:
            if self.num_free_cached:
                raise RuntimeError(
                    f"block {self.front} still holds findable text: it must be evicted before it is taken"
                )
            raise RuntimeError(f"no free block: all {self.num_blocks - 1} blocks have readers")
        return self.take_at(next(reversed(self._empty)), group)

    def take_at(self, block: int, group: int = 0) -> int:
        """Give out this empty block, wherever it stands."""
        if block not in self._empty:
            raise RuntimeError(f"block {block} is not empty: it cannot be taken")
        del self._empty[block]
        self._changed.add(block)
        self.ref_count[block] = 1
        self.generation[block] += 1
        self.filled[block] = 0
        self.group[block] = group
        return block

    def share(self, block: int) -> int:
        """One more reader; a free cached block leaves the queue. Returns the new reference count."""
        self._changed.add(block)
        count = self.ref_count[block] + 1
        if count == 1:
            if not self.is_cached[block]:
                raise RuntimeError(f"block {block} is free and holds no findable text: it cannot be shared")
            self._cached.remove(block)
            self.num_free_cached -= 1
            self.used_slots += self.filled[block] * self._slot_weights[self.group[block]]
        self.ref_count[block] = count
        return count

    def release(self, block: int, step: int) -> bool:
        """One reader less; True when it was the last one and the block is free now."""
        count = self.ref_count[block] - 1
        if count < 0 or block == NULL_BLOCK:
            raise RuntimeError(f"block {block} has {count + 1} readers and cannot lose one")
        self._changed.add(block)
        self.ref_count[block] = count
        if count:
            return False
        self.last_used_step[block] = step
        self.last_use[block] = self._count_use()
        self.used_slots -= self.filled[block] * self._slot_weights[self.group[block]]
        if self.is_cached[block]:
            self._cached.add(block)
            self.num_free_cached += 1
        else:
            self._empty_out(block)
        return True

    def fill(self, block: int, slots: int) -> None:
        """`slots` of the block are written now; the block has a reader."""
        self.used_slots += (slots - self.filled[block]) * self._slot_weights[self.group[block]]
        self.filled[block] = slots
        self._filled.add(block)

    # --- findable text --------------------------------------------------------------------------------------------

    def cache(
        self,
        block: int,
        before: int = NULL_BLOCK,
        priority: int = 0,
        *,
        computed_for: int = -1,
        is_alone: bool = False,
    ) -> None:
        """The block's text can be found from now on, as that which continues `before`; both have a reader."""
        if self.ref_count[block] < 1:
            raise RuntimeError(f"block {block} has no reader: its text cannot become findable")
        if before != NULL_BLOCK and not (self.is_cached[before] and self.ref_count[before]):
            raise RuntimeError(f"block {block} cannot continue block {before}, which is not cached or has no reader")
        if self.is_cached[block]:
            raise RuntimeError(f"block {block} is cached already")
        self._changed.add(block)
        self.is_cached[block] = 1
        self.before[block] = before
        self.num_after[before] += 1
        self.published[block] = self._count_use()
        self.priority[block] = priority
        self.computed_for[block] = computed_for
        self.is_alone[block] = is_alone

    def hit(self, block: int, priority: int = 0) -> int:
        """`share` by a request that found the block's text."""
        self.hits[block] += 1
        self.priority[block] = min(self.priority[block], priority)
        return self.share(block)

    def uncache(self, block: int) -> None:
        """The block's text cannot be found any more. A free block moves to the front, where empty ones stand."""
        if not self.is_cached[block]:
            return
        if self.num_after[block]:
            raise RuntimeError(
                f"block {block} cannot lose its text before the {self.num_after[block]} that continue it"
            )
        self._changed.add(block)
        self.is_cached[block] = 0
        self.hits[block], self.computed_for[block] = 0, -1
        self._detach(block)
        if self.ref_count[block] == 0:
            self._cached.remove(block)
            self.num_free_cached -= 1
            self._empty_out(block)

    def move(self, block: int, before: int) -> None:
        """The free block continues the same text in another block from now on, which so was used just now."""
        self._detach(block)
        self._changed.add(block)
        self.before[block] = before
        self.num_after[before] += 1
        while before != NULL_BLOCK and not self.ref_count[before]:
            self._changed.add(before)
            self.last_use[before] = self._count_use()
            self._cached.remove(before)
            self._cached.add(before)
            before = self.before[before]

    def _detach(self, block: int) -> None:
        before = self.before[block]
        self.num_after[before] -= 1
        if before != NULL_BLOCK and not self.num_after[before] and not self.ref_count[before]:
            self._cached.add(before)  # it is an end of text now

    def after(self, block: int) -> list[int]:
        """Cached blocks that continue the text of this one. O(number of blocks): for rare operations."""
        cached = np.frombuffer(self.is_cached, np.int8) == 1
        return np.flatnonzero(cached & (np.frombuffer(self.before, np.int32) == block)).tolist()

    def _empty_out(self, block: int) -> None:
        self.filled[block] = 0
        self._empty[block] = None

    def _count_use(self) -> int:
        self._uses += 1
        return self._uses

    # --- for those who look ---------------------------------------------------------------------------------------

    def free_queue(self) -> Iterator[int]:
        """Free blocks in the order in which they are taken."""
        yield from reversed(self._empty)
        yield from self._cached.order()

    def why_evicted(self, block: int) -> Cause:
        """Why the cached block at the front stands there."""
        return self._cached.why(block)

    def eviction_order(self) -> np.ndarray:
        """Free cached blocks, the next to be evicted first: int32."""
        return np.array(self._cached.order(), np.int32)

    def take_changes(self) -> tuple[set[int], set[int]]:
        """Blocks that have changed since the last call, and blocks whose `filled` has, some of which are among the first.
        For one who looks at a time."""
        changes = self._changed, self._filled
        self._changed, self._filled = set(), set()
        return changes

    def states(self) -> np.ndarray:
        """BlockState of every block: uint8 [num_blocks]."""
        return derived.block_states(np.frombuffer(self.ref_count, np.int32), np.frombuffer(self.is_cached, np.int8))

    def parents(self) -> np.ndarray:
        """The cached block that each cached block continues, or ROOT, NOT_CACHED, ALONE: int32 [num_blocks]."""
        is_cached, is_alone = np.frombuffer(self.is_cached, np.int8), np.frombuffer(self.is_alone, np.int8)
        return derived.parents(np.frombuffer(self.before, np.int32), is_cached, is_alone)

    def check_integrity(self) -> None:
        """Raise RuntimeError where the free blocks, the counters, the chains of text and the reference counts disagree."""
        blocks, readers = range(1, self.num_blocks), self.ref_count
        if min(readers) < 0:
            raise RuntimeError(f"block {readers.index(min(readers))} has a negative reference count")
        order = self._cached.order()
        for kind, queue, cached in (("empty", self._empty, 0), ("cached", order, 1)):
            expected = {b for b in blocks if readers[b] == 0 and self.is_cached[b] == cached}
            if expected != set(queue):
                raise RuntimeError(
                    f"blocks {sorted(expected ^ set(queue))} are free and {kind}, or queued so, but not both"
                )
        if self.num_free_cached != len(order):
            raise RuntimeError(f"{len(order)} free blocks are cached, the counter says {self.num_free_cached}")
        num_after = [0] * self.num_blocks
        for block in (b for b in blocks if self.is_cached[b]):
            before = self.before[block]
            num_after[before] += 1
            if before != NULL_BLOCK and (not self.is_cached[before] or (readers[block] and not readers[before])):
                raise RuntimeError(
                    f"block {block} continues block {before}, which is not cached or may be evicted before it"
                )
        if num_after != self.num_after.tolist():
            wrong = next(b for b in range(self.num_blocks) if num_after[b] != self.num_after[b])
            raise RuntimeError(
                f"{num_after[wrong]} blocks continue block {wrong}, its counter says {self.num_after[wrong]}"
            )
        if lost := {b for b in order if not self.num_after[b]} - set(self._cached.ends()):
            raise RuntimeError(f"blocks {sorted(lost)} may be evicted, and the eviction queue does not know them")
        slots = sum(self.filled[b] * self._slot_weights[self.group[b]] for b in blocks if readers[b])
        if slots != self.used_slots:
            raise RuntimeError(f"{slots} slots are written in used blocks, the counter says {self.used_slots}")
