"""Block tables: which block holds which tokens of which sequence, one table per KV group.

    logical block     0          1          2          3
    table           [ 7        | 2        | 9        ]
    tokens            0..15      16..31     32..37      the next block is taken when token 48 comes
                      full, findable text   ▲ num_computed_tokens = 38: slots 0..5 of block 9 are written

A table only grows at its end, but for named edits, each an event: copy-on-write replaces the block that is about to be
written while others still read it, the null block takes the place of what fell out of a group's window, and truncation
drops the end. Otherwise a running sequence's block ids never change.
`BlockTables` is the one place where blocks change hands; it tells the journal who, which and why. Which of their text can
be found is the business of `CachedText`, on which it is built.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..events import Cause, EventKind, Journal
from ..metrics import Metrics
from . import audit
from .block_pool import NULL_BLOCK, BlockPool
from .cached_text import CachedText
from .prefix_cache import Hit, common_block_size
from .prefix_hash import PrefixIndex
from .radix_tree import RadixTree

if TYPE_CHECKING:
    from ..models.base import KVGroup
    from ..request import Sequence

PREFIX_CACHES: dict[str, type[PrefixIndex] | type[RadixTree]] = {"hash": PrefixIndex, "radix": RadixTree}


class BlockTables(CachedText):
    """Takes, shares, copies, publishes and frees the blocks of sequences. A failed `grow` changes nothing."""

    def __init__(
        self,
        *,
        num_blocks: int,
        groups: tuple[KVGroup, ...],
        chunk: int,
        block_bytes: int,
        enable_prefix_caching: bool,
        prefix_cache: str,
        eviction_policy: str,
        journal: Journal,
        metrics: Metrics,
    ):
        common_size = common_block_size(groups)
        pool = BlockPool(num_blocks, eviction_policy, [common_size // group.block_size for group in groups])
        cache = PREFIX_CACHES[prefix_cache](before=pool.before, groups=groups)
        super().__init__(pool, cache, groups, enable_prefix_caching, journal, metrics)
        self.chunk = chunk  # most tokens of a sequence in one step
        self.block_bytes = block_bytes
        self._copies: list[list[tuple[int, int]]] = [[] for _ in groups]
        self._sources: list[tuple[Sequence, int, int]] = []  # (who, group, block): read until the copies are made

    # --- what a request needs ---------------------------------------------------------------------------------------

    limit_words = "the pool has"  # before `most_for_one` blocks
    shares = True  # do samples of one request read the same blocks?
    grows = True  # do sequences take blocks while they run?

    @property
    def most_for_one(self) -> int:
        """The most blocks that one sequence can ever have."""
        return self.pool.num_blocks - 1

    def needs(self, num_prompt: int, max_tokens: int) -> int:
        """The most blocks that a sample of this request ever holds at once; the KV of its last token is never written."""
        return self.blocks_for(num_prompt + max_tokens - 1)

    def blocks_for(self, num_tokens: int) -> int:
        """The most blocks that a sequence of this many tokens ever holds at once, over all groups."""
        return sum(group.most_blocks(num_tokens, self.chunk) for group in self.groups)

    def blocks_for_beams(self, num_common: int, num_tokens: int, count: int) -> int:
        """The most blocks that `count` texts of `num_tokens` tokens hold at once when they share the first `num_common`."""
        shared = sum(num_common // group.block_size for group in self.groups if not group.window)
        return count * self.blocks_for(num_tokens) - (count - 1) * shared

    def held(self, seq: Sequence) -> int:
        """Blocks that stand in the sequence's tables, over all groups."""
        return sum(len(table) - table.count(NULL_BLOCK) for table in seq.block_tables)

    def reserved_tokens(self, seq: Sequence) -> int:
        """Tokens for which memory was set aside at admission; 0: blocks come as tokens do."""
        return 0

    # --- admission ------------------------------------------------------------------------------------------------

    def find_prefix(self, seq: Sequence) -> Hit:
        """Cached text at the start of the sequence; at least one token is left to compute. A hit that ends inside a block
        needs one more for a copy, for one step; where that is too much it ends with the full common block before."""
        if not self.reads_cache(seq):
            return Hit()
        text, size = self._text(seq), self.common_size
        hit = self.cache.match(text, seq.num_tokens - 1)
        if hit.num_tokens % size and self.blocks_to_admit(seq, hit) > self.pool.num_free:
            hit = self.cache.match(text, hit.num_tokens // size * size)._replace(is_cut=True)
        return hit

    def blocks_to_admit(self, seq: Sequence, hit: Hit) -> int:
        """Free blocks that its whole prefill would use up: new ones, among them the copy of a block of which it found only
        the beginning, and cached ones that get a reader again."""
        found = [block for table in hit.tables for block in table if block]
        revived = sum(self.pool.ref_count[block] == 0 for block in found)
        copied = sum(hit.num_tokens % size > 0 for size in self.block_sizes)
        return self.blocks_for(seq.num_tokens) - len(found) + copied + revived

    def available(self, seq: Sequence) -> int:
        """Free blocks that this sequence could use."""
        return self.pool.num_free

    def still_to_take(self, seq: Sequence) -> int:
        """Blocks that an admitted prefill will still need."""
        return max(0, self.blocks_for(seq.prefill_end) - self.held(seq))

    def adopt(self, seq: Sequence, hit: Hit) -> None:
        """Start the sequence's tables with the blocks that hold this text; nothing of it is computed again."""
        if hit.num_tokens:
            self._share(seq, hit.tables, Cause.PREFIX_MATCH)
            self.cache.adopt(self._text(seq), hit)
        seq.num_computed_tokens = seq.num_cached_tokens = hit.num_tokens

    # --- growth ---------------------------------------------------------------------------------------------------

    def grow(self, seq: Sequence, num_tokens: int) -> bool:
        """Make the next `num_tokens` tokens writable: private tail, blocks for all of them. False when the pool has too
        few free blocks; nothing has changed then."""
        start, tables, pool = seq.num_computed_tokens, seq.block_tables, self.pool
        end, missing, shared = start + num_tokens, 0, []
        for group, (table, size) in enumerate(zip(tables, self.block_sizes, strict=True)):
            missing += -(-end // size) - len(table)
            if start % size and (pool.ref_count[block := table[start // size]] > 1 or pool.is_cached[block]):
                shared.append(group)
        if not missing and not shared:
            return True
        if missing + len(shared) > pool.num_free:
            return False
        for group in shared:
            size = self.block_sizes[group]
            self._copy_on_write(seq, group, start // size, start % size)
        prefill = Cause.RECOMPUTE if seq.num_preemptions else Cause.PROMPT
        cause = prefill if seq.is_prefill else Cause.DECODE
        for _, group in self._blocks_from([len(table) for table in tables], end):
            tables[group].append(self._take(seq, group, len(tables[group]), cause))
        return True

    def _blocks_from(self, lengths: Iterable[int], end: int) -> list[tuple[int, int]]:
        """(first token, group) of the blocks behind tables of these lengths, up to token `end`, in the order of the text."""
        places = enumerate(zip(lengths, self.block_sizes, strict=True))
        return sorted((first, group) for group, (length, size) in places for first in range(length * size, end, size))

    def needed_to_grow(self, sequences: list[Sequence], num_tokens: int) -> int:
        """Free blocks that `grow` takes for all of these, whose tables hold equally many tokens: new blocks, and a copy of a
        partly filled one for each of its readers but, where nobody else has a use for it, the last."""
        pool, start, needed = self.pool, sequences[0].num_computed_tokens, 0
        for group, size in enumerate(self.block_sizes):
            missing = -(-(start + num_tokens) // size) - len(sequences[0].block_tables[group])
            needed += missing * len(sequences)
            if start % size:
                tails = [seq.block_tables[group][start // size] for seq in sequences]
                for block in set(tails):
                    readers = tails.count(block)
                    needed += readers - (pool.ref_count[block] == readers and not pool.is_cached[block])
        return needed

    def _take(self, seq: Sequence, group: int, logical: int, cause: Cause) -> int:
        pool = self.pool
        if pool.is_cached[pool.front]:
            self._evict(pool.front, seq)
        block = pool.take(group)
        self.clock.taken(block, self.journal.time)
        self.journal.emit(EventKind.ALLOCATED, seq.request.id, seq.child, group, block, pool.generation[block],
                          cause, {"logical": logical})  # fmt: skip
        return block

    def _copy_on_write(self, seq: Sequence, group: int, logical: int, tokens: int) -> None:
        """Others still read the block that is written next, or its text is cached: give the sequence a copy of its first
        `tokens` slots. Of n samples that share a block which is not cached the last to write finds itself the only reader
        and needs no copy. A cached block keeps its reader until the copies are made, so that nobody takes it before."""
        table = seq.block_tables[group]
        source = table[logical]
        copy = table[logical] = self._take(seq, group, logical, Cause.COPY_ON_WRITE)
        if self.pool.is_cached[source]:
            self._sources.append((seq, group, source))
            self._copy(seq, group, source, copy, tokens, Cause.CACHED_WRITE)
        else:
            self.pool.release(source, self.journal.step)
            self._copy(seq, group, source, copy, tokens, Cause.SHARED_WRITE)

    def _copy(self, seq: Sequence, group: int, source: int, copy: int, tokens: int, cause: Cause) -> None:
        """Have the first `tokens` slots of `source` copied, before the next step writes anything."""
        pool = self.pool
        pool.fill(copy, tokens)
        self._copies[group].append((source, copy))
        self.metrics.count("kvscope:blocks_copied_total")
        reader = next((s for s in seq.request.children if source in s.block_tables[group]), None)
        numbers = {
            "source": source,
            "source_generation": pool.generation[source],
            "tokens": tokens,
            "bytes": self.block_bytes,
            "reader": reader.request.id if reader else -1,
            "reader_child": reader.child if reader else 0,
        }
        self.journal.emit(EventKind.COPIED, seq.request.id, seq.child, group, copy, pool.generation[copy],
                          cause, numbers)  # fmt: skip

    def take_copies(self) -> tuple[list[tuple[int, int]], ...]:
        """The (source, copy) pairs since the last call, a list per group. All are made before anything is written."""
        copies = tuple(self._copies)
        self._copies = [[] for _ in self.groups]
        for seq, group, source in self._sources:
            self._release(seq, group, source, Cause.COPY_ON_WRITE)
        self._sources = []
        return copies

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """`child` reads all blocks of `parent`, the partly filled one included."""
        self._share(child, parent.block_tables, Cause.FORK)
        if parent.text is not None:
            child.text = self.cache.fork(parent.text, child.token_ids)
        child.num_computed_tokens = parent.num_computed_tokens
        child.num_cached_tokens = parent.num_cached_tokens

    def restore(self, seq: Sequence, slots: Iterable[Iterable[int]], num_tokens: int, block_of: dict[int, int]) -> None:
        """Begin the sequence's empty tables with a block for each host slot (negative: the null block), into which its first
        `num_tokens` tokens come back: the block that `block_of` says, or a new one that is put there."""
        for group, (table, size) in enumerate(zip(slots, self.block_sizes, strict=True)):
            for logical, slot in enumerate(table):
                block = NULL_BLOCK if slot < 0 else block_of.get(slot)
                if block is None:
                    block = block_of[slot] = self._take(seq, group, logical, Cause.SWAPPED_IN)
                    self.pool.fill(block, min(size, num_tokens - logical * size))
                elif block != NULL_BLOCK:
                    self._read(seq, group, block, Cause.SWAPPED_IN)
                seq.block_tables[group].append(block)
        seq.num_computed_tokens = num_tokens

    def _share(self, seq: Sequence, tables: Iterable[Iterable[int]], cause: Cause) -> None:
        """Begin the sequence's empty tables with these blocks, of which it is one more reader."""
        for group, table in enumerate(tables):
            seq.block_tables[group].extend(table)
            for block in seq.block_tables[group]:
                if block != NULL_BLOCK:
                    self._read(seq, group, block, cause)

    def _read(self, seq: Sequence, group: int, block: int, cause: Cause) -> None:
        pool = self.pool
        readers = pool.hit(block, seq.request.priority) if cause is Cause.PREFIX_MATCH else pool.share(block)
        if cause is Cause.PREFIX_MATCH:
            self.clock.hit(block, self.journal.time)
        self.journal.emit(EventKind.SHARED, seq.request.id, seq.child, group, block, pool.generation[block], cause,
                          {"ref_count": readers})  # fmt: skip

    # --- after the step -------------------------------------------------------------------------------------------

    def advance(self, seq: Sequence, num_tokens: int) -> None:
        """The KV of the next `num_tokens` tokens is written: move on, and publish the blocks that are full now."""
        start, common, pool = seq.num_computed_tokens, self.common_size, self.pool
        end = seq.num_computed_tokens = start + num_tokens
        for table, size in zip(seq.block_tables, self.block_sizes, strict=True):
            for logical in range(start // size, -(-end // size)):
                pool.fill(table[logical], min(size, end - logical * size))
        if self.enable_prefix_caching:
            full = end // common * common
            if self.unequal_sizes and self.cache.finds_parts:  # before a window closes over them
                full = max(end // size * size for size in self.block_sizes)
            if full > start or end // common > self._text(seq).num_blocks:
                self._publish(seq, full, Cause.BLOCK_FULL)
        for index, group in enumerate(self.groups):
            if group.window:
                self._slide(seq, index, group.first_visible_block(end))

    def _slide(self, seq: Sequence, group: int, first: int) -> None:
        """No token to come sees the blocks before logical block `first`: they are given back, the last one first."""
        table, pool = seq.block_tables[group], self.pool
        for logical in range(first - 1, -1, -1):
            block = table[logical]
            if block == NULL_BLOCK:  # and so are those before it
                return
            table[logical] = NULL_BLOCK
            self.journal.emit(EventKind.NULLED, seq.request.id, seq.child, group, block, pool.generation[block],
                              Cause.OUT_OF_WINDOW, {"logical": logical, "window": self.groups[group].window})  # fmt: skip
            self._release(seq, group, block, Cause.OUT_OF_WINDOW)

    # --- the end --------------------------------------------------------------------------------------------------

    def release(self, seq: Sequence, cause: Cause) -> tuple[int, int]:
        """Drop all blocks of the sequence, the last first, so that the end of a text is evicted before its start; the text
        of the last, partly filled one may be published, unless another sample reads it too: that one is about to write into
        it, and could not any more. Returns (blocks that became free, how many of these stay cached)."""
        num_tokens = min(seq.num_computed_tokens, seq.num_tokens)
        if any(table and self.pool.ref_count[table[-1]] > 1 for table in seq.block_tables):
            num_tokens -= num_tokens % self.common_size
        if self.enable_prefix_caching and num_tokens and cause is not Cause.FAILED:
            self._publish(seq, num_tokens, Cause.LEFT)
        freed = cached = 0
        end = max(len(table) * size for table, size in zip(seq.block_tables, self.block_sizes, strict=True))
        for first, group in reversed(self._blocks_from([0] * len(self.groups), end)):
            table, logical = seq.block_tables[group], first // self.block_sizes[group]
            block = table[logical] if logical < len(table) else NULL_BLOCK
            if block != NULL_BLOCK and self._release(seq, group, block, cause):
                freed += 1
                cached += self.pool.is_cached[block]
        for table in seq.block_tables:
            del table[:]
        if seq.text is not None:
            self.cache.retract(seq.text, 0)
        seq.num_computed_tokens = 0
        return freed, cached

    def _release(self, seq: Sequence, group: int, block: int, cause: Cause) -> bool:
        """One reader less; True when the block is free now."""
        pool = self.pool
        is_free = pool.release(block, self.journal.step)
        if is_free:
            self.clock.left(block, self.journal.time)
            if pool.is_cached[block]:
                self._give_up_spare(block)
            self.journal.emit(EventKind.FREED, seq.request.id, seq.child, group, block, pool.generation[block],
                              cause, {"cached": pool.is_cached[block]})  # fmt: skip
        return is_free

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raise RuntimeError unless `sequences` (all that hold blocks) account for every reader and every text."""
        audit.check(self, sequences)

    def lengths(self, seq: Sequence) -> list[int]:
        """How long the sequence's tables are between two steps."""
        return [-(-seq.num_computed_tokens // size) for size in self.block_sizes]
