"""Cached text as rows: where the blocks of a prefix cache stand when texts that begin alike share their start.

    root   [1][2][3][4][5][6]     a row goes on with the text that was computed first;
                   └[9][7]        what parts from it begins a row of its own, at its column, below it

Works on the arrays of a snapshot alone, so that it is the same for a hash chain and for a radix tree: of each cached block
they tell the one before it. Blocks of KV groups with a window stand for themselves and are in no row.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from kvscope.engine.snapshot import ROOT, EngineSnapshot


class Branch(NamedTuple):
    """A run of blocks in one row. `parent_row` is the row that it parts from, −1 for the first of a text."""

    row: int
    column: int
    blocks: list[int]
    parent_row: int
    goes_on: bool  # beyond the last column


class Forest(NamedTuple):
    branches: list[Branch]
    headings: dict[int, int]  # row -> the first block of the text below it
    num_rows: int
    num_left_out: int  # blocks that are in no row


def lay_out(snapshot: EngineSnapshot, *, most_rows: int, most_columns: int) -> Forest:
    """The texts that are read or were found most, in the order in which they were computed, in at most so many rows."""
    parent = snapshot.parent
    cached = np.flatnonzero(parent >= ROOT)
    # Siblings stand behind each other, those that were computed first in front.
    cached = cached[np.lexsort((cached, snapshot.computed_for[cached], parent[cached]))]
    parents = parent[cached]
    num_roots = int(np.searchsorted(parents, 0))
    roots = cached[:num_roots]
    wanted = np.lexsort((-snapshot.computed_for[roots], -snapshot.num_hits[roots], snapshot.ref_count[roots] == 0))
    forest: list[tuple[int, list[Branch]]] = []
    rows = 0
    for root in roots[wanted].tolist():
        branches = _branches(root, cached, parents, most_rows - rows - 1, most_columns)
        if not branches:
            break
        forest.append((root, branches))
        rows += 1 + len(branches)
    order = {root: place for place, root in enumerate(roots.tolist())}
    return _stack(sorted(forest, key=lambda entry: order[entry[0]]), len(cached))


def _branches(root: int, cached: np.ndarray, parents: np.ndarray, most: int, most_columns: int) -> list[Branch]:
    """The rows of one text, counted from 0; what parts last stands nearest."""
    branches: list[Branch] = []
    todo = [(root, 0, -1)]
    while todo and len(branches) < most:
        block, column, parent_row = todo.pop()
        row, blocks, goes_on = len(branches), [block], False
        while True:
            first, last = np.searchsorted(parents, [blocks[-1], blocks[-1] + 1])
            if first == last:
                break
            if column + len(blocks) >= most_columns:
                goes_on = True
                break
            todo += [(int(cached[i]), column + len(blocks), row) for i in range(last - 1, first, -1)]
            blocks.append(int(cached[first]))
        branches.append(Branch(row, column, blocks, parent_row, goes_on))
    return branches


def _stack(forest: list[tuple[int, list[Branch]]], num_cached: int) -> Forest:
    """One text below the other, each under a heading."""
    branches, headings, row = [], {}, 0
    for root, own in forest:
        headings[row] = root
        first = row + 1
        for branch in own:
            parent_row = branch.parent_row + first if branch.parent_row >= 0 else -1
            branches.append(branch._replace(row=branch.row + first, parent_row=parent_row))
        row = first + len(own)
    return Forest(branches, headings, row, num_cached - sum(len(branch.blocks) for branch in branches))
