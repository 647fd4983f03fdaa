"""What block tables ask of a prefix cache, whichever kind it is: `prefix_hash.PrefixIndex` or `radix_tree.RadixTree`.

A cache maps text to the blocks that hold its KV, and knows why it found no more. It decides nothing about blocks: it says
which ones can be found from now on, and is told which ones can no longer. Text that continues other text is found only
through it, so every published block names the one before it in its KV group; in a group with a window blocks stand for
themselves. The cache reads the pool's `before`, which says so for all published blocks. Knows tokens and block ids: no
request, no tensor, no reference count.

Text is counted in *common blocks*: the fewest tokens that fill whole blocks of every KV group. Where all groups have one block
size that is a block; with 32 and 16 it is 32 tokens, one block of the one group and two of the other.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from ..events import Cause

if TYPE_CHECKING:
    from ..models.base import KVGroup

TOKEN_BYTES = 8  # token ids are int64
ExtraKeys = tuple[tuple[str, str], ...]  # (kind, value), for example ("salt", "tenant 7")


class Text:
    """The text of one sequence, and how much of it its cache has on record. Made by the cache, kept by the sequence."""

    __slots__ = ("num_blocks", "root", "token_ids")

    def __init__(self, root: Any, token_ids: array):
        self.root = root  # of the extra keys
        self.token_ids = token_ids  # int64, the sequence's own: it grows
        self.num_blocks = 0  # full common blocks that were found or published for it


class Hit(NamedTuple):
    """The longest cached start of a text."""

    num_tokens: int = 0
    tables: tuple[
        list[int], ...
    ] = ()  # a block table a group; the null block where the next token does not look any more
    computed_for: int = -1  # the request that computed most of it
    path: tuple[Any, ...] = ()  # the cache's own
    is_cut: bool = False  # to full common blocks, because no block was free for a copy of the last one


class Miss(NamedTuple):
    """Why a lookup found no more than it did; −1 where a number does not apply."""

    cause: Cause
    evicted_step: int = -1
    at_token: int = -1


class Published(NamedTuple):
    """A block that can be found from now on."""

    group: int
    logical: int
    block: int
    before: int  # the block whose text it continues, 0 none


class Change(NamedTuple):
    """What publishing a text did."""

    published: list[Published]
    superseded: list[int]  # their few tokens are in a fuller block now: to be forgotten


class PrefixCache(Protocol):
    num_published: int  # blocks that can be found
    finds_parts: bool  # may a hit end inside a common block?

    def begin(self, extra_keys: ExtraKeys, token_ids: array) -> Text:
        """A text of which nothing is on record. Only texts with equal extra keys share blocks."""

    def fork(self, text: Text, token_ids: array) -> Text:
        """Another text that has the same start on record."""

    def match(self, text: Text, max_tokens: int) -> Hit:
        """The longest cached start of at most `max_tokens` tokens."""

    def explain(self, text: Text, hit: Hit, max_tokens: int) -> Miss | None:
        """Why `match` found no more; None when nothing that could be known was left out."""

    def adopt(self, text: Text, hit: Hit) -> None:
        """Put the hit on record."""

    def publish(
        self, text: Text, num_tokens: int, tables: Sequence[Sequence[int]], computed_for: int, partly: bool = True
    ) -> Change:
        """The first `num_tokens` tokens are final and their KV is in these blocks: put on record what is not yet. A block that
        they fill in part is only published with `partly`, by a cache that finds it."""

    def holders(self, text: Text, group: int, logical: int) -> list[int]:
        """The blocks of the group that hold this block of the group's of the text as it is on record."""

    def retract(self, text: Text, num_blocks: int) -> None:
        """Only the first `num_blocks` common blocks are on record any more."""

    def group_of(self, block: int) -> int:
        """The KV group of a block that can be found."""

    def twin(self, block: int) -> int:
        """Another block that holds the same text, for whose sake this one is given up when nobody reads it; 0 none."""

    def forget(self, block: int, step: int) -> None:
        """The block cannot be found any more."""

    def text_of(self, block: int) -> bytes | None:
        """The text from its start to the last token found in this block, as int64; None when it cannot be found."""

    def check_integrity(self) -> None:
        """Raise RuntimeError where text → blocks and block → text disagree, or a bound is broken."""


def common_block_size(groups: Sequence[KVGroup]) -> int:
    """Tokens of a common block: the least common multiple of the groups' block sizes."""
    return math.lcm(*(group.block_size for group in groups))


def unequal_sizes(groups: Sequence[KVGroup]) -> tuple[int, ...]:
    """The groups' block sizes where they differ, else ()."""
    sizes = tuple(group.block_size for group in groups)
    return sizes if len(set(sizes)) > 1 else ()


def common_tokens(a: bytes, b: bytes) -> int:
    """How many leading int64 two strings of them share, where they differ or one ends."""
    n = min(len(a), len(b)) // TOKEN_BYTES
    differs = np.frombuffer(a, np.int64, n) != np.frombuffer(b, np.int64, n)
    return int(differs.argmax()) if differs.any() else n
