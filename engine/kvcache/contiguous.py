"""Reservation baselines: KV memory as serving engines gave it out before paging, behind the interface of `BlockTables`.

A sequence gets one contiguous run of memory when it is admitted, long enough for the longest that it may become, and keeps
it to its end; a buddy allocator rounds the run up to a power of two. How long that is depends on what the engine knows:

| kv_allocator | tokens reserved for a prompt of P and an output of O | of the paper |
|---|---|---|
| orca-max | max_model_len | Orca (Max) |
| orca-pow2 | P + the next power of two from O on | Orca (Pow2) |
| orca-oracle | P + O | Orca (Oracle) |

O is `max_tokens`, which is the true length only with ignore_eos: what an engine cannot know in general is granted to the last two.
Nothing is shared: each of n samples has a run of its own, and the prompt is copied into it. Real requests run on these tables with
the same kernels, so that one workload can be served in both ways. A whole run stands in the block table from the start,
and blocks that are not written yet show the reservation. Source: arXiv 2309.06180, section 6.1.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..events import Cause, EventKind, Journal
from ..metrics import Metrics
from .block_table import BlockTables
from .buddy import BuddyAllocator

if TYPE_CHECKING:
    from ..config import EngineConfig
    from ..models.base import KVGroup
    from ..request import Sequence
    from .prefix_cache import Hit


def next_power_of_two(number: int) -> int:
    """The smallest power of two that is not below `number`, at least 1."""
    return 1 << (max(1, number) - 1).bit_length()


class ReservedTables(BlockTables):
    """`policy` is one of the table above; other arguments as `BlockTables`, which must not cache prefixes. All groups have blocks
    of one size."""

    limit_words = "the longest piece of the pool has"
    shares = False
    grows = False

    def __init__(self, policy: str, *, max_model_len: int, **options: Any):
        options["groups"] = tuple(replace(group, window=0) for group in options["groups"])  # all of it is reserved
        super().__init__(**options)
        self.policy = policy
        self.max_model_len = max_model_len
        self.buddy = BuddyAllocator(1, self.pool.num_blocks - 1)

    @property
    def most_for_one(self) -> int:
        return self.buddy.largest

    def most_samples(self, num_prompt: int, max_tokens: int) -> int:
        """How many samples of one request can have their runs at the same time, which they need from the start."""
        return self.buddy.most_runs(self.needs(num_prompt, max_tokens))

    def tokens_to_reserve(self, num_prompt: int, max_tokens: int) -> int:
        """What the policy sets aside for a prompt and its output, in tokens."""
        output = next_power_of_two(max_tokens) if self.policy == "orca-pow2" else max_tokens
        return self.max_model_len if self.policy == "orca-max" else min(num_prompt + output, self.max_model_len)

    def needs(self, num_prompt: int, max_tokens: int) -> int:
        """Blocks of one run, a power of two."""
        tokens = self.tokens_to_reserve(num_prompt, max_tokens)
        return next_power_of_two(-(-tokens // self.common_size) * len(self.groups))

    def reserved_tokens(self, seq: Sequence) -> int:
        request = seq.request
        return self.tokens_to_reserve(request.num_prompt_tokens, request.max_tokens) if seq.block_tables[0] else 0

    def blocks_to_admit(self, seq: Sequence, hit: Hit) -> int:
        return self._run(seq) * seq.num_seats

    def available(self, seq: Sequence) -> int:
        """Free blocks in runs that are long enough; what is left over is free and of no use to it."""
        return self.buddy.num_runs(self._run(seq)) * self._run(seq)

    def still_to_take(self, seq: Sequence) -> int:
        return 0

    def adopt(self, seq: Sequence, hit: Hit) -> None:
        """Take a run for each of its samples; those that have yet to fork stand one behind the other in the table."""
        for _ in range(seq.num_seats):
            size = self._run(seq)
            start = self.buddy.take(size)
            if start is None:
                raise RuntimeError(f"{seq} was admitted and no run of {size} blocks is free")
            blocks = iter(range(start, start + size))
            for group, length in enumerate(self._lengths(size)):
                for _ in range(length):
                    block = self.pool.take_at(next(blocks), group)
                    self.journal.emit(EventKind.ALLOCATED, seq.request.id, seq.child, group, block,
                                      self.pool.generation[block], Cause.RESERVED,
                                      {"logical": len(seq.block_tables[group])})  # fmt: skip
                    seq.block_tables[group].append(block)
        seq.num_computed_tokens = seq.num_cached_tokens = 0

    def grow(self, seq: Sequence, num_tokens: int) -> bool:
        """Everything was reserved at the start."""
        return True

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """The next run in the parent's table becomes the child's, and gets a copy of what is computed."""
        written = -(-parent.num_computed_tokens // self.common_size)
        for group, length in enumerate(self._lengths(self._run(parent))):
            table = parent.block_tables[group]
            child.block_tables[group].extend(table[length : 2 * length])
            del table[length : 2 * length]
            for source, copy in zip(table[:written], child.block_tables[group][:written], strict=True):
                self._copy(child, group, source, copy, self.pool.filled[source], Cause.FORK)
        child.num_computed_tokens = parent.num_computed_tokens

    def release(self, seq: Sequence, cause: Cause) -> tuple[int, int]:
        starts = []
        if seq.block_tables[0]:
            lengths = self._lengths(self._run(seq))
            starts = seq.block_tables[0][:: lengths[0]].tolist()
        counts = super().release(seq, cause)
        for start in starts:
            self.buddy.release(start)
        return counts

    def _run(self, seq: Sequence) -> int:
        return self.needs(seq.request.num_prompt_tokens, seq.request.max_tokens)

    def _lengths(self, size: int) -> list[int]:
        """How a run of `size` blocks is dealt out to the groups; what is over goes to the first."""
        share, over = divmod(size, len(self.groups))
        return [share + over, *[share] * (len(self.groups) - 1)]

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        super().check_integrity(sequences)
        self.buddy.check_integrity()

    def lengths(self, seq: Sequence) -> list[int]:
        return [length * seq.num_seats for length in self._lengths(self._run(seq))]


def make_tables(
    config: EngineConfig, groups: tuple[KVGroup, ...], block_bytes: int, journal: Journal, metrics: Metrics
) -> BlockTables:
    """The tables that `config.kv_allocator` names; num_blocks and max_model_len are resolved."""
    options = {
        "num_blocks": config.num_blocks,
        "groups": groups,
        "chunk": config.max_num_batched_tokens,
        "block_bytes": block_bytes,
        "enable_prefix_caching": config.enable_prefix_caching,
        "prefix_cache": config.prefix_cache,
        "eviction_policy": config.eviction_policy,
        "journal": journal,
        "metrics": metrics,
    }
    if config.kv_allocator == "paged":
        return BlockTables(**options)
    return ReservedTables(config.kv_allocator, max_model_len=config.max_model_len, **options)
