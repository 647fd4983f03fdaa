"""A pool map that tells reserved memory apart: what is taken and not written, and what is of no use to anybody.

    dots     a block of a reservation that its request may still write
    crosses  a block beyond what was asked for (a run is rounded up), or a free one while the head of the line waits for a
             longer run than there is

For pools whose blocks are drawn as cells; the baselines of `kvscope.engine.kvcache.contiguous` show themselves here.
"""

from __future__ import annotations

import numpy as np
from bokeh.core.property.vectorization import value
from kvscope.engine.events import Cause

from ..theme import LIGHT, OWNER_HUES, Theme
from .base import Frame, at, by_code, empty_source, relook, replace_if_changed
from .block_cells import CellGrid, hatch_lines, square
from .block_map import BlockMap

_DOT_ROWS = (0.22, 0.36, 0.5, 0.64, 0.78)  # of a cell
_NOBODY = len(OWNER_HUES)


class ReservedMap(BlockMap):
    """`name` and `sentence` stand over it."""

    def __init__(self, theme: Theme = LIGHT, *, name: str = BlockMap.title, sentence: str = "", **callbacks):
        self.title, self._sentence = name, sentence
        super().__init__(theme, **callbacks)

    def summary(self) -> str:
        return f"{self._sentence} {super().summary()}".strip()

    def _show_pool(self, num_blocks: int) -> None:
        super()._show_pool(num_blocks)
        self.reserved, self.gaps = (
            empty_source("x", "y", "hue", "dim"),
            empty_source("x", "y", "hue", "dim", "xs", "ys"),
        )
        self.sources |= {"reserved": self.reserved, "gaps": self.gaps}
        if not isinstance(self._grid, CellGrid):
            return
        fig, gap = self.figure, self._grid.gap
        self._hue = by_code("hue", [*OWNER_HUES, self.theme.line2])
        self._strength = by_code("dim", (1.0, self.theme.dim_alpha))
        box = {
            **square(gap, 1 - gap),
            "line_color": self._hue,
            "line_alpha": self._strength,
            "line_width": 2,
            "border_radius": 4,
        }
        self._faces = [fig.quad(**box, source=source) for source in (self.reserved, self.gaps)]
        self._dots = [
            fig.segment(
                at("x", 0.16), at("y", row), at("x", 0.9), at("y", row), source=self.reserved, line_cap="round",
                line_dash=value([0, 5]), line_dash_offset=offset, line_alpha=self._strength,
            )
            for row, offset in zip(_DOT_ROWS, (0, 2, 0, 2, 0), strict=True)
        ]  # fmt: skip
        self._crosses = fig.multi_line("xs", "ys", source=self.gaps, line_width=1.5, line_alpha=self._strength)
        self._paint_reserved()

    def _paint_reserved(self) -> None:
        if not isinstance(self._grid, CellGrid):
            return
        relook(self._hue, [*OWNER_HUES, self.theme.line2])
        relook(self._strength, (1.0, self.theme.dim_alpha))
        for face in self._faces:
            face.glyph.fill_color = self.theme.panel
        for dots in self._dots:
            dots.glyph.line_color, dots.glyph.line_width = self.theme.waste, 2.4 * self.theme.scale
        self._crosses.glyph.line_color = self.theme.warn

    def restyle(self, theme: Theme) -> None:
        super().restyle(theme)
        self._paint_reserved()

    def update(self, frame: Frame) -> None:
        super().update(frame)
        if isinstance(self._grid, CellGrid):
            reserved, gaps = unused_blocks(frame)
            replace_if_changed(self.reserved, self._rows(frame, reserved))
            rows = self._rows(frame, gaps)
            if any(list(self.gaps.data[name]) != rows[name] for name in rows):
                self.gaps.data = rows | self._lines(gaps)

    def _rows(self, frame: Frame, blocks: dict[int, int]) -> dict[str, list]:
        """`blocks`: id to index of the owner, −1 nobody."""
        ids, lit = list(blocks), frame.lit_blocks
        slots = frame.owner_slots
        return {
            "x": self._grid.x[ids].tolist(),
            "y": self._grid.y[ids].tolist(),
            "hue": [_NOBODY if owner < 0 else int(slots[owner]) % len(OWNER_HUES) for owner in blocks.values()],
            "dim": [int(lit is not None and not lit[block]) for block in ids],
        }

    def _lines(self, blocks: dict[int, int]) -> dict[str, list]:
        xs, ys = [], []
        lines = np.array(hatch_lines(5, 0.1, 0.9))
        nan = np.full(len(lines), np.nan)
        across = np.column_stack([lines[:, 0], lines[:, 2], nan]).ravel()
        down = np.column_stack([lines[:, 1], lines[:, 3], nan]).ravel()
        both = np.concatenate([across, across]), np.concatenate([down, 1 - down])
        for block in blocks:
            xs.append((self._grid.x[block] + both[0]).astype(np.float32))
            ys.append((self._grid.y[block] + both[1]).astype(np.float32))
        return {"xs": xs, "ys": ys}


def unused_blocks(frame: Frame) -> tuple[dict[int, int], dict[int, int]]:
    """(reserved and unwritten, of no use to anybody): block id to the index of its request in the snapshot, −1 nobody's.
    Empty where nothing is reserved."""
    snapshot = frame.snapshot
    reserved: dict[int, int] = {}
    gaps: dict[int, int] = {}
    size = snapshot.block_size
    for index, request in enumerate(snapshot.requests):
        if not request.num_reserved_tokens:
            continue
        seats = 1 if request.num_output_tokens else request.num_samples  # runs that have yet to be given to samples
        for table in request.block_tables:
            run = max(1, len(table) // seats)
            for logical in np.flatnonzero((snapshot.filled[table] == 0) & (table > 0)).tolist():
                asked_for = logical % run * size < request.num_reserved_tokens
                (reserved if asked_for else gaps)[int(table[logical])] = index
    is_contiguous = any(request.num_reserved_tokens for request in snapshot.requests)
    if is_contiguous and any(r.blocked_cause == Cause.NO_FREE_BLOCK for r in snapshot.requests):
        free = np.flatnonzero(snapshot.ref_count == 0)
        gaps |= {block: -1 for block in free.tolist() if block}
    return reserved, gaps


def unused_svg(theme: Theme) -> tuple[str, str]:
    """The two glyphs for a legend, 22 px each at (1, 1)."""
    box = (
        f'x="1.5" y="1.5" width="21" height="21" rx="4" fill="{theme.panel}" stroke="{theme.line2}" stroke-width="1.6"'
    )
    dots = "".join(
        f'<circle cx="{4.6 + 4.6 * i + (j % 2) * 2.3:.3g}" cy="{5 + 4.6 * j:.3g}" r="1.25" fill="{theme.waste}"/>'
        for j in range(4)
        for i in range(4 - j % 2)
    )
    lines = "".join(
        f'<path d="M{x0 * 22 + 1:.3g} {y0 * 22 + 1:.3g}L{x1 * 22 + 1:.3g} {y1 * 22 + 1:.3g}M{x0 * 22 + 1:.3g} '
        f'{23 - y0 * 22:.3g}L{x1 * 22 + 1:.3g} {23 - y1 * 22:.3g}" stroke="{theme.warn}" stroke-width="1.4"/>'
        for x0, y0, x1, y1 in hatch_lines(5, 0.08, 0.92)
    )
    return f"<rect {box}/>{dots}", f"<rect {box}/>{lines}"
