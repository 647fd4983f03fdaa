"""Chips of blocks in a grid: the block tables, the prefix tree, the eviction queue. Tall where neighbouring rows share one.

A chip is known by its block, its place and which of its runs it is, and keeps its row in the source for as long as it
lives; so a step sends the chips that changed. Rows of the source that no chip uses have no place and are not drawn.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from bokeh.core.property.vectorization import value
from bokeh.models import ColumnDataSource, Dodge, Stack
from bokeh.plotting import figure
from kvscope.engine.snapshot import BlockState

from ..theme import OWNER_HUES, Theme
from . import glyph
from .base import Frame, Rows, Whose, at, by_code, empty_source, font, relook, replace_if_changed
from .block_cells import dim_levels

SIDE = 0.94  # of a chip in its column
_SLOTS = 64  # the source grows by so many rows
_COLUMN = 1 << 32  # in the code of a foot: its column, then how much is written
_TALL = 1 << 40  # marks the label code of a tall chip
_HATCH_ALPHAS = (0.0, 1.0, 0.87, 0.74, 0.61, 0.48, 0.35)  # by `hatch_codes`
_HATCH = (  # of its face; the middle is left to the label
    (0.04, 0.46, 0.17, 0.02), (0.04, 0.97, 0.31, 0.02), (0.63, 0.97, 0.9, 0.02), (0.77, 0.97, 0.9, 0.5),
)  # fmt: skip


def below(shift: float) -> dict:
    """The lower end of a chip + `shift`: the sum is taken in the browser, so that a moved chip sends its row only."""
    return {"expr": Stack(fields=["y", "height"]), "transform": Dodge(value=shift)}


class ChipGrid:
    """Draws a grid of block ids [rows, columns] into `fig`, −1 where a row has no block; the null block may stand in it many
    times. Of its row a chip leaves `top` and `bottom` free, and writes at `middle`.
    `codes(frame)` gives what chips say, an integer a block, for `words`; by default the id. Blocks that are only
    cached are hatched, paler the longer they are idle, where `hatched`."""

    def __init__(
        self,
        fig: figure,
        theme: Theme,
        *,
        codes: Callable[[Frame], np.ndarray] | None = None,
        words: Callable[[int], str] = str,
        hatched: bool = False,
        top: float = 0.08,
        bottom: float = 0.09,
        middle: float = 0.43,
    ):
        self.fig, self.theme = fig, theme
        self._codes, self._words, self._hatched = codes, words, hatched
        self._top, self._bottom, self._middle = top, -bottom, round(100 * middle)
        self._slot: dict[tuple, int] = {}
        self._free: list[int] = []
        self.chips = ColumnDataSource({})
        self.strips = empty_source("x0", "x1", "y", "hue", "dim")
        self.chosen = empty_source("x", "y", "y1")
        self._rows = Rows(self.chips)
        self._same: tuple | None = None
        self._placed = (np.zeros(0, np.int64),) * 3  # of each chip its row in the source, its column and its block
        self._striped: list[int] = []  # block of each row of `strips`
        self._make_room(_SLOTS)
        self._rows.flush()
        self._draw()

    @property
    def sources(self) -> dict[str, ColumnDataSource]:
        return {"chips": self.chips, "strips": self.strips, "chosen": self.chosen}

    def whose(self) -> dict[str, Whose]:
        slots, _, block = self._placed
        ids = np.full(self._size, -1, np.int64)
        ids[slots] = block
        return {
            "chips": Whose("block", ids.tolist(), {"dim": 1, "bar": 1, "hatch": len(_HATCH_ALPHAS)}),
            "strips": Whose("block", self._striped, {"dim": 1}),
        }

    def _make_room(self, slots: int) -> None:
        nan = float("nan")
        self._size = slots
        self._rows.start({
            "x": [nan] * slots, "y": [0] * slots, "height": [1] * slots, "label_y": [0.5] * slots, "face": [0] * slots, "bar": [0] * slots,
            "dim": [0] * slots, "label": [""] * slots, "unwritten": [nan] * slots, **({"hatch": [0] * slots} if self._hatched else {}),
        })  # fmt: skip
        self._slot, self._free = {}, list(range(slots))

    def _draw(self) -> None:
        theme, fig = self.theme, self.fig
        self._face = by_code("face", glyph.face_palette(theme))
        self._outline = by_code("face", glyph.outline_palette(theme))
        self._ink = by_code("face", glyph.label_palette(theme))
        self._alphas = [by_code("dim", dim_levels(theme)) for _ in range(2)]
        self._bar = by_code("bar", (0.0, 1.0, theme.dim_alpha))
        alpha = self._alphas[0]
        chip = {"left": "x", "right": at("x", SIDE), "top": at("y", self._top), "bottom": below(self._bottom)}
        box = {**chip, "source": self.chips}
        fig.quad(**box, fill_color=self._face, fill_alpha=alpha, line_color=None, border_radius=4)
        if self._hatched:
            self._pale = by_code("hatch", _hatch_levels(theme))
            self._hatch = [
                fig.segment(
                    at("x", x0), at("y", self._inside(y0)), at("x", x1), at("y", self._inside(y1)), source=self.chips, line_alpha=self._pale,
                    line_width=1.3,
                )
                for x0, y0, x1, y1 in _HATCH
            ]  # fmt: skip
        self._feet = fig.quad(
            left="unwritten", right=at("x", SIDE), top=below(self._bottom - 0.25), bottom=below(self._bottom),
            source=self.chips, fill_alpha=alpha, line_color=None,
        )  # fmt: skip
        self._dots = [
            fig.segment(
                "unwritten", below(y), at("x", SIDE), below(y), source=self.chips, line_alpha=alpha,
                line_cap="round", line_dash=value([0, 5]), line_dash_offset=offset, line_width=2,
            )
            for y, offset in ((self._bottom - 0.17, 4), (self._bottom - 0.07, 1))
        ]  # fmt: skip
        fig.quad(**box, fill_color=None, line_color=self._outline, line_alpha=alpha, border_radius=4)
        fig.quad(
            left="x0", right="x1", top=at("y", 0.11), bottom=at("y", 0.23), source=self.strips, line_color=None,
            fill_color=by_code("hue", OWNER_HUES), fill_alpha=self._alphas[1],
        )  # fmt: skip
        bar = {"x0": at("x", 0.1), "x1": at("x", 0.1), "y0": at("y", 0.2), "y1": below(-0.4)}
        fig.segment(**bar, source=self.chips, line_color=glyph.ON_OWNER, line_alpha=self._bar, line_width=2.4)
        ring = {
            "left": at("x", -0.02),
            "right": at("x", SIDE + 0.02),
            "top": at("y", self._top - 0.04),
            "bottom": at("y1", self._bottom + 0.04),
        }
        self._ring = fig.quad(**ring, source=self.chosen, fill_color=None, line_width=3.2, border_radius=5)
        self._ids = fig.text(
            at("x", SIDE / 2), {"expr": Stack(fields=["y", "label_y"])}, text="label", source=self.chips, text_color=self._ink, text_alpha=alpha,
            text_font=font(), text_font_style="bold", text_align="center", text_baseline="middle", text_line_height=1.25,
            x_offset=by_code("bar", (0, 2, 2)),
        )  # fmt: skip

    def _inside(self, share: float) -> float:
        """A place in a chip, as a share of its height, in its row."""
        return self._top + share * (1 + self._bottom - self._top)

    def paint(self, theme: Theme) -> None:
        self.theme = theme
        relook(self._face, glyph.face_palette(theme))
        relook(self._outline, glyph.outline_palette(theme))
        relook(self._ink, glyph.label_palette(theme))
        for alpha in self._alphas:
            relook(alpha, dim_levels(theme))
        relook(self._bar, (0.0, 1.0, theme.dim_alpha))
        self._feet.glyph.fill_color = theme.panel
        for dots in self._dots:
            dots.glyph.line_color = theme.waste
        self._ring.glyph.line_color = theme.accent
        if self._hatched:
            relook(self._pale, _hatch_levels(theme))
            for lines in self._hatch:
                lines.glyph.line_color = theme.hatch
        self._rows.forget()
        self._same = None

    def show_ids(self, shown: bool, size: float) -> None:
        """Whether chips are wide enough for their ids, and how large those are, px."""
        self._ids.visible = shown
        self._ids.glyph.text_font_size = self.theme.font(size)

    def update(self, frame: Frame, grid: np.ndarray) -> None:
        snapshot = frame.snapshot
        shared = np.flatnonzero(snapshot.ref_count > 1)
        same = (
            grid.shape,
            grid.tobytes(),
            frame.reader_codes[shared].tobytes(),
            frame.owner_slots.tobytes(),
            frame.selection,
            snapshot.eviction_order.tobytes() if self._hatched else b"",
            snapshot.step // 10 if self._hatched else 0,  # idle steps pale slowly
        )
        if same != self._same:
            self._same = same
            self._lay_out(frame, grid)
        slots, column, block = self._placed
        filled = snapshot.written[block]
        partly = (filled > 0) & (filled < snapshot.block_size)
        edge = np.full(self._size, -1, np.int64)
        edge[slots] = np.where(partly, column * _COLUMN + filled, -1)
        self._rows.set("unwritten", edge, _edges(snapshot.block_size))
        self._rows.flush()

    def _lay_out(self, frame: Frame, grid: np.ndarray) -> None:
        """Everything but the feet: where chips are, what they say, and who owns them."""
        ref = frame.snapshot.ref_count
        row, column, height = vertical_runs(grid)
        block = grid[row, column]
        slots = self._slots_of(block, column)
        self._placed = slots, column, block
        lit = frame.lit_blocks
        dim = np.zeros(len(block), np.int64) if lit is None else (~lit[block]).astype(np.int64)
        tall = height > 1
        columns: dict[str, tuple[np.ndarray, int, object]] = {
            "x": (column, -1, lambda _, codes: [float("nan") if c < 0 else c for c in codes.tolist()]),
            "y": (row, 0, None),
            "height": (height, 0, None),
            "label_y": (np.where(tall, 50 * height, self._middle), 0, lambda _, codes: (codes / 100).tolist()),
            "face": (glyph.face_codes(frame, by_state=False)[block], 0, None),
            "bar": ((glyph.barred(frame)[block] & (ref[block] == 1)) * (1 + dim), 0, None),
            "dim": (dim, 0, None),
            "label": (self._labels_of(frame, block, tall), -1, self._encode_labels),
        }
        if self._hatched:
            codes = hatch_codes(frame)[block]
            columns["hatch"] = (codes + len(_HATCH_ALPHAS) * dim * (codes > 0), 0, None)
        for name, (values, unused, encode) in columns.items():
            spread = np.full(self._size, unused, np.int64)
            spread[slots] = values
            self._rows.set(name, spread, encode)
        self._draw_strips(frame, row, column, block, dim)
        chosen = np.isin(block, frame.selected_blocks)
        replace_if_changed(self.chosen, {"x": column[chosen], "y": row[chosen], "y1": (row + height)[chosen]})

    def _labels_of(self, frame: Frame, block: np.ndarray, tall: np.ndarray) -> np.ndarray:
        if self._codes is not None:
            return self._codes(frame)[block]
        return np.where(tall, _TALL + block * 4096 + frame.snapshot.ref_count[block], block)

    def _encode_labels(self, rows: np.ndarray, codes: np.ndarray) -> list[str]:
        if self._codes is None:
            return _chip_labels(rows, codes)
        return ["" if code < 0 else self._words(code) for code in codes.tolist()]

    def _slots_of(self, block: np.ndarray, column: np.ndarray) -> np.ndarray:
        """A row of the source for each chip; a chip that was drawn before keeps its row."""
        if len(block) > self._size:
            self._make_room(-(-len(block) // _SLOTS) * _SLOTS)
        keys: list[tuple] = []
        seen: dict[tuple, int] = {}
        for key in zip(block.tolist(), column.tolist(), strict=True):
            again = seen[key] = seen.get(key, -1) + 1
            keys.append((*key, again))
        known = self._slot
        for gone in known.keys() - set(keys):
            self._free.append(known.pop(gone))
        for key in keys:
            if key not in known:
                known[key] = self._free.pop()
        return np.fromiter((known[key] for key in keys), np.int64, len(keys))

    def _draw_strips(self, frame: Frame, row, column, block, dim) -> None:
        x0, x1, y, hue, dims = [], [], [], [], []
        self._striped = []
        for i in np.flatnonzero(frame.snapshot.ref_count[block] > 1).tolist():
            slots = frame.owner_slots[frame.readers(block[i])] % len(OWNER_HUES)
            hues = list(dict.fromkeys(slots.tolist()))[:8]
            width = (SIDE - 0.16) / max(1, len(hues))
            x0.extend(column[i] + 0.08 + k * width for k in range(len(hues)))
            x1.extend(column[i] + 0.06 + (k + 1) * width for k in range(len(hues)))
            y.extend([row[i]] * len(hues))
            hue.extend(hues)
            self._striped.extend([int(block[i])] * len(hues))
            dims.extend([dim[i]] * len(hues))
        replace_if_changed(self.strips, {
            "x0": np.array(x0, np.float32), "x1": np.array(x1, np.float32), "y": np.array(y, np.uint8),
            "hue": np.array(hue, np.uint8), "dim": np.array(dims, np.uint8),
        })  # fmt: skip


def _hatch_levels(theme: Theme) -> list[float]:
    """Strength of a hatch by its code, and once more dimmed by a selection."""
    return [*_HATCH_ALPHAS, *(alpha * theme.dim_alpha for alpha in _HATCH_ALPHAS)]


def hatch_codes(frame: Frame) -> np.ndarray:
    """0 for a block with a reader, else 1 and more for a cached one, the longer idle the higher: int64 [num_blocks]."""
    snapshot = frame.snapshot
    idle = (snapshot.step - snapshot.last_used_step).astype(np.int64)
    levels = len(_HATCH_ALPHAS) - 1
    return np.where(snapshot.block_state == BlockState.CACHED, 1 + np.clip(idle * levels // 60, 0, levels - 1), 0)


def vertical_runs(grid: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Runs of equal values down each column of `grid` [rows, columns], negative ones left out: (row, column, height). Zeros, the
    null block, are no run: it is nobody's memory."""
    if not grid.size:
        return (np.zeros(0, np.int64),) * 3
    flat = grid.T.ravel()
    starts = np.ones(len(flat), bool)
    starts[1:] = (flat[1:] != flat[:-1]) | (flat[1:] == 0)
    starts[:: grid.shape[0]] = True
    at_start = np.flatnonzero(starts)
    height = np.diff(np.append(at_start, len(flat)))
    keep = flat[at_start] >= 0
    column, row = np.divmod(at_start[keep], grid.shape[0])
    return row, column, height[keep]


def _chip_labels(_: np.ndarray, codes: np.ndarray) -> list[str]:
    """The physical id, and the reference count below it where a chip is tall."""
    words = []
    for code in codes.tolist():
        tall, rest = divmod(code, _TALL)
        words.append("" if code < 0 else f"{rest // 4096}\n×{rest % 4096}" if tall else str(rest) if rest else "null")
    return words


def _edges(block_size: int):
    def encode(_: np.ndarray, codes: np.ndarray) -> list[float]:
        column, filled = np.divmod(codes, _COLUMN)
        return np.where(codes < 0, np.nan, column + SIDE * filled / block_size).round(3).tolist()

    return encode
