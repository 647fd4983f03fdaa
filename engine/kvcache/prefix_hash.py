"""Which text the pool still holds: a chain of hashes over full blocks, and why a lookup found no more.

Text is cut into full blocks, common ones where KV groups have blocks of different sizes: a hit ends with one. The key of a
block is SHA-256 over its parent's key and its own token ids; the chain starts at a root whose key covers the extra keys
(salt, adapter), each tagged with its kind so that one can never pass for another. Equal text under an equal root is one
`PrefixNode`, however many blocks hold it:

    root(salt) ── node(tokens 0..15) ── node(tokens 16..31) ── node(…)
                     blocks [3]            blocks [4, 9]          none: a tombstone, evicted at step 185

With blocks of 32 and 16 tokens a node has three cells, one for the group of 32 and two for that of 16, each with its blocks.

A hit compares the parent node and the token ids, never the key alone, so that a collision is a miss. It needs the blocks
that the next token can see: all of them, and of a KV group with a window only those within it. A node whose
last block was evicted stays as a tombstone for a while (bounded), which is how a later miss can say when the text was
lost; publishing the same text again revives it. This module knows tokens and block ids: no request, no tensor.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from ..events import Cause
from .prefix_cache import (
    TOKEN_BYTES,
    Change,
    ExtraKeys,
    Hit,
    Miss,
    Published,
    Text,
    common_block_size,
    common_tokens,
)

if TYPE_CHECKING:
    from ..models.base import KVGroup

MAX_CHILDREN_COMPARED = 8  # siblings that an explanation looks at, the newest first
MAX_ROOTS_COMPARED = 16


def hash_root(extra_keys: ExtraKeys) -> bytes:
    """Key of an empty text under these extra keys; lengths are part of it, so no two lists read the same."""
    digest = hashlib.sha256(b"kvscope prefix root")
    for part in (part for pair in extra_keys for part in pair):
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


def hash_block(parent_key: bytes, tokens: bytes) -> bytes:
    """Key of one full block: `tokens` are its ids as little-endian int64."""
    return hashlib.sha256(parent_key + tokens).digest()


class PrefixNode:
    """One full block of text below its parent, and the blocks that hold its KV: a list per KV group, or, where its blocks are
    smaller than a common one, a list for each of them in order."""

    __slots__ = ("__weakref__", "blocks", "children", "computed_for", "evicted_step", "key", "parent", "tokens")

    def __init__(self, key: bytes, parent: PrefixNode | None, tokens: bytes, num_cells: int, computed_for: int):
        self.key = key
        self.parent = parent
        self.tokens = tokens
        self.blocks: tuple[list[int], ...] = tuple([] for _ in range(num_cells))
        self.children: dict[PrefixNode, None] = {}  # an ordered set
        self.computed_for = computed_for  # the request that computed it first
        self.evicted_step = -1

    @property
    def is_cached(self) -> bool:
        """Every KV group holds all of it."""
        return all(self.blocks)


class HashedText(Text):
    """`nodes` are those on record, `keys` their hashes and those of blocks still to be looked up."""

    __slots__ = ("keys", "nodes")

    def __init__(self, root: PrefixNode, token_ids: array):
        super().__init__(root, token_ids)
        self.keys: list[bytes] = []
        self.nodes: list[PrefixNode] = []


class PrefixIndex:
    """Text → blocks of these KV groups; `before` is the pool's, an entry a block."""

    finds_parts = False

    def __init__(self, *, before: array, groups: Sequence[KVGroup], max_tombstones: int | None = None):
        num_blocks = len(before)
        self.before = before
        self.block_size = common_block_size(groups)
        self.groups = groups
        self._per_node = [self.block_size // group.block_size for group in groups]
        self._group_of_cell = [g for g, count in enumerate(self._per_node) for _ in range(count)]
        self._first_cell = [self._group_of_cell.index(g) for g in range(len(groups))]
        self._full = [cell for cell, g in enumerate(self._group_of_cell) if not groups[g].window]
        self.max_tombstones = max(1024, num_blocks) if max_tombstones is None else max_tombstones
        self._node_of: list[PrefixNode | None] = [None] * num_blocks
        self._buckets: dict[bytes, list[PrefixNode]] = {}  # more than one node: their keys collided
        self._tombstones: OrderedDict[PrefixNode, None] = OrderedDict()
        self._roots: WeakValueDictionary[ExtraKeys, PrefixNode] = WeakValueDictionary()
        self.num_published = 0  # blocks that can be found

    def begin(self, extra_keys: ExtraKeys, token_ids: array) -> HashedText:
        root = self._roots.get(extra_keys)
        if root is None:
            root = self._roots[extra_keys] = PrefixNode(hash_root(extra_keys), None, b"", len(self._group_of_cell), -1)
        return HashedText(root, token_ids)

    def fork(self, text: HashedText, token_ids: array) -> HashedText:
        child = HashedText(text.root, token_ids)
        child.keys, child.nodes, child.num_blocks = list(text.keys), list(text.nodes), text.num_blocks
        return child

    def node_of(self, block: int) -> PrefixNode | None:
        """The text that can be found in this block."""
        return self._node_of[block]

    def text_of(self, block: int) -> bytes | None:
        node, parts = self._node_of[block], []
        if node is None:
            return None
        beyond = self.block_size - self._end_of(block)
        while node.parent is not None:
            parts.append(node.tokens)
            node = node.parent
        text = b"".join(reversed(parts))
        return text[: len(text) - beyond * TOKEN_BYTES]

    def _cell_of(self, block: int) -> int:
        """The place of a block that can be found among the cells of its node."""
        return next(cell for cell, holders in enumerate(self._node_of[block].blocks) if block in holders)

    def _end_of(self, block: int) -> int:
        """How many tokens of its node there are up to its last one."""
        cell = self._cell_of(block)
        group = self._group_of_cell[cell]
        return (cell - self._first_cell[group] + 1) * self.groups[group].block_size

    def tokens_of(self, token_ids: array, i: int) -> bytes:
        """Full block i of a token list as bytes."""
        return token_ids[i * self.block_size : (i + 1) * self.block_size].tobytes()

    def _extend_keys(self, text: HashedText, num_blocks: int) -> None:
        """Know the keys of at least the first `num_blocks` full blocks; those that are there are kept."""
        for i in range(len(text.keys), num_blocks):
            text.keys.append(hash_block(text.keys[-1] if i else text.root.key, self.tokens_of(text.token_ids, i)))

    # --- lookup ---------------------------------------------------------------------------------------------------

    def match(self, text: HashedText, max_tokens: int) -> Hit:
        """Full blocks only. Of each group the hit has what the next token can see."""
        max_blocks = max_tokens // self.block_size
        self._extend_keys(text, max_blocks)
        nodes: list[PrefixNode] = []
        num_matched = 0
        runs = [0] * len(self.groups)  # tokens that the group holds up to here, without a gap
        node: PrefixNode | None = text.root
        for i in range(1, max_blocks + 1):
            node = self._find(node, text.keys[i - 1], self.tokens_of(text.token_ids, i - 1))
            if node is None or not all(node.blocks[cell] for cell in self._full):
                break
            nodes.append(node)
            for g, blocks in zip(self._group_of_cell, node.blocks, strict=True):
                runs[g] = runs[g] + self.groups[g].block_size if blocks else 0
            end = i * self.block_size
            if all(
                run >= end - group.first_visible_block(end) * group.block_size
                for run, group in zip(runs, self.groups, strict=True)
            ):
                num_matched = i
        if not num_matched:
            return Hit()
        del nodes[num_matched:]
        owners = [node.computed_for for node in nodes]
        tables = tuple(self._table(nodes, group) for group in range(len(self.groups)))
        return Hit(num_matched * self.block_size, tables, max(owners, key=owners.count), tuple(nodes))

    def _table(self, nodes: list[PrefixNode], group: int) -> list[int]:
        """Blocks that hold this text. Where a text is in several blocks, those that were published one after the other."""
        count, cell = self._per_node[group], self._first_cell[group]
        if self.groups[group].window:
            first = self.groups[group].first_visible_block(len(nodes) * self.block_size)
            return [0] * first + [
                nodes[logical // count].blocks[cell + logical % count][0]
                for logical in range(first, len(nodes) * count)
            ]
        table = [nodes[-1].blocks[cell + count - 1][0]]
        while len(table) < len(nodes) * count:
            table.append(self.before[table[-1]])
        return table[::-1]

    def _find(self, parent: PrefixNode, key: bytes, tokens: bytes) -> PrefixNode | None:
        for node in self._buckets.get(key, ()):
            if node.parent is parent and node.tokens == tokens:
                return node
        return None

    def explain(self, text: HashedText, hit: Hit, max_tokens: int) -> Miss | None:
        """Told apart, in this order: the rest fills no block or is held back so that one token is computed; the text was
        there and was evicted; the same start is cached under another salt; cached text differs from some token on;
        nobody asked for such text before."""
        root, token_ids, nodes = text.root, text.token_ids, hit.path
        i, parent = len(nodes), nodes[-1] if nodes else root
        if i == max_tokens // self.block_size:  # what is left fills no block, or one that is held back
            if len(token_ids) == (i + 1) * self.block_size:
                tokens = self.tokens_of(token_ids, i)
                held_back = self._find(parent, hash_block(parent.key, tokens), tokens)
                if held_back is not None and held_back.is_cached:
                    return Miss(Cause.FULL_BLOCKS_ONLY)
                return None if i else Miss(Cause.NEVER_SEEN)
            return None if i else Miss(Cause.FULL_BLOCKS_ONLY)
        tokens = self.tokens_of(token_ids, i)
        node = self._find(parent, text.keys[i], tokens)
        if node is not None:
            end = (i + 1) * self.block_size
            first = min(group.first_visible_block(end) * group.block_size for group in self.groups)
            seen = [*nodes[first // self.block_size :], node]
            return Miss(Cause.EVICTED, evicted_step=max(n.evicted_step for n in seen if not n.is_cached))
        if i == 0 and self._is_under_another_root(root, tokens):
            return Miss(Cause.SALT_DIFFERS)
        common = max((common_tokens(c.tokens, tokens) for c in _newest(parent.children)), default=0)
        if common or (i and parent.children):
            return Miss(Cause.FIRST_DIFFERENCE, at_token=i * self.block_size + common)
        return Miss(Cause.NEVER_SEEN)

    def _is_under_another_root(self, root: PrefixNode, tokens: bytes) -> bool:
        others = [other for other in islice(self._roots.values(), MAX_ROOTS_COMPARED) if other is not root]
        found = (self._find(other, hash_block(other.key, tokens), tokens) for other in others)
        return any(node is not None and node.is_cached for node in found)

    # --- change ---------------------------------------------------------------------------------------------------

    def adopt(self, text: HashedText, hit: Hit) -> None:
        text.nodes, text.num_blocks = list(hit.path), len(hit.path)

    def retract(self, text: HashedText, num_blocks: int) -> None:
        del text.nodes[num_blocks:]
        text.num_blocks = len(text.nodes)

    def publish(
        self, text: HashedText, num_tokens: int, tables: Sequence[Sequence[int]], computed_for: int, partly: bool = True
    ) -> Change:
        """Full blocks only; equal text may be found in several."""
        num_full, change = num_tokens // self.block_size, Change([], [])
        self._extend_keys(text, num_full)
        for logical in range(text.num_blocks, num_full):
            node = self._node(text, logical, computed_for)
            text.nodes.append(node)
            for cell, group in enumerate(self._group_of_cell):
                at = logical * self._per_node[group] + cell - self._first_cell[group]
                block = tables[group][at]
                if block and self._node_of[block] is None:
                    before = tables[group][at - 1] if at and not self.groups[group].window else 0
                    node.blocks[cell].append(block)
                    self._node_of[block] = node
                    change.published.append(Published(group, at, block, before))
            if not any(node.blocks):  # it fell out of every window before it could be published
                self._bury(node)
        text.num_blocks = len(text.nodes)
        self.num_published += len(change.published)
        return change

    def _node(self, text: HashedText, logical: int, computed_for: int) -> PrefixNode:
        """The node of this block of the text below those on record, made or revived."""
        parent = text.nodes[-1] if text.nodes else text.root
        key, tokens = text.keys[logical], self.tokens_of(text.token_ids, logical)
        node = self._find(parent, key, tokens)
        if node is None:
            node = PrefixNode(key, parent, tokens, len(self._group_of_cell), computed_for)
            self._buckets.setdefault(key, []).append(node)
            parent.children[node] = None
        elif node in self._tombstones:
            del self._tombstones[node]
            node.computed_for = computed_for
        return node

    def holders(self, text: HashedText, group: int, logical: int) -> list[int]:
        node, place = divmod(logical, self._per_node[group])
        return list(text.nodes[node].blocks[self._first_cell[group] + place]) if node < len(text.nodes) else []

    def group_of(self, block: int) -> int:
        return self._group_of_cell[self._cell_of(block)]

    def twin(self, block: int) -> int:
        return 0  # all that hold it are kept until they are evicted, as in vLLM

    def forget(self, block: int, step: int) -> None:
        node = self._node_of[block]
        node.blocks[self._cell_of(block)].remove(block)
        self._node_of[block] = None
        self.num_published -= 1
        if not node.is_cached:
            node.evicted_step = step
        if not any(node.blocks):
            self._bury(node)

    def _bury(self, node: PrefixNode) -> None:
        self._tombstones[node] = None
        if len(self._tombstones) > self.max_tombstones:
            self._drop(self._tombstones.popitem(last=False)[0])

    def _drop(self, node: PrefixNode) -> None:
        bucket = self._buckets[node.key]
        bucket.remove(node)
        if not bucket:
            del self._buckets[node.key]
        node.parent.children.pop(node, None)

    def check_integrity(self) -> None:
        holders: dict[int, PrefixNode] = {}
        for key, bucket in self._buckets.items():
            for node in bucket:
                if node.key != key or len(node.tokens) != 8 * self.block_size:
                    raise RuntimeError(f"a node of {len(node.tokens) // 8} tokens is filed under a foreign key")
                if any(node.blocks) == (node in self._tombstones):
                    raise RuntimeError(f"a node with blocks {node.blocks} is wrongly (not) among the tombstones")
                for block in (block for group in node.blocks for block in group):
                    if block in holders:
                        raise RuntimeError(f"block {block} is listed for two texts")
                    holders[block] = node
        for block, node in enumerate(self._node_of):
            if holders.get(block) is not node:
                raise RuntimeError(f"block {block} and the index disagree about its text")
        if len(holders) != self.num_published:
            raise RuntimeError(f"{len(holders)} blocks are published, the counter says {self.num_published}")
        if len(self._tombstones) > self.max_tombstones:
            raise RuntimeError(f"{len(self._tombstones)} tombstones are kept, the limit is {self.max_tombstones}")


def _newest(children: dict[PrefixNode, None]) -> list[PrefixNode]:
    return list(islice(reversed(children), MAX_CHILDREN_COMPARED))
