"""Block tables: which block holds which tokens of which sequence, one table per KV group.

    logical block     0          1          2          3
    table           [ 7        | 2        | 9        ]
    tokens            0..15      16..31     32..37      the next block is taken when token 48 comes
                      full, findable text   ▲ num_computed_tokens = 38: slots 0..5 of block 9 are written

A table only grows at its end, but for named edits, each an event: copy-on-write replaces the block that is about to be
written while others still read it, the null block takes the place of what fell out of a group's window, and truncation
drops the end. Otherwise a running sequence's block ids never change.
`BlockTables` is the one place where blocks change hands; it tells the journal who, which and why.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..events import Cause, EventKind, Journal
from ..metrics import Metrics
from .block_pool import NULL_BLOCK, BlockPool
from .prefix_hash import Miss, PrefixIndex, PrefixNode

if TYPE_CHECKING:
    from ..models.base import KVGroup
    from ..request import Sequence


class BlockTables:
    """Takes, shares, copies, publishes and frees the blocks of sequences. A failed `grow` changes nothing."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        groups: tuple[KVGroup, ...],
        chunk: int,
        block_bytes: int,
        enable_prefix_caching: bool,
        journal: Journal,
        metrics: Metrics,
    ):
        self.block_size = block_size
        self.groups = groups
        self.chunk = chunk  # most tokens of a sequence in one step
        self.block_bytes = block_bytes
        self.enable_prefix_caching = enable_prefix_caching
        self.journal = journal
        self.metrics = metrics
        self.pool = BlockPool(num_blocks)
        self.index = PrefixIndex(num_blocks=num_blocks, block_size=block_size, groups=groups)
        self._copies: list[list[tuple[int, int]]] = [[] for _ in groups]

    # --- what a request needs ---------------------------------------------------------------------------------------

    limit_words = "the pool has"  # before `most_for_one` blocks
    shares = True  # do samples of one request read the same blocks?

    @property
    def most_for_one(self) -> int:
        """The most blocks that one sequence can ever have."""
        return self.pool.num_blocks - 1

    def needs(self, num_prompt: int, max_tokens: int) -> int:
        """The most blocks that a sample of this request ever holds at once; the KV of its last token is never written."""
        return self.blocks_for(num_prompt + max_tokens - 1)

    def blocks_for(self, num_tokens: int) -> int:
        """The most blocks that a sequence of this many tokens ever holds at once, over all groups."""
        return sum(group.most_blocks(num_tokens, self.block_size, self.chunk) for group in self.groups)

    def held(self, seq: Sequence) -> int:
        """Blocks that stand in the sequence's tables, over all groups."""
        return sum(len(table) - table.count(NULL_BLOCK) for table in seq.block_tables)

    def reserved_tokens(self, seq: Sequence) -> int:
        """Tokens for which memory was set aside at admission; 0: blocks come as tokens do."""
        return 0

    # --- admission ------------------------------------------------------------------------------------------------

    def find_prefix(self, seq: Sequence) -> list[PrefixNode]:
        """Cached text at the start of the sequence: whole blocks, and at least one token is left to compute."""
        if not self.reads_cache(seq):
            return []
        root = self.index.root(seq.request.extra_keys)
        max_blocks = (seq.num_tokens - 1) // self.block_size
        return self.index.match(root, seq.token_ids, seq.block_keys, max_blocks)

    def reads_cache(self, seq: Sequence) -> bool:
        """Log-probabilities of a prompt need every one of its tokens computed."""
        return self.enable_prefix_caching and not seq.request.lacks_prompt_logprobs

    def explain_miss(self, seq: Sequence, nodes: list[PrefixNode]) -> Miss | None:
        """Why `find_prefix` found no more than `nodes`."""
        root = self.index.root(seq.request.extra_keys)
        max_blocks = (seq.num_tokens - 1) // self.block_size
        return self.index.explain(root, seq.token_ids, seq.block_keys, nodes, max_blocks)

    def blocks_to_admit(self, seq: Sequence, nodes: list[PrefixNode]) -> int:
        """Free blocks that its whole prefill would use up: new ones, and cached ones that leave the free queue."""
        ref_count, found = self.pool.ref_count, [block for table in self._found(nodes) for block in table if block]
        revived = sum(ref_count[block] == 0 for block in found)
        return self.blocks_for(seq.num_tokens) - len(found) + revived

    def available(self, seq: Sequence) -> int:
        """Free blocks that this sequence could use."""
        return self.pool.num_free

    def still_to_take(self, seq: Sequence) -> int:
        """Blocks that an admitted prefill will still need."""
        return max(0, self.blocks_for(seq.prefill_end) - self.held(seq))

    def _found(self, nodes: list[PrefixNode]) -> list[list[int]]:
        """The tables with which a sequence that begins with this text starts: the null block where nobody looks any more."""
        tables = []
        for g, group in enumerate(self.groups):
            first = group.first_visible_block(len(nodes) * self.block_size, self.block_size)
            tables.append([NULL_BLOCK] * first + [node.blocks[g][0] for node in nodes[first:]])
        return tables

    def adopt(self, seq: Sequence, nodes: list[PrefixNode]) -> None:
        """Start the sequence's tables with the blocks that hold this text; nothing of it is computed again."""
        self._share(seq, self._found(nodes), Cause.PREFIX_MATCH)
        seq.nodes = list(nodes)
        seq.num_computed_tokens = seq.num_cached_tokens = len(nodes) * self.block_size

    # --- growth ---------------------------------------------------------------------------------------------------

    def grow(self, seq: Sequence, num_tokens: int, cause: Cause) -> bool:
        """Make the next `num_tokens` tokens writable: private tail, blocks for all of them. False when the pool has too
        few free blocks; nothing has changed then."""
        start, tables, pool = seq.num_computed_tokens, seq.block_tables, self.pool
        first = start // self.block_size
        missing = -(-(start + num_tokens) // self.block_size) - len(tables[0])
        shared = (
            [g for g, table in enumerate(tables) if pool.ref_count[table[first]] > 1] if start % self.block_size else ()
        )
        if not missing and not shared:
            return True
        if missing * len(tables) + len(shared) > pool.num_free:
            return False
        for group in shared:
            self._copy_on_write(seq, group, first, start % self.block_size)
        for _ in range(missing):
            for group, table in enumerate(tables):
                table.append(self._take(seq, group, len(table), cause))
        return True

    def _take(self, seq: Sequence, group: int, logical: int, cause: Cause) -> int:
        pool = self.pool
        if pool.is_cached[pool.front]:
            self._evict(pool.front, seq)
        block = pool.take()
        self.journal.emit(EventKind.ALLOCATED, seq.request.id, seq.child, group, block, pool.generation[block],
                          cause, {"logical": logical})  # fmt: skip
        return block

    def _evict(self, block: int, needed_by: Sequence) -> None:
        numbers = {
            "idle_steps": self._idle_steps(block),
            "needed_by": needed_by.request.id,
            "needed_by_child": needed_by.child,
        }
        self._uncache(block, self.pool.why_evicted(block), numbers)
        self.metrics.count("kvscope:blocks_evicted_total")

    def _uncache(self, block: int, cause: Cause, numbers: dict[str, float]) -> None:
        """Nothing finds the block's text from here on: out of the index and out of the pool's cached blocks."""
        node = self.index.node_of(block)
        if node is None:
            return
        group = next(g for g, blocks in enumerate(node.blocks) if block in blocks)
        self.journal.emit(EventKind.EVICTED, -1, 0, group, block, self.pool.generation[block], cause, numbers)
        self.index.forget(block, self.journal.step)
        self.pool.uncache(block)

    def _idle_steps(self, block: int) -> int:
        return self.journal.step - self.pool.last_used_step[block]

    def _copy_on_write(self, seq: Sequence, group: int, logical: int, tokens: int) -> None:
        """Others still read the block that is written next: give the sequence a copy of its first `tokens` slots. The
        last one to write finds itself the only reader and needs none, so n samples make n − 1 copies."""
        table = seq.block_tables[group]
        source = table[logical]
        copy = table[logical] = self._take(seq, group, logical, Cause.COPY_ON_WRITE)
        self.pool.release(source, self.journal.step)
        self._copy(seq, group, source, copy, tokens, Cause.SHARED_WRITE)

    def _copy(self, seq: Sequence, group: int, source: int, copy: int, tokens: int, cause: Cause) -> None:
        """Have the first `tokens` slots of `source` copied, before the next step writes anything."""
        pool = self.pool
        pool.fill(copy, tokens)
        self._copies[group].append((source, copy))
        self.metrics.count("kvscope:blocks_copied_total")
        reader = next(s for s in seq.request.children if source in s.block_tables[group])
        numbers = {
            "source": source,
            "source_generation": pool.generation[source],
            "tokens": tokens,
            "bytes": self.block_bytes,
            "reader": reader.request.id,
            "reader_child": reader.child,
        }
        self.journal.emit(EventKind.COPIED, seq.request.id, seq.child, group, copy, pool.generation[copy],
                          cause, numbers)  # fmt: skip

    def take_copies(self) -> tuple[list[tuple[int, int]], ...]:
        """The (source, copy) pairs since the last call, a list per group. All are made before anything is written."""
        copies = tuple(self._copies)
        self._copies = [[] for _ in self.groups]
        return copies

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """`child` reads all blocks of `parent`, the partly filled one included."""
        self._share(child, parent.block_tables, Cause.FORK)
        child.nodes = list(parent.nodes)
        child.block_keys = list(parent.block_keys)
        child.num_computed_tokens = parent.num_computed_tokens
        child.num_cached_tokens = parent.num_cached_tokens

    def _share(self, seq: Sequence, tables: Iterable[Iterable[int]], cause: Cause) -> None:
        """Begin the sequence's empty tables with these blocks, of which it is one more reader."""
        pool = self.pool
        for group, table in enumerate(tables):
            seq.block_tables[group].extend(table)
            for block in seq.block_tables[group]:
                if block != NULL_BLOCK:
                    self.journal.emit(EventKind.SHARED, seq.request.id, seq.child, group, block,
                                      pool.generation[block], cause, {"ref_count": pool.share(block)})  # fmt: skip

    # --- after the step -------------------------------------------------------------------------------------------

    def advance(self, seq: Sequence, num_tokens: int) -> None:
        """The KV of the next `num_tokens` tokens is written: move on, and publish the blocks that are full now."""
        start, size, pool = seq.num_computed_tokens, self.block_size, self.pool
        end = seq.num_computed_tokens = start + num_tokens
        for logical in range(start // size, -(-end // size)):
            slots = min(size, end - logical * size)
            for table in seq.block_tables:
                pool.fill(table[logical], slots)
        if self.enable_prefix_caching and end // size > len(seq.nodes):
            self._publish(seq, end // size)
        for index, group in enumerate(self.groups):
            if group.window:
                self._slide(seq, index, group.first_visible_block(end, size))

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

    def _publish(self, seq: Sequence, num_full: int) -> None:
        root = self.index.root(seq.request.extra_keys)
        self.index.extend_keys(seq.block_keys, root, seq.token_ids, num_full)
        for logical in range(len(seq.nodes), num_full):
            parent = seq.nodes[-1] if seq.nodes else root
            blocks = [table[logical] for table in seq.block_tables]
            tokens = self.index.tokens_of(seq.token_ids, logical)
            seq.nodes.append(self.index.publish(parent, seq.block_keys[logical], tokens, blocks, seq.request.id))
            for group, block in enumerate(blocks):
                self.pool.cache(block)
                self.journal.emit(EventKind.PUBLISHED, seq.request.id, seq.child, group, block,
                                  self.pool.generation[block], Cause.BLOCK_FULL,
                                  {"logical": logical, "tokens": self.block_size})  # fmt: skip

    # --- the end --------------------------------------------------------------------------------------------------

    def release(self, seq: Sequence, cause: Cause) -> tuple[int, int]:
        """Drop all blocks of the sequence, the last first, so that the end of a text is evicted before its start.
        Returns (blocks that became free, how many of these stay cached)."""
        freed = cached = 0
        for logical in range(len(seq.block_tables[0]) - 1, -1, -1):
            for group, table in reversed([*enumerate(seq.block_tables)]):
                block = table[logical] if logical < len(table) else NULL_BLOCK
                if block != NULL_BLOCK and self._release(seq, group, block, cause):
                    freed += 1
                    cached += self.pool.is_cached[block]
        for table in seq.block_tables:
            del table[:]
        seq.nodes = []
        seq.num_computed_tokens = 0
        return freed, cached

    def _release(self, seq: Sequence, group: int, block: int, cause: Cause) -> bool:
        """One reader less; True when the block is free now."""
        pool = self.pool
        is_free = pool.release(block, self.journal.step)
        if is_free:
            self.journal.emit(EventKind.FREED, seq.request.id, seq.child, group, block, pool.generation[block],
                              cause, {"cached": pool.is_cached[block]})  # fmt: skip
        return is_free

    def withdraw(self, seq: Sequence, cause: Cause, from_logical: int = 0) -> None:
        """The text of these blocks of the sequence is not to be found any more, whoever else reads them. Which blocks it
        had before they fell out of a window is not known any more, so there nobody's of that text is."""
        for group, table in enumerate(seq.block_tables):
            for logical in range(from_logical, len(table)):
                gone = table[logical] == NULL_BLOCK and logical < len(seq.nodes)
                for block in list(seq.nodes[logical].blocks[group]) if gone else (table[logical],):
                    self._uncache(block, cause, {"idle_steps": 0})
        del seq.nodes[from_logical:]

    def reset_cache(self) -> int:
        """Empty the prefix cache; blocks that running requests read keep their text. Returns the blocks emptied."""
        blocks = self.pool.eviction_order().tolist()
        for block in blocks:
            self._uncache(block, Cause.CACHE_RESET, {"idle_steps": self._idle_steps(block)})
        return len(blocks)

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raise RuntimeError unless `sequences` (all that hold blocks) account for every reader and every text."""
        self.pool.check_integrity()
        self.index.check_integrity()
        readers = [0] * self.pool.num_blocks
        readers[NULL_BLOCK] = 1
        for seq in sequences:
            self._check_tables(seq)
            for table in seq.block_tables:
                for block in table:
                    readers[block] += block != NULL_BLOCK
            self._check_text(seq)
        for block, (counted, said) in enumerate(zip(readers, self.pool.ref_count, strict=True)):
            if counted != said:
                raise RuntimeError(f"block {block} stands in {counted} tables, its reference count is {said}")
            if bool(self.pool.is_cached[block]) != (self.index.node_of(block) is not None):
                raise RuntimeError(f"block {block}: pool and prefix index disagree whether its text can be found")

    def _check_tables(self, seq: Sequence) -> None:
        lengths = {len(table) for table in seq.block_tables}
        if lengths != {-(-seq.num_computed_tokens // self.block_size)}:
            raise RuntimeError(f"{seq} has tables of {sorted(lengths)} blocks of {self.block_size} tokens")

    def _check_text(self, seq: Sequence) -> None:
        """Published blocks of the sequence hold its tokens and are computed; slots written match its progress."""
        for logical, node in enumerate(seq.nodes):
            if (logical + 1) * self.block_size > seq.num_computed_tokens:
                raise RuntimeError(f"{seq} published block {logical} before its KV was computed")
            if node.tokens != self.index.tokens_of(seq.token_ids, logical):
                raise RuntimeError(f"{seq} published block {logical} with foreign tokens")
        for group, table in zip(self.groups, seq.block_tables, strict=True):
            first = group.first_visible_block(seq.num_computed_tokens, self.block_size)
            if any(table[:first]) or not all(table[first:]):
                raise RuntimeError(f"{seq}: the window of {group.window} tokens starts at block {first} of {table}")
            for logical, block in enumerate(table[first:], first):
                slots = max(0, min(self.block_size, seq.num_computed_tokens - logical * self.block_size))
                if self.pool.filled[block] != slots:
                    raise RuntimeError(
                        f"{seq}: {self.pool.filled[block]} slots of block {block} are written, not {slots}"
                    )
