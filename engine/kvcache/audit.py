"""Do tables, pool and prefix cache tell the same story? For tests after every operation, and for an idle engine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from .block_pool import NULL_BLOCK

if TYPE_CHECKING:
    from ..request import Sequence
    from .block_table import BlockTables


def check(tables: BlockTables, sequences: Iterable[Sequence]) -> None:
    """Raise RuntimeError unless `sequences` (all that hold blocks) account for every reader and every text."""
    pool, cache = tables.pool, tables.cache
    pool.check_integrity()
    cache.check_integrity()
    readers = [0] * pool.num_blocks
    for seq in sequences:
        _check_tables(tables, seq)
        for group, table in enumerate(seq.block_tables):
            for logical, block in enumerate(table):
                readers[block] += 1
                _check_text(tables, seq, group, logical, block)
    readers[NULL_BLOCK] = 1
    for block, (counted, said) in enumerate(zip(readers, pool.ref_count, strict=True)):
        if counted != said:
            raise RuntimeError(f"block {block} stands in {counted} tables, its reference count is {said}")
        if bool(pool.is_cached[block]) != (cache.text_of(block) is not None):
            raise RuntimeError(f"block {block}: pool and prefix cache disagree whether its text can be found")


def _check_tables(tables: BlockTables, seq: Sequence) -> None:
    """As long as they should be, the null block where the window ended, and as many slots written as were computed."""
    lengths, computed = tables.lengths(seq), seq.num_computed_tokens
    if [len(table) for table in seq.block_tables] != lengths:
        raise RuntimeError(f"{seq} has tables of {[len(t) for t in seq.block_tables]} blocks, not {lengths}")
    for group, table in zip(tables.groups, seq.block_tables, strict=True):
        first, size = group.first_visible_block(computed), group.block_size
        if any(table[:first]) or not all(table[first:]):
            raise RuntimeError(f"{seq}: the window of {group.window} tokens starts at block {first} of {table}")
        for logical, block in enumerate(table[first:], first):
            slots = max(0, min(size, computed - logical * size))
            if tables.pool.filled[block] != slots:
                raise RuntimeError(
                    f"{seq}: {tables.pool.filled[block]} slots of block {block} are written, not {slots}"
                )


def _check_text(tables: BlockTables, seq: Sequence, group: int, logical: int, block: int) -> None:
    """What can be found in a block of the sequence is its own text, and computed."""
    found = tables.cache.text_of(block)
    if found is None:
        return
    computed = seq.token_ids[: seq.num_computed_tokens].tobytes()
    if not computed.startswith(found):
        raise RuntimeError(f"{seq}: what is found in block {block} of group {group} is not the text that it computed")
    if logical != (len(found) // 8 - 1) // tables.block_sizes[group]:
        raise RuntimeError(f"{seq}: block {block} of group {group} is found at another place than {logical}")
