"""Where the blocks of the tables and of the tree are in the pool: the pool map, small and without words in its cells."""

from __future__ import annotations

from ..theme import LIGHT, Theme
from .block_map import BlockMap


class PoolInset(BlockMap):
    title = "Where they are in the pool"
    is_inset = True
    widest_cell = 24  # px

    def svg(self, theme: Theme = LIGHT) -> str:
        """None of its own: a saved copy shows the pool once."""
        return ""
