"""Cached text on its way in and out: what can be found is published, evicted and withdrawn here, each an event.

Two facts are kept in step for every block: the pool knows that it is cached, so that it stays when its last reader leaves,
and the prefix cache knows its text. A block is published when it is full and its KV is computed, the partly filled last
one when its sequence leaves; it loses its text when someone needs room, or when the text is withdrawn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..events import Cause, EventKind, Journal
from ..metrics import BlockClock, Metrics
from .block_pool import NULL_BLOCK, BlockPool
from .prefix_cache import Hit, Miss, PrefixCache, Text, common_block_size, unequal_sizes

if TYPE_CHECKING:
    from ..models.base import KVGroup
    from ..request import Sequence


class CachedText:
    """The text in the blocks of `pool`, through a prefix `cache` of either kind."""

    def __init__(
        self,
        pool: BlockPool,
        cache: PrefixCache,
        groups: tuple[KVGroup, ...],
        enable_prefix_caching: bool,
        journal: Journal,
        metrics: Metrics,
    ):
        self.pool = pool
        self.cache = cache
        self.groups = groups
        self.block_sizes = tuple(group.block_size for group in groups)
        self.common_size = common_block_size(groups)  # tokens that fill whole blocks of every group
        self.unequal_sizes = unequal_sizes(groups)
        self.enable_prefix_caching = enable_prefix_caching
        self.journal = journal
        self.metrics = metrics
        self.clock = BlockClock(pool.num_blocks, metrics)

    def _text(self, seq: Sequence) -> Text:
        if seq.text is None:
            seq.text = self.cache.begin(seq.request.extra_keys, seq.token_ids)
        return seq.text

    def reads_cache(self, seq: Sequence) -> bool:
        """Log-probabilities of a prompt need every one of its tokens computed."""
        return self.enable_prefix_caching and not seq.request.lacks_prompt_logprobs

    def explain_miss(self, seq: Sequence, hit: Hit) -> Miss | None:
        """Why `find_prefix` found no more."""
        return Miss(Cause.NO_FREE_BLOCK) if hit.is_cut else self.cache.explain(self._text(seq), hit, seq.num_tokens - 1)

    # --- in ---------------------------------------------------------------------------------------------------------

    def _publish(self, seq: Sequence, num_tokens: int, cause: Cause) -> None:
        text, pool, size = self._text(seq), self.pool, self.common_size
        while text.num_blocks and not self._holds_path(seq, text.num_blocks - 1):
            self.cache.retract(text, text.num_blocks - 1)  # another withdrew it, and it is this sequence's text too
        while num_tokens > text.num_blocks * size and not self._holds_end(seq, num_tokens):
            num_tokens = (num_tokens - 1) // size * size  # out of every window: nothing is left that could be found
        if not num_tokens:
            return
        change = self.cache.publish(text, num_tokens, seq.block_tables, seq.request.id, cause is Cause.LEFT)
        for block in change.superseded:
            self._tell_evicted(block, Cause.SUPERSEDED, {"idle_steps": 0})
        for group, logical, block, before in change.published:
            pool.cache(block, before, seq.request.priority, computed_for=seq.request.id,
                       is_alone=self.groups[group].window > 0)  # fmt: skip
            tokens = min(self.block_sizes[group], num_tokens - logical * self.block_sizes[group])
            self.journal.emit(EventKind.PUBLISHED, seq.request.id, seq.child, group, block, pool.generation[block], cause,
                              {"logical": logical, "tokens": tokens})  # fmt: skip

    def _holds_path(self, seq: Sequence, common: int) -> bool:
        """Can the text up to this common block still be found through blocks that the sequence reads?"""
        end = (common + 1) * self.common_size
        tables = zip(seq.block_tables, self.groups, strict=True)
        return all(self.pool.is_cached[table[end // g.block_size - 1]] for table, g in tables if not g.window)

    def _holds_end(self, seq: Sequence, num_tokens: int) -> bool:
        """Has the sequence any block of the last common block of its first `num_tokens` tokens?"""
        start = (num_tokens - 1) // self.common_size * self.common_size
        tables = zip(seq.block_tables, self.block_sizes, strict=True)
        return any(any(table[start // size : -(-num_tokens // size)]) for table, size in tables)

    # --- out --------------------------------------------------------------------------------------------------------

    def _evict(self, block: int, needed_by: Sequence) -> None:
        numbers = {
            "idle_steps": self._idle_steps(block),
            "needed_by": needed_by.request.id,
            "needed_by_child": needed_by.child,
        }
        self._uncache(block, self.pool.why_evicted(block), numbers)
        self.metrics.count("kvscope:blocks_evicted_total")
        self.clock.evicted(block, self.journal.time)

    def _give_up_spare(self, block: int) -> None:
        """Nobody reads this block any more. Its text goes when another block holds it too and nothing continues it; else,
        where another holds the text before it, it continues that one from now on, so that its own can go."""
        pool, before = self.pool, self.pool.before[block]
        if self.cache.twin(block) and not pool.num_after[block]:
            self._uncache(block, Cause.SAME_TEXT, {"idle_steps": 0})
        elif before != NULL_BLOCK and (twin := self.cache.twin(before)):
            pool.move(block, twin)

    def withdraw(self, seq: Sequence, cause: Cause, num_tokens: int = 0) -> None:
        """The text of the sequence is not to be found any more from the common block that token `num_tokens` is in, nor what
        goes on from there, whoever else reads it. Which blocks it had before they fell out of a window is not known any more,
        so there nobody's of that text is."""
        if seq.text is None:
            return
        common = num_tokens // self.common_size
        for group, (table, size) in enumerate(zip(seq.block_tables, self.block_sizes, strict=True)):
            for logical in range(len(table) - 1, common * self.common_size // size - 1, -1):
                gone = table[logical] == NULL_BLOCK
                for block in self.cache.holders(seq.text, group, logical) if gone else (table[logical],):
                    self._withdraw(block, cause)
        self.cache.retract(seq.text, common)

    def _withdraw(self, block: int, cause: Cause) -> None:
        blocks = [block]
        while blocks:
            if self.pool.num_after[blocks[-1]] and blocks[-1] != NULL_BLOCK:
                blocks += self.pool.after(blocks[-1])
            else:
                self._uncache(blocks.pop(), cause, {"idle_steps": 0})

    def reset_cache(self) -> int:
        """Empty the prefix cache; blocks that running requests read keep their text. Returns the blocks emptied."""
        blocks = self.pool.eviction_order().tolist()
        for block in blocks:
            self._uncache(block, Cause.CACHE_RESET, {"idle_steps": self._idle_steps(block)})
        return len(blocks)

    def _uncache(self, block: int, cause: Cause, numbers: dict[str, float]) -> None:
        """Nothing finds the block's text from here on: out of the cache and out of the pool's cached blocks."""
        if self.pool.is_cached[block]:
            self._tell_evicted(block, cause, numbers)
            self.cache.forget(block, self.journal.step)

    def _tell_evicted(self, block: int, cause: Cause, numbers: dict[str, float]) -> None:
        group, generation = self.cache.group_of(block), self.pool.generation[block]
        self.journal.emit(EventKind.EVICTED, -1, 0, group, block, generation, cause, numbers)
        self.pool.uncache(block)

    def _idle_steps(self, block: int) -> int:
        return self.journal.step - self.pool.last_used_step[block]
