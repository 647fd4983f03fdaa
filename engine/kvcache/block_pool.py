"""The pool of KV blocks: who may take one, who still reads one, and which is given up next.

A block is free when nobody reads it. Free blocks stand in one doubly linked queue that is also the eviction order:

    front                                                                         back
    [ empty blocks ............ | cached: unused for longest .... unused for shortest ]
      taken first, last in first                       taken when no empty block is left

A freed block that still holds findable text (it is *cached*) goes to the back, one without goes to the front, so a
taken block costs nothing as long as an empty one is left. Taking a cached block evicts it: its text is removed from
the prefix index before the id is given out. Every id carries a generation, raised each time it is given out.

Block 0 is the null block: padding of block tables, never given out, always pinned. All operations are O(1),
whatever the size of the pool. This module knows ids only: no request, no token and no tensor.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import numpy as np

from ..snapshot import BlockState

NULL_BLOCK = 0


class BlockPool:
    """Reference counts, generations and the free queue of `num_blocks` blocks (the null block included).

    The scalars live in `array.array`: indexing gives plain Python integers, and numpy views of the same memory make a
    snapshot a few array copies.
    """

    def __init__(self, num_blocks: int):
        if num_blocks < 2:
            raise ValueError(f"num_blocks={num_blocks}: must be at least 2, the null block and one to give out")
        self.num_blocks = num_blocks
        self.ref_count = array("i", bytes(4 * num_blocks))
        self.generation = array("i", bytes(4 * num_blocks))
        self.filled = array("i", bytes(4 * num_blocks))  # slots written
        self.last_used_step = array("i", bytes(4 * num_blocks))  # when its last reader left, or it was hit
        self.is_cached = array("b", bytes(num_blocks))  # 1: the prefix index can find its text
        self.ref_count[NULL_BLOCK] = 1
        # The free queue as a ring through the null block, which is never free: _next[0] is the front, _prev[0] the back.
        self._next = array("i", [*range(1, num_blocks), NULL_BLOCK])
        self._prev = array("i", [num_blocks - 1, *range(num_blocks - 1)])
        self.num_free = num_blocks - 1  # empty and cached ones
        self.num_free_cached = 0
        self.used_slots = 0  # slots written in blocks that have a reader, each block once

    @property
    def num_used(self) -> int:
        """Blocks with at least one reader, the null block aside."""
        return self.num_blocks - 1 - self.num_free

    # --- the four things that happen to a block -------------------------------------------------------------------

    @property
    def front(self) -> int:
        """The block that `take` gives out next; the null block when none is free."""
        return self._next[NULL_BLOCK]

    def take(self) -> int:
        """Give out the block at the front, empty and with one reader. Whoever calls removes a cached block's text
        first (`uncache`); taking a block whose text can still be found is an error, as is taking from an empty queue."""
        block = self._next[NULL_BLOCK]
        if block == NULL_BLOCK:
            raise RuntimeError(f"no free block: all {self.num_blocks - 1} blocks have readers")
        if self.is_cached[block]:
            raise RuntimeError(f"block {block} still holds findable text: it must be evicted before it is taken")
        self._unlink(block)
        self.ref_count[block] = 1
        self.generation[block] += 1
        self.filled[block] = 0
        return block

    def share(self, block: int) -> int:
        """One more reader; a free cached block leaves the queue. Returns the new reference count."""
        count = self.ref_count[block] + 1
        if count == 1:
            if not self.is_cached[block]:
                raise RuntimeError(f"block {block} is free and holds no findable text: it cannot be shared")
            self._unlink(block)
            self.num_free_cached -= 1
            self.used_slots += self.filled[block]
        self.ref_count[block] = count
        return count

    def release(self, block: int, step: int) -> bool:
        """One reader less; True when it was the last one and the block is free now."""
        count = self.ref_count[block] - 1
        if count < 0 or block == NULL_BLOCK:
            raise RuntimeError(f"block {block} has {count + 1} readers and cannot lose one")
        self.ref_count[block] = count
        if count:
            return False
        self.last_used_step[block] = step
        self.used_slots -= self.filled[block]
        if self.is_cached[block]:
            self._link(self._prev[NULL_BLOCK], block)
            self.num_free_cached += 1
        else:
            self.filled[block] = 0
            self._link(NULL_BLOCK, block)
        return True

    def fill(self, block: int, slots: int) -> None:
        """`slots` of the block are written now; the block has a reader."""
        self.used_slots += slots - self.filled[block]
        self.filled[block] = slots

    # --- findable text --------------------------------------------------------------------------------------------

    def cache(self, block: int) -> None:
        """The block's text can be found from now on; the block has a reader."""
        if self.ref_count[block] < 1:
            raise RuntimeError(f"block {block} has no reader: its text cannot become findable")
        self.is_cached[block] = 1

    def uncache(self, block: int) -> None:
        """The block's text cannot be found any more. A free block moves to the front, where empty ones stand."""
        if not self.is_cached[block]:
            return
        self.is_cached[block] = 0
        if self.ref_count[block] == 0:
            self.num_free_cached -= 1
            self.filled[block] = 0
            self._unlink(block)
            self._link(NULL_BLOCK, block)

    # --- the queue ------------------------------------------------------------------------------------------------

    def _unlink(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        self._next[before] = after
        self._prev[after] = before
        self._next[block] = self._prev[block] = -1
        self.num_free -= 1

    def _link(self, before: int, block: int) -> None:
        after = self._next[before]
        self._next[before] = self._prev[after] = block
        self._prev[block], self._next[block] = before, after
        self.num_free += 1

    def free_queue(self) -> Iterator[int]:
        """Free blocks, front to back."""
        block = self._next[NULL_BLOCK]
        while block != NULL_BLOCK:
            yield block
            block = self._next[block]

    def eviction_order(self) -> np.ndarray:
        """Free cached blocks, the next to be evicted first: int32. They are the back part of the queue."""
        order = np.empty(self.num_free_cached, np.int32)
        block, previous = self._prev[NULL_BLOCK], self._prev
        for i in range(self.num_free_cached - 1, -1, -1):
            order[i] = block
            block = previous[block]
        return order

    def states(self) -> np.ndarray:
        """BlockState of every block: uint8 [num_blocks]."""
        readers = np.frombuffer(self.ref_count, np.int32)
        state = np.frombuffer(self.is_cached, np.int8).astype(np.uint8)  # EMPTY 0, CACHED 1
        state[readers == 1] = BlockState.ACTIVE
        state[readers > 1] = BlockState.SHARED
        state[NULL_BLOCK] = BlockState.PINNED
        return state

    def check_integrity(self) -> None:
        """Raise RuntimeError where the queue, the counters and the reference counts disagree."""
        queue = []
        for block in self.free_queue():
            queue.append(block)
            if len(queue) >= self.num_blocks:
                raise RuntimeError("the free queue runs in a circle")
        if len(queue) != self.num_free:
            raise RuntimeError(f"the free queue holds {len(queue)} blocks, its counter says {self.num_free}")
        if len(set(queue)) != len(queue):
            raise RuntimeError("a block stands in the free queue twice")
        free = {block for block in range(1, self.num_blocks) if self.ref_count[block] == 0}
        if free != set(queue):
            raise RuntimeError(f"blocks {sorted(free ^ set(queue))} are free or queued, but not both")
        if min(self.ref_count) < 0:
            raise RuntimeError(f"block {self.ref_count.index(min(self.ref_count))} has a negative reference count")
        cached = [bool(self.is_cached[block]) for block in queue]
        if cached != sorted(cached):
            raise RuntimeError("a cached block stands before an empty one in the free queue")
        if sum(cached) != self.num_free_cached or self.num_free_cached != len(self.eviction_order()):
            raise RuntimeError(f"{sum(cached)} free blocks are cached, the counter says {self.num_free_cached}")
        slots = sum(self.filled[b] for b in range(1, self.num_blocks) if self.ref_count[b])
        if slots != self.used_slots:
            raise RuntimeError(f"{slots} slots are written in used blocks, the counter says {self.used_slots}")
