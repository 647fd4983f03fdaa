"""Which cached block is given up next: one small strategy each, and the two queues that they stand in.

A strategy gives each free cached block a key from its small statistics; the block with the lowest key goes first.

| strategy | goes first | key |
|---|---|---|
| lru | unused for longest | the place in the queue: a block goes to the back whenever its last reader leaves |
| lfu | hit least often | hits, last use |
| fifo | cached for longest | publication |
| mru | used last | last use, the highest first |
| slru | not hit twice yet, then unused for longest | hit twice?, last use |
| priority | of the least important requests | the most important request that used it, last use |

Text is only ever lost from its end: what continues other cached text goes before it, whatever the keys say, because it
could not be found without it. For lru this holds by itself, since whoever reads a block also reads what comes before it
and lets go of it later. The other strategies choose among the ends of text only, as SGLang chooses among the leaves of its
tree (python/sglang/srt/mem_cache/evict_policy.py); a block becomes an end when all that continues it is gone.

The whole order follows from the statistics alone (`ordered`), so that it can be told of a pool that was recorded.

Knows block ids and their statistics in the pool: no request and no token.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

from ..events import Cause

if TYPE_CHECKING:
    from .block_pool import BlockPool

Key = tuple[Any, ...]
_STATISTICS = ("ref_count", "is_cached", "before", "last_use", "published", "hits", "priority")


class EvictionQueue(Protocol):
    """Free cached blocks. `add` also tells of a block that has become the end of its text."""

    def why(self, block: int) -> Cause:
        """Why the first block is the first, for its event."""

    def add(self, block: int) -> None: ...
    def remove(self, block: int) -> None: ...
    def first(self) -> int:
        """The block to give up next; the queue is not empty."""

    def ends(self) -> Iterable[int]:
        """What `first` chooses from: at least the ends of text."""

    def order(self) -> list[int]:
        """All of them, as `first` would give them out one after the other."""

    @classmethod
    def ordered(cls, stats: Any) -> np.ndarray:
        """The same from arrays of the pool's statistics, whatever pool they were read from: an int array."""


class Lru:
    """A linked list: everything in O(1)."""

    def __init__(self, pool: BlockPool):
        self._queue: OrderedDict[int, None] = OrderedDict()

    def why(self, block: int) -> Cause:
        return Cause.LEAST_RECENTLY_USED

    def add(self, block: int) -> None:
        self._queue[block] = None  # one that is there already keeps its place

    def remove(self, block: int) -> None:
        del self._queue[block]

    def first(self) -> int:
        return next(iter(self._queue))

    def ends(self) -> Iterable[int]:
        return self._queue

    def order(self) -> list[int]:
        return list(self._queue)

    @classmethod
    def ordered(cls, stats: Any) -> np.ndarray:
        free = _free_cached(stats)
        return free[np.argsort(stats.last_use[free])]


class Keyed:
    """A heap of ends of text by key: O(log n). A block that leaves from the middle stays in the heap as a stale entry,
    known by its key, until it comes up or stale entries are most of the heap."""

    cause: ClassVar[Cause]

    def __init__(self, pool: BlockPool):
        self.pool = pool
        self._heap: list[tuple[Key, int]] = []
        self._keys: dict[int, Key] = {}  # of the blocks that are really there

    @staticmethod
    def key(stats: Any, block: Any) -> Key:
        """Of one block with the pool's statistics, or of an array of blocks with arrays of them."""
        raise NotImplementedError

    def why(self, block: int) -> Cause:
        return self.cause

    def add(self, block: int) -> None:
        if not self.pool.num_after[block]:
            entry = self._keys[block] = self.key(self.pool, block)
            heappush(self._heap, (entry, block))

    def remove(self, block: int) -> None:
        self._keys.pop(block, None)  # what has text after it was never there
        if len(self._heap) > 2 * len(self._keys) + 64:
            self._heap = [(key, block) for block, key in self._keys.items()]
            heapify(self._heap)

    def first(self) -> int:
        while self._keys.get(self._heap[0][1]) != self._heap[0][0]:
            heappop(self._heap)
        return self._heap[0][1]

    def ends(self) -> Iterable[int]:
        return self._keys

    def order(self) -> list[int]:
        return self.ordered(
            SimpleNamespace(**{name: np.asarray(getattr(self.pool, name)) for name in _STATISTICS})
        ).tolist()

    @classmethod
    def ordered(cls, stats: Any) -> np.ndarray:
        """Sorted by key at once; then a block's turn comes when those of all that continue it have come."""
        free = _free_cached(stats)
        turn = np.zeros(len(stats.ref_count), np.int64)
        turn[free[np.lexsort(cls.key(stats, free)[::-1])]] = np.arange(len(free))
        turns = turn.tolist()
        free = free[np.argsort(stats.last_use[free])]  # whoever continues a block was left before it
        for block, before in zip(free.tolist(), stats.before[free].tolist(), strict=True):
            if turns[before] < turns[block]:
                turns[before] = turns[block]
        return free[np.argsort(np.array(turns)[free], kind="stable")]


class Lfu(Keyed):
    cause = Cause.LEAST_FREQUENTLY_USED

    @staticmethod
    def key(stats: Any, block: Any) -> Key:
        return (stats.hits[block], stats.last_use[block])


class Fifo(Keyed):
    cause = Cause.FIRST_IN

    @staticmethod
    def key(stats: Any, block: Any) -> Key:
        return (stats.published[block],)


class Mru(Keyed):
    cause = Cause.MOST_RECENTLY_USED

    @staticmethod
    def key(stats: Any, block: Any) -> Key:
        return (-stats.last_use[block],)


class Slru(Keyed):
    @staticmethod
    def key(stats: Any, block: Any) -> Key:
        return (stats.hits[block] > 1, stats.last_use[block])

    def why(self, block: int) -> Cause:
        return Cause.LEAST_RECENTLY_USED if self.pool.hits[block] > 1 else Cause.NOT_HIT_TWICE


class Priority(Keyed):
    cause = Cause.LOWEST_PRIORITY

    @staticmethod
    def key(stats: Any, block: Any) -> Key:
        return (-stats.priority[block], stats.last_use[block])


def _free_cached(stats: Any) -> np.ndarray:
    return np.flatnonzero((stats.ref_count == 0) & (stats.is_cached == 1))


STRATEGIES: dict[str, type[Lru] | type[Keyed]] = {
    "lru": Lru,
    "lfu": Lfu,
    "fifo": Fifo,
    "mru": Mru,
    "slru": Slru,
    "priority": Priority,
}
