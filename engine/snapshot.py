"""What a viewer may see of the engine at the end of one step: plain arrays and dataclasses, copied.

Cheap to take (a few array copies), needs numpy only, and never changes after it was taken.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np


class BlockState(IntEnum):
    """The state of one KV block, as the pool map draws it."""

    EMPTY = 0  # no text, no reader
    CACHED = 1  # no reader, its text can still be found
    ACTIVE = 2  # one reader
    SHARED = 3  # two or more readers
    PINNED = 4  # the null block, or held on purpose
    IN_FLIGHT = 5  # a copy or a swap is reading or writing it


@dataclass(frozen=True, slots=True)
class RequestState:
    """One sample of one request (child 0 is the request itself until it forks)."""

    id: int
    child: int
    status: str  # "waiting" | "running" | "preempted" | "finished" | "cancelled" | "failed"
    num_samples: int  # n of the request
    num_prompt_tokens: int
    num_computed_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    block_tables: tuple[np.ndarray, ...]  # one int32 array a KV group
    blocked_because: str  # the words after "is waiting because"; "" while it runs
    blocked_cause: str = ""  # the same as a Cause; "" while it runs or before a step has looked at it
    num_reserved_tokens: int = 0  # what its allocator set aside for it in one run; 0: blocks come as tokens do
    label: str = ""  # first words of the prompt, for the screen
    priority: int = 0  # the lowest number goes first, where a policy looks at it
    deadline: float | None = None  # seconds, time.monotonic(); None: it may take as long as it takes
    arrival: float = 0.0  # seconds, time.monotonic()
    first_token: float | None = None  # when the first token of any of its samples came; None: not yet
    queue_place: int = -1  # in the waiting line, 0 goes next; −1 it runs
    waiting_since_step: int = 0  # the step in which it joined the line, if it waits
    num_times_passed: int = 0  # younger ones that were admitted while it waited at the head
    host_tables: tuple[np.ndarray, ...] = ()  # where its swapped blocks are: as block_tables, host block ids, −1 null


def size_words(sizes: Iterable[int]) -> str:
    """Block sizes, for people: "16", "32 or 16"."""
    return " or ".join(map(str, dict.fromkeys(sizes)))


# Of `EngineSnapshot.parent`, where it is no block.
ROOT = -1  # cached, and the first block of a text
NOT_CACHED = -2
ALONE = -3  # cached, in a KV group with a window, where every block stands for itself


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """The engine between two steps. Per-block arrays have `num_blocks` entries; block 0 is the null block."""

    step: int
    time: float  # seconds, time.monotonic()
    state: str  # "running" | "paused" | "stopped"
    block_size: int  # tokens; where KV groups differ, those of a common block, as which every block counts
    num_blocks: int
    block_state: np.ndarray  # uint8, BlockState
    ref_count: np.ndarray  # int32
    generation: np.ndarray  # int32: how often this id was given out
    filled: np.ndarray  # int32: slots written, of `slots`
    owner: np.ndarray  # int32: index into `requests` of the first reader, −1 none
    last_used_step: np.ndarray  # int32
    eviction_order: np.ndarray  # int32: cached blocks, the next to be evicted first
    parent: np.ndarray  # int32: of a cached block the one before it in its text, or ROOT, NOT_CACHED, ALONE
    num_hits: np.ndarray  # int32: how often a request found it in the cache, since it was put there; 0 not cached
    computed_for: np.ndarray  # int32: of a cached block the id of the request that computed it, else −1
    requests: tuple[RequestState, ...]  # live ones by arrival, children together; of a long line the first 100
    num_host_blocks: int = 0  # host memory for swapped blocks
    counters: dict[str, float] = field(default_factory=dict)  # as Engine.metrics()
    block_sizes: tuple[int, ...] = ()  # tokens a block of each KV group, where they differ
    group: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int8))  # there, whom each block was given to last

    def block_size_of(self, group: int) -> int:
        """Tokens a block of this KV group."""
        return self.block_sizes[group] if self.block_sizes else self.block_size

    @property
    def block_words(self) -> str:
        """Tokens a block, for people."""
        return size_words(self.block_sizes or [self.block_size])

    @property
    def slots(self) -> np.ndarray:
        """Tokens that each block has room for, as its KV group has it: int32."""
        if self.block_sizes:
            return np.array(self.block_sizes, np.int32)[self.group]
        return np.full(self.num_blocks, self.block_size, np.int32)

    @property
    def written(self) -> np.ndarray:
        """Slots written where every block counts as one of `block_size`: int32."""
        return self.filled * (self.block_size // self.slots) if self.block_sizes else self.filled

    @property
    def num_used_blocks(self) -> int:
        """Blocks with at least one reader (the null block aside)."""
        return int(np.count_nonzero(self.ref_count[1:] > 0))
