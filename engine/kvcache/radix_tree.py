"""Which text the pool still holds: a radix tree over tokens, paged (RadixAttention, arXiv 2312.07104, section 3).

An edge is a run of tokens of any length; texts part where they differ, inside a block too:

    root(salt) ── "a b c d e f" ─┬─ "g h i j"      blocks of 4 slots:  1 [a b c d]  2 [e f g h]  3 [i j . .]
                                 └─ "x y"                                           5 [e f x y]

A block belongs to the node that holds its last token: here 1 to the upper node, 2, 3 and 5 to the lower ones. Block 5
begins with a copy of "e f", so every path has whole block tables. A text that ends inside a block, such as "a b c d e", is
found too: it reads block 2 or 5, and whoever goes on writing copies it first.

Text is lost block by block from the ends of the tree, and the tree follows: it lets go of tokens that no block holds. The
lock of a path is the reference count of its blocks: readers hold every block from the root to their last one. A request
that computed what the tree has already keeps its own blocks, which hold the text too until it leaves.

Lost tokens stay as tombstones for a while (bounded), which is how a later miss can say when they were lost; publishing
them again revives them. This module knows tokens and block ids: no request, no tensor.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import islice, takewhile
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from ..events import Cause
from .prefix_cache import TOKEN_BYTES, Change, ExtraKeys, Hit, Miss, Published, Text, common_block_size
from .radix_node import RadixNode, walk

if TYPE_CHECKING:
    from ..models.base import KVGroup

MAX_ROOTS_COMPARED = 16


class RadixTree:
    """Text → blocks of these KV groups; `before` is the pool's, an entry a block."""

    finds_parts = True

    def __init__(self, *, before: array, groups: Sequence[KVGroup], max_tombstones: int | None = None):
        num_blocks = len(before)
        self.before = before
        self.block_size = common_block_size(groups)
        self.block_sizes = tuple(group.block_size for group in groups)
        self.groups = groups
        self.max_tombstones = max(1024, num_blocks) if max_tombstones is None else max_tombstones
        self._node_of: list[RadixNode | None] = [None] * num_blocks
        self._place = [(0, 0)] * num_blocks  # (group, logical) of a published block
        self._tombstones: OrderedDict[RadixNode, None] = OrderedDict()  # what follows a tombstone is older than it
        self._roots: WeakValueDictionary[ExtraKeys, RadixNode] = WeakValueDictionary()
        self.num_published = 0

    def begin(self, extra_keys: ExtraKeys, token_ids: array) -> Text:
        root = self._roots.get(extra_keys)
        if root is None:
            root = self._roots[extra_keys] = RadixNode(None, 0, self.block_sizes, -1)
        return Text(root, token_ids)

    def fork(self, text: Text, token_ids: array) -> Text:
        child = Text(text.root, token_ids)
        child.num_blocks = text.num_blocks
        return child

    # --- lookup ---------------------------------------------------------------------------------------------------

    def match(self, text: Text, max_tokens: int) -> Hit:
        """What a group does not hold any more, of what the next token would see, shortens the hit to full blocks of that group."""
        path, matched = walk(text.root, text.token_ids[:max_tokens].tobytes())
        live = list(takewhile(lambda node: not node.is_lost, path))
        if not live:
            return Hit()
        matched = min(matched, live[-1].end)
        tables = tuple(self._table(live, group, matched) for group in range(len(self.groups)))
        hole = 0
        while matched and hole >= 0:
            firsts = [group.first_visible_block(matched) for group in self.groups]
            holes = map(_last_zero, tables, firsts)
            hole = max(place * size for place, size in zip(holes, self.block_sizes, strict=True))
            if hole >= 0:
                matched = hole
                for table, size in zip(tables, self.block_sizes, strict=True):
                    del table[-(-hole // size) :]
        if not matched:
            return Hit()
        for group, table, first in zip(self.groups, tables, firsts, strict=True):
            table[:first] = [0] * first
            if not group.window:  # of blocks that hold the same, those that were published one after the other
                for logical in range(len(table) - 1, 0, -1):
                    table[logical - 1] = self.before[table[logical]]
        parts: dict[int, int] = {}
        for node in live:
            parts[node.computed_for] = parts.get(node.computed_for, 0) + max(0, min(node.end, matched) - node.start)
        return Hit(matched, tables, max(parts, key=parts.__getitem__))

    def _table(self, path: list[RadixNode], group: int, num_tokens: int) -> list[int]:
        """A block of the group for each of the first tokens of the path, 0 where it has none."""
        size, cells = self.block_sizes[group], []
        for node in path:
            cells[node.first_block(group) :] = node.blocks[group]
        table = [cell[0] if cell else 0 for cell in cells[: -(-num_tokens // size)]]
        if num_tokens % size and not table[-1]:
            table[-1] = self._tail(path[-1], group, num_tokens // size)
        return table

    def _tail(self, node: RadixNode, group: int, logical: int) -> int:
        """A block that begins with the tokens of this logical block as far as the node has them, 0 none."""
        cell = node.cell(group, logical)
        if cell or node.end >= (logical + 1) * self.block_sizes[group]:
            return cell[0] if cell else 0
        return next(filter(None, (self._tail(child, group, logical) for child in node.children.values())), 0)

    def explain(self, text: Text, hit: Hit, max_tokens: int) -> Miss | None:
        """Told apart, in this order: the text was there and was evicted; the same start is cached under another salt;
        cached text differs from some token on; nobody asked for such text before."""
        if hit.num_tokens == max_tokens:
            return None
        data = text.token_ids[:max_tokens].tobytes()
        path, matched = walk(text.root, data)
        if matched > hit.num_tokens:
            gone = next((node for node in path if node.is_lost), None)
            return Miss(Cause.EVICTED, evicted_step=gone.evicted_step if gone else max(n.evicted_step for n in path))
        if matched < self.block_size and self._is_under_another_root(text.root, data, matched):
            return Miss(Cause.SALT_DIFFERS)
        last = path[-1] if path else text.root
        if matched and (matched < last.end or last.children or last.lost):
            return Miss(Cause.FIRST_DIFFERENCE, at_token=matched)
        return Miss(Cause.NEVER_SEEN)

    def _is_under_another_root(self, root: RadixNode, data: bytes, matched: int) -> bool:
        enough = max(matched + 1, min(self.block_size, len(data) // TOKEN_BYTES))
        others = [other for other in islice(self._roots.values(), MAX_ROOTS_COMPARED) if other is not root]
        paths = (walk(other, data) for other in others)
        return any(agreed >= enough and not path[-1].is_lost for path, agreed in paths)

    # --- change ---------------------------------------------------------------------------------------------------

    def adopt(self, text: Text, hit: Hit) -> None:
        text.num_blocks = hit.num_tokens // self.block_size

    def retract(self, text: Text, num_blocks: int) -> None:
        text.num_blocks = min(text.num_blocks, num_blocks)

    def publish(
        self, text: Text, num_tokens: int, tables: Sequence[Sequence[int]], computed_for: int, partly: bool = True
    ) -> Change:
        """A partly filled last block where nothing holds its tokens yet."""
        path, superseded = self._insert(text.root, text.token_ids[:num_tokens].tobytes(), computed_for)
        change, ends = Change([], superseded), [node.end for node in path]
        for first, group in self._blocks_between(text.num_blocks * self.block_size, num_tokens):
            table, size = tables[group], self.block_sizes[group]
            if first + size > num_tokens and not partly:
                continue
            logical, end = first // size, min(first + size, num_tokens)
            block, node = table[logical], path[bisect_left(ends, end)]
            if block and self._node_of[block] is None and not (end % size and self._tail(node, group, logical)):
                before = table[logical - 1] if logical and not self.groups[group].window else 0
                node.cell(group, logical).append(block)
                self._node_of[block], self._place[block] = node, (group, logical)
                change.published.append(Published(group, logical, block, before))
        self.num_published += len(change.published)
        text.num_blocks = num_tokens // self.block_size
        return change

    def _blocks_between(self, start: int, end: int) -> list[tuple[int, int]]:
        """(first token, group) of the blocks of all groups that hold these tokens, in order; `start` fills common blocks."""
        return sorted(
            (first, group) for group, size in enumerate(self.block_sizes) for first in range(start, end, size)
        )

    def _insert(self, root: RadixNode, data: bytes, computed_for: int) -> tuple[list[RadixNode], list[int]]:
        """Nodes that hold exactly this text, made where there are none; and the blocks of ends that it goes beyond."""
        length = len(data) // TOKEN_BYTES
        path, matched = walk(root, data)
        last = path[-1] if path else root
        was_lost, lost_step = last.is_lost, last.evicted_step
        revived = [node for node in path if node.is_lost]
        for node in revived:
            self._revive(node, computed_for)
        if matched < last.end and (matched < length or was_lost or self._lacks_tail(last, matched)):
            lower = self._split(last, matched)
            if was_lost:
                self._lose(lower, lost_step)
        superseded = [
            block
            for node in path
            if node.end < length
            for size, row in zip(self.block_sizes, node.blocks, strict=True)
            if node.end % size
            for block in row[-1]
        ]
        for block in superseded:
            self._drop(block)
        for node in reversed(revived):  # they were lost block by block
            if path[-1] is node and node.parent.is_alone_with(node):
                node.parent.absorb(path.pop())
        last = path[-1] if path else root
        if rest := data[matched * TOKEN_BYTES :]:
            if path and last.computed_for == computed_for and not last.children and not last.lost:
                last.extend(rest)
            else:
                path.append(RadixNode(last, matched, self.block_sizes, computed_for))
                path[-1].extend(rest)
                last.children[path[-1].key] = path[-1]
        return path, superseded

    def _lacks_tail(self, node: RadixNode, num_tokens: int) -> bool:
        """Is there a group that does not hold the tokens of the last, partly filled block of these?"""
        return any(
            num_tokens % size and not self._tail(node, group, num_tokens // size)
            for group, size in enumerate(self.block_sizes)
        )

    def _split(self, node: RadixNode, at: int) -> RadixNode:
        lower = node.split(at)
        for block in lower.all_blocks():
            self._node_of[block] = lower
        return lower

    def _revive(self, node: RadixNode, computed_for: int) -> None:
        del self._tombstones[node], node.parent.lost[node.key]
        node.parent.children[node.key] = node
        node.is_lost, node.computed_for, node.evicted_step = False, computed_for, -1

    def group_of(self, block: int) -> int:
        return self._place[block][0]

    def twin(self, block: int) -> int:
        holders = self._node_of[block].cell(*self._place[block])
        return next((other for other in holders if other != block), 0)

    def _drop(self, block: int) -> RadixNode:
        node, self._node_of[block] = self._node_of[block], None
        node.cell(*self._place[block]).remove(block)
        self.num_published -= 1
        return node

    def forget(self, block: int, step: int) -> None:
        node = self._drop(block)
        if not node.cell(*self._place[block]):
            node.evicted_step = step
        while node.parent is not None and not node.children and not any(row[-1] for row in node.blocks):
            cut = max(node.start, *((node.end - 1) // size * size for size in self.block_sizes))
            lost = self._split(node, cut) if cut > node.start else node
            self._lose(lost, step)
            node = lost.parent

    def _lose(self, node: RadixNode, step: int) -> None:
        """No block holds these tokens any more: a tombstone. Too many, and the oldest goes; nothing follows it."""
        node.parent.children.pop(node.key, None)
        node.parent.lost[node.key] = node
        node.is_lost, node.evicted_step = True, step
        self._tombstones[node] = None
        if len(self._tombstones) > self.max_tombstones:
            oldest = self._tombstones.popitem(last=False)[0]
            del oldest.parent.lost[oldest.key]

    # --- for those who look ---------------------------------------------------------------------------------------

    def holders(self, text: Text, group: int, logical: int) -> list[int]:
        end = (logical + 1) * self.block_sizes[group]
        path, matched = walk(text.root, text.token_ids[:end].tobytes())
        return list(path[-1].cell(group, logical)) if matched == end else []

    def nodes(self) -> Iterator[RadixNode]:
        """All nodes, tombstones included, a parent before its children; roots first."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            yield node
            stack += [*node.children.values(), *node.lost.values()]

    def text_of(self, block: int) -> bytes | None:
        node = self._node_of[block]
        if node is None:
            return None
        parts = []
        while node is not None:
            parts.append(node.tokens)
            node = node.parent
        group, logical = self._place[block]
        return b"".join(reversed(parts))[: (logical + 1) * self.block_sizes[group] * TOKEN_BYTES]

    def check_integrity(self) -> None:
        held: dict[int, RadixNode] = {}
        lost = 0
        for node in self.nodes():
            node.check()
            if node.is_lost != (node in self._tombstones):
                raise RuntimeError(f"the node of tokens {node.start} to {node.end - 1} is wrongly (not) a tombstone")
            lost += node.is_lost
            for block in node.all_blocks():
                if block in held:
                    raise RuntimeError(f"block {block} is listed for two texts")
                if block not in node.cell(*self._place[block]):
                    raise RuntimeError(f"block {block} is listed at another place than {self._place[block]}")
                held[block] = node
        for block, node in enumerate(self._node_of):
            if held.get(block) is not node:
                raise RuntimeError(f"block {block} and the tree disagree about its text")
        if len(held) != self.num_published:
            raise RuntimeError(f"{len(held)} blocks are published, the counter says {self.num_published}")
        if lost != len(self._tombstones) or lost > self.max_tombstones:
            raise RuntimeError(
                f"{lost} of {len(self._tombstones)} tombstones are in the tree, of {self.max_tombstones}"
            )


def _last_zero(table: list[int], first: int) -> int:
    """The place of the last 0 from `first` on, −1 none."""
    return next((i for i in range(len(table) - 1, first - 1, -1) if not table[i]), -1)
