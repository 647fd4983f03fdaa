"""A buddy allocator: contiguous runs of 2^k blocks out of one pool, as serving engines reserved KV memory before paging.

A run that is too long is halved until it fits; a freed run joins its other half, its buddy, whenever that is free too.

    16 free          ask for 3: a run of 4     [ 4 taken | 4 | 8 ]
    give it back     4 + 4 = 8, 8 + 8 = 16     [ 16 ]

Rounding up to a power of two wastes memory inside the pieces, and free pieces may be too short for the next request though
their sum would do. Knows block ids only. A pool whose size is no power of two is a row of such pieces, the largest first.
"""

from __future__ import annotations


class BuddyAllocator:
    """Gives out runs of the blocks `first` … `first + num_blocks − 1`."""

    def __init__(self, first: int, num_blocks: int):
        self.num_blocks = num_blocks
        self._free: dict[int, set[int]] = {1 << k: set() for k in range(num_blocks.bit_length())}  # size -> starts
        self._taken: dict[int, int] = {}  # start -> size
        self._pieces: list[tuple[int, int]] = []  # (start, size) that are never joined with another
        start = first
        for size in sorted(self._free, reverse=True):
            if num_blocks & size:
                self._pieces.append((start, size))
                self._free[size].add(start)
                start += size

    @property
    def largest(self) -> int:
        """The longest run that this pool can ever give."""
        return self._pieces[0][1]

    def most_runs(self, size: int) -> int:
        """How many runs of `size` blocks, a power of two, this pool can ever give at the same time."""
        return sum(length // size for _, length in self._pieces)

    def num_runs(self, size: int) -> int:
        """How many runs of `size` blocks, a power of two, could be taken now."""
        return sum(len(starts) * (length // size) for length, starts in self._free.items() if length >= size)

    def take(self, size: int) -> int | None:
        """The start of a run of `size` blocks, a power of two; the lowest of the shortest pieces that will do, None when
        there is none."""
        length = next((s for s in sorted(self._free) if s >= size and self._free[s]), None)
        if length is None:
            return None
        start = min(self._free[length])
        self._free[length].remove(start)
        while length > size:
            length //= 2
            self._free[length].add(start + length)
        self._taken[start] = size
        return start

    def release(self, start: int) -> None:
        """Give a run back, and join it with its buddy as often as that is free."""
        size = self._taken.pop(start)
        base, whole = next((s, n) for s, n in self._pieces if s <= start < s + n)
        while size < whole:
            buddy = base + ((start - base) ^ size)
            if buddy not in self._free[size]:
                break
            self._free[size].remove(buddy)
            start, size = min(start, buddy), 2 * size
        self._free[size].add(start)

    def check_integrity(self) -> None:
        """Raise RuntimeError unless taken and free runs cover the pool, each block once, and no two free buddies stay apart."""
        runs = sorted([*self._taken.items(), *((s, size) for size, starts in self._free.items() for s in starts)])
        at = self._pieces[0][0]
        for start, size in runs:
            if start != at:
                raise RuntimeError(f"block {at} is in no run or in two")
            at += size
        if at != self._pieces[0][0] + self.num_blocks:
            raise RuntimeError(f"the runs end at block {at}")
        for base, whole in self._pieces:
            for size, starts in self._free.items():
                for start in starts:
                    inside = base <= start < base + whole and size < whole
                    if inside and base + ((start - base) ^ size) in starts:
                        raise RuntimeError(f"the free runs of {size} blocks at {start} and beside it were not joined")
