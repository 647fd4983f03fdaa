"""One node of the radix tree, and the way along its edges; `radix_tree` has the picture and the rules."""

from __future__ import annotations

from .prefix_cache import TOKEN_BYTES, common_tokens


class RadixNode:
    """Tokens `start` … `end` − 1 of a text. Each of `blocks[g][k]` holds, for group g, the tokens of the text's logical
    block `first_block(g) + k` up to `end`; there is none where a child's block holds them as well. Group g has blocks of
    `block_sizes[g]` tokens."""

    __slots__ = (
        "__weakref__", "block_sizes", "blocks", "children", "computed_for", "evicted_step", "is_lost", "lost", "parent",
        "start", "tokens",
    )  # fmt: skip

    def __init__(self, parent: RadixNode | None, start: int, block_sizes: tuple[int, ...], computed_for: int):
        self.parent = parent
        self.start = start
        self.block_sizes = block_sizes
        self.tokens = b""  # int64
        self.blocks: list[list[list[int]]] = [[] for _ in block_sizes]
        self.children: dict[bytes, RadixNode] = {}  # by first token: those that lead to a block
        self.lost: dict[bytes, RadixNode] = {}  # tombstones, by first token
        self.is_lost = False
        self.computed_for = computed_for  # the request that computed it
        self.evicted_step = -1  # when it last lost a block

    @property
    def end(self) -> int:
        return self.start + len(self.tokens) // TOKEN_BYTES

    @property
    def key(self) -> bytes:
        return self.tokens[:TOKEN_BYTES]

    def first_block(self, group: int) -> int:
        """The logical block of the text in which it starts."""
        return self.start // self.block_sizes[group]

    def _length(self, group: int) -> int:
        """How many blocks of the group its tokens lie in."""
        return -(-self.end // self.block_sizes[group]) - self.first_block(group)

    def child(self, key: bytes) -> RadixNode | None:
        return self.children.get(key) or self.lost.get(key)

    def cell(self, group: int, logical: int) -> list[int]:
        """The blocks that hold this logical block, as far as the node has it."""
        return self.blocks[group][logical - self.first_block(group)]

    def all_blocks(self) -> list[int]:
        return [block for row in self.blocks for cell in row for block in cell]

    def extend(self, tokens: bytes) -> None:
        """Go on with these tokens, which no block holds yet."""
        self.tokens += tokens
        for group, row in enumerate(self.blocks):
            row += [[] for _ in range(self._length(group) - len(row))]

    def split(self, at: int) -> RadixNode:
        """Cut it in two before token `at`; it keeps its start. A block goes where its last token goes. Returns the new lower
        node, its only child."""
        cut = (at - self.start) * TOKEN_BYTES
        whole = [at // size - self.first_block(group) for group, size in enumerate(self.block_sizes)]
        lower = RadixNode(self, at, self.block_sizes, self.computed_for)
        lower.tokens, lower.blocks = self.tokens[cut:], [row[n:] for row, n in zip(self.blocks, whole, strict=True)]
        lower.children, lower.lost, lower.evicted_step = self.children, self.lost, self.evicted_step
        for child in (*lower.children.values(), *lower.lost.values()):
            child.parent = lower
        self.blocks = [row[:n] for row, n in zip(self.blocks, whole, strict=True)]
        upper, self.tokens = self.tokens[:cut], b""
        self.extend(upper)
        self.children, self.lost = {lower.key: lower}, {}
        return lower

    def is_alone_with(self, child: RadixNode) -> bool:
        """Does nothing but this child follow, computed for the same request?"""
        only = len(self.children) == 1 and not self.lost
        return self.parent is not None and only and self.computed_for == child.computed_for

    def absorb(self, child: RadixNode) -> None:
        """Take in an only child that has no blocks yet: one edge for both."""
        self.extend(child.tokens)
        self.children, self.lost = child.children, child.lost
        for grandchild in (*self.children.values(), *self.lost.values()):
            grandchild.parent = self

    def check(self) -> None:
        """Raise RuntimeError where it contradicts itself or its children."""
        below = [*self.children.items(), *self.lost.items()]
        name = f"the node of tokens {self.start} to {self.end - 1}"
        found, lengths = [len(row) for row in self.blocks], [self._length(g) for g in range(len(self.blocks))]
        if found != (lengths if self.parent else [0] * len(lengths)):
            raise RuntimeError(f"{name} has {found} blocks, not {', '.join(map(str, lengths))}")
        if any(c.parent is not self or c.key != key or c.start != self.end or not c.tokens for key, c in below):
            raise RuntimeError(f"{name} and its children disagree")
        if len({key for key, _ in below}) != len(below):
            raise RuntimeError(f"{name} has two children that begin with the same token")
        if self.is_lost and (self.children or self.all_blocks()):
            raise RuntimeError(f"{name} is a tombstone and leads to blocks")
        if self.parent and not self.is_lost and not self.children and not any(row[-1] for row in self.blocks):
            raise RuntimeError(f"no block holds the last token of {name}, nor does anything follow it")


def walk(root: RadixNode, text: bytes) -> tuple[list[RadixNode], int]:
    """The nodes along a text, tombstones included, and how many tokens agree; the last node may hold more."""
    path, node, at = [], root, 0
    while at < len(text) and (child := node.child(text[at : at + TOKEN_BYTES])) is not None:
        path.append(child)
        if not text.startswith(child.tokens, at):
            return path, at // TOKEN_BYTES + common_tokens(child.tokens, text[at : at + len(child.tokens)])
        node, at = child, at + len(child.tokens)
    return path, at // TOKEN_BYTES
