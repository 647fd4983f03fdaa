"""Cells of the pool map up to 4,096 blocks: faces, hatches, feet, owner strips, labels and the selection ring.

Cell (column, row) covers the unit square at (id mod columns, id div columns), y growing downwards. Two sources hold
one row a block: `cells` (everything that may change by a patch of a few rows) and `hatch` (one multi-line a block, of
which only the alpha changes). `strips` and `chosen` hold a few rows and are replaced when they differ. Hatches are
lines and dots are dotted lines, never fill patterns: those freeze a software-rendered page.
"""

from __future__ import annotations

import numpy as np
from bokeh.core.property.vectorization import value
from bokeh.models import ColumnDataSource
from bokeh.plotting import figure
from kvscope.engine.snapshot import BlockState

from ..theme import OWNER_HUES, Theme
from . import glyph
from .base import Frame, Rows, Whose, at, by_code, empty_source, font, relook, replace_if_changed

GAP = 0.085  # between cells, in cells
_IDLE_STEPS, _IDLE_LEVELS = 60, 6  # a hatch pales over 60 idle steps, in 6 levels
DIMMED = {"dim": 1, "alpha": _IDLE_LEVELS + 1, "code": len(OWNER_HUES)}  # what dimming adds to a code, by column
_STRIP = 8  # owner hues on a shared block
_FONTS = (15.5, 14, 13, 11.5)  # px by label length: up to 2, 3, 4, more


def hatch_lines(count: int, low: float, high: float) -> list[tuple[float, float, float, float]]:
    """`count` lines at 45° (x0, y0, x1, y1) clipped to the square from `low` to `high`."""
    side = high - low
    lines = []
    for offset in (np.arange(count) + 0.5) * 2 * side / count:
        near, far = max(0.0, offset - side), min(side, offset)
        lines.append((low + near, low + offset - near, low + far, low + offset - far))
    return lines


def square(near: float, far: float) -> dict:
    """Sides of the square from `near` to `far` inside each cell."""
    return {"left": at("x", near), "right": at("x", far), "top": at("y", near), "bottom": at("y", far)}


class CellGrid:
    """Draws blocks of a frame into `fig`; `columns` cells a row, with labels where the cells are large enough. Cell i stands
    for block `ids[i]`, by default i; −1 for none: such a cell is not drawn."""

    def __init__(self, fig: figure, theme: Theme, num_blocks: int, columns: int, *, labelled: bool):
        self.fig, self.theme, self.labelled = fig, theme, labelled
        self.num_blocks, self.columns = num_blocks, columns
        self.ids = np.arange(num_blocks)
        self.label = "owner"
        self._readers_drawn: tuple | None = None
        self._few_drawn: tuple | None = None
        self._size_codes = np.zeros(num_blocks, np.int64)
        self.x, self.y = (self.ids % columns).astype(float), (self.ids // columns).astype(float)
        self.gap = GAP / 2 if labelled else 0.07
        self.cells = ColumnDataSource(self._cells())
        self.hatch = ColumnDataSource(self._hatch(7 if labelled else 3, self.gap))
        self.strips = empty_source("x", "y", "code", "count")
        self.chosen = empty_source("x", "y")
        self.corners = empty_source("xs", "ys", "alpha")
        self.rows, self.hatch_rows = Rows(self.cells), Rows(self.hatch)
        self._draw_under()

    @property
    def sources(self) -> dict[str, ColumnDataSource]:
        return {
            "cells": self.cells,
            "hatch": self.hatch,
            "strips": self.strips,
            "chosen": self.chosen,
            "corners": self.corners,
        }

    def _cells(self) -> dict:
        n = self.num_blocks
        data = {
            "x": self.x.tolist(), "y": self.y.tolist(), "unwritten": [float("nan")] * n, "face": [0] * n, "dim": [0] * n
        }  # fmt: skip
        if self.labelled:
            data |= {
                "label": [""] * n, "size": [self.theme.font(_FONTS[0])] * n, "bar": [0] * n, "block": list(range(n)),
                "generation": [0] * n, "about": [""] * n, "filled": [0] * n,
            }  # fmt: skip
        return data

    def _hatch(self, count: int, gap: float) -> dict:
        lines = np.array(hatch_lines(count, gap + 0.015, 1 - gap - 0.015))
        gaps = np.full(count, np.nan)
        across = np.column_stack([lines[:, 0], lines[:, 2], gaps]).ravel()
        down = np.column_stack([lines[:, 1], lines[:, 3], gaps]).ravel()
        xs = [(x + across).astype(np.float32) for x in self.x]
        ys = [(y + down).astype(np.float32) for y in self.y]
        return {"xs": xs, "ys": ys, "alpha": [0.0] * self.num_blocks}

    def show(self, ids: np.ndarray) -> None:
        """Let cells stand for these blocks from the next frame on."""
        self.ids = ids
        self.rows.set(
            "x", np.where(ids < 0, -1, self.x.astype(np.int64)), lambda _, x: np.where(x < 0, np.nan, x).tolist()
        )
        self.rows.set("block", ids)
        self._readers_drawn = self._few_drawn = None

    # -- renderers, from the bottom up: faces, hatch, feet, outlines, strips, (arrows), ring, labels -----------------

    def _draw_under(self) -> None:
        fig, theme, radius = self.fig, self.theme, glyph.RADIUS if self.labelled else 2
        self._face = by_code("face", glyph.face_palette(theme))
        self._outline = by_code("face", glyph.outline_palette(theme))
        self._ink = by_code("face", glyph.label_palette(theme))
        self._alpha = by_code("dim", dim_levels(theme))
        self._bar = by_code("bar", (0.0, 1.0, theme.dim_alpha))
        self._hatch_alpha = by_code("alpha", hatch_levels(theme))
        near, far = self.gap, 1 - self.gap
        foot = near + (far - near) * (1 - glyph.FOOT)
        box = {**square(near, far), "source": self.cells}
        self.faces = fig.quad(
            **box, fill_color=self._face, fill_alpha=self._alpha, line_color=None, border_radius=radius, name="cells"
        )
        self.hatching = fig.multi_line(
            "xs", "ys", source=self.hatch, line_alpha=self._hatch_alpha, line_width=2.2 if self.labelled else 1.4
        )
        corner = {"bottom_right": radius, "bottom_left": 0, "top_left": 0, "top_right": 0}
        self.feet = fig.quad(
            left="unwritten", right=at("x", far), top=at("y", foot), bottom=at("y", far), source=self.cells,
            fill_alpha=self._alpha, line_color=None, border_radius=corner,
        )  # fmt: skip
        dots = {
            "x0": "unwritten",
            "x1": at("x", far),
            "source": self.cells,
            "line_alpha": self._alpha,
            "line_cap": "round",
        }
        third = (far - foot) / 3
        self.dots = [
            fig.segment(**dots, y0=at("y", y), y1=at("y", y), line_dash=value([0, 5]), line_dash_offset=offset)
            for y, offset in ((foot + third, 4), (foot + 2 * third, 1))
        ]
        width = by_code("face", glyph.OUTLINE_WIDTH)
        self.outlines = fig.quad(
            **box,
            fill_color=None,
            line_color=self._outline,
            line_alpha=self._alpha,
            line_width=width,
            border_radius=radius,
        )
        self._strip = by_code("code", strip_palette(theme))
        wide = 1 - 2 * self.gap - 0.2
        self.strip_bars = fig.rect(
            "x", at("y", self.gap + 0.125), width=by_code("count", [wide / max(1, n) - 0.02 for n in range(_STRIP + 1)]),
            height=0.115, source=self.strips, fill_color=self._strip, line_color=None, name="strips",
        )  # fmt: skip
        self.pinned = fig.patches("xs", "ys", source=self.corners, line_color=None, fill_alpha="alpha")
        if self.labelled:
            bar = {
                "x0": at("x", near + 0.085),
                "y0": at("y", near + 0.1),
                "x1": at("x", near + 0.085),
                "y1": at("y", 0.65),
            }
            self.bars = fig.segment(**bar, source=self.cells, line_alpha=self._bar)

    def draw_over(self) -> None:
        """Labels and the selection ring: above what the caller drew on the faces (copy arrows)."""
        radius = 7 if self.labelled else 2
        ring = {**square(self.gap, 1 - self.gap), "source": self.chosen}
        self.ring_halo = self.fig.quad(
            **ring, fill_color=None, line_width=5.5 if self.labelled else 3, border_radius=radius
        )
        self.ring = self.fig.quad(
            **ring, fill_color=None, line_width=3.2 if self.labelled else 1.8, border_radius=radius, name="chosen"
        )
        if self.labelled:
            self.texts = self.fig.text(
                at("x", 0.5), at("y", 0.5), text="label", source=self.cells, text_color=self._ink, text_alpha=self._alpha,
                text_font_size="size", text_align="center", text_baseline="middle", text_font_style="bold",
                text_font=font(), x_offset=by_code("bar", (0, 2, 2)), y_offset=by_code("face", glyph.LABEL_RISE),
            )  # fmt: skip
        self.paint(self.theme)

    def paint(self, theme: Theme) -> None:
        """Another theme: what codes stand for, and the colours and widths that are the same for all rows."""
        self.theme = theme
        relook(self._face, glyph.face_palette(theme))
        relook(self._outline, glyph.outline_palette(theme))
        relook(self._ink, glyph.label_palette(theme))
        relook(self._alpha, dim_levels(theme))
        relook(self._bar, (0.0, 1.0, theme.dim_alpha))
        relook(self._strip, strip_palette(theme))
        relook(self._hatch_alpha, hatch_levels(theme))
        self.hatching.glyph.line_color = theme.hatch
        self.feet.glyph.fill_color = theme.panel
        self.pinned.glyph.fill_color = theme.ink
        for dots in self.dots:
            dots.glyph.line_color = theme.waste
            dots.glyph.line_width = 2.3 * theme.scale if self.labelled else 1.6
        if self.labelled:
            self.bars.glyph.line_color = glyph.ON_OWNER
            self.bars.glyph.line_width = 3 * theme.scale
        self.ring_halo.glyph.line_color = theme.panel
        self.ring.glyph.line_color = theme.accent
        self._readers_drawn = self._few_drawn = None
        self.rows.forget()
        self.hatch_rows.forget()

    def whose(self) -> dict[str, Whose]:
        blocks = self.ids.tolist()
        x, y = (np.asarray(self.strips.data[name], np.int64) for name in ("x", "y"))
        adds = {
            "cells": {"dim": DIMMED["dim"], "bar": 1} if self.labelled else {"dim": DIMMED["dim"]},
            "hatch": {"alpha": DIMMED["alpha"]},
        }
        ids = {name: Whose("block", blocks, codes) for name, codes in adds.items()}
        return ids | {"strips": Whose("block", (y * self.columns + x).tolist(), {"code": DIMMED["code"]})}

    # -- one frame --------------------------------------------------------------------------------------------------

    def update(self, frame: Frame, *, by_state: bool) -> None:
        snapshot, rows, ids = frame.snapshot, self.rows, self.ids
        state, lit = snapshot.block_state[ids], frame.lit_blocks
        dimmed = np.zeros(self.num_blocks, np.int8) if lit is None else (~lit[ids]).astype(np.int8)
        rows.set("face", glyph.face_codes(frame, by_state=by_state)[ids])
        rows.set("dim", dimmed + 2 * (state == BlockState.IN_FLIGHT))
        written = np.where((state >= BlockState.ACTIVE) & (state != BlockState.PINNED), snapshot.written[ids], 0)
        partly = (written > 0) & (written < snapshot.block_size) & (ids >= 0)
        rows.set("unwritten", np.where(partly, written, -1), self._unwritten(snapshot.block_size))
        if self.labelled:
            self._update_labels(frame, state, dimmed)
        rows.flush()
        used = snapshot.step - snapshot.last_used_step[ids]
        idle = np.clip(used * _IDLE_LEVELS // _IDLE_STEPS, 0, _IDLE_LEVELS)
        cached = (state == BlockState.CACHED) & (ids >= 0)
        self.hatch_rows.set("alpha", np.where(cached, 1 + idle + dimmed * DIMMED["alpha"], 0))
        self.hatch_rows.flush()
        self._update_strips(frame, state, lit)
        self._update_few(frame, state, lit)

    def _unwritten(self, block_size: int):
        """Left edge of the unwritten part of the foot; NaN hides it."""

        def encode(rows: np.ndarray, written: np.ndarray) -> list[float]:
            edge = self.x[rows] + self.gap + (1 - 2 * self.gap) * written / block_size
            return np.where(written < 0, np.nan, edge).round(3).tolist()

        return encode

    def _update_labels(self, frame: Frame, state: np.ndarray, dimmed: np.ndarray) -> None:
        snapshot, rows, ids = frame.snapshot, self.rows, self.ids

        def text(changed: np.ndarray, codes: np.ndarray) -> list[str]:
            names = dict(zip(glyph.sequence_codes(frame).tolist(), frame.labels, strict=True))
            words = [glyph.label_text(code, self.label, names) for code in codes.tolist()]
            self._size_codes[changed] = [min(max(len(word) - 2, 0), len(_FONTS) - 1) for word in words]
            return words

        rows.set("label", glyph.label_codes(frame, self.label)[ids], text)
        rows.set("size", self._size_codes, [self.theme.font(size) for size in _FONTS])
        rows.set("bar", glyph.barred(frame)[ids] * (1 + dimmed))
        rows.set("generation", snapshot.generation[ids])
        rows.set("filled", np.where(state == BlockState.EMPTY, 0, snapshot.filled[ids]))
        # A number that changes when the readers of a block, or the last use of a cached one, change.
        codes = np.where(state == BlockState.CACHED, -1 - snapshot.last_used_step[ids], frame.reader_codes[ids])
        rows.set("about", codes, lambda changed, _: [about(frame, b) for b in ids[changed].tolist()])

    def _update_strips(self, frame: Frame, state: np.ndarray, lit: np.ndarray | None) -> None:
        cells = np.flatnonzero((state == BlockState.SHARED) & (self.ids >= 0))
        shared = self.ids[cells]
        drawn = (shared.tolist(), frame.reader_codes[shared].tolist(), None if lit is None else lit[shared].tolist())
        if drawn == self._readers_drawn or not self.labelled:
            return
        self._readers_drawn = drawn
        x, y, codes, counts = [], [], [], []
        for cell, block in zip(cells.tolist(), shared.tolist(), strict=True):
            hues = list(dict.fromkeys((frame.owner_slots[frame.readers(block)] % len(OWNER_HUES)).tolist()))[:_STRIP]
            width = (1 - 2 * self.gap - 0.2) / max(1, len(hues))
            x.extend(self.x[cell] + self.gap + 0.1 + (i + 0.5) * width for i in range(len(hues)))
            y.extend([int(self.y[cell])] * len(hues))
            dimmed = lit is not None and not lit[block]
            codes.extend(hue + DIMMED["code"] * dimmed for hue in hues)
            counts.extend([len(hues)] * len(hues))
        small = {"y": y, "code": codes, "count": counts}
        self.strips.data = {"x": np.array(x, np.float32)} | {k: np.array(v, np.uint8) for k, v in small.items()}

    def _update_few(self, frame: Frame, state: np.ndarray, lit: np.ndarray | None) -> None:
        """The ring around chosen blocks and the corner of pinned ones."""
        chosen = np.flatnonzero(np.isin(self.ids, frame.selected_blocks))
        pinned = np.flatnonzero((state == BlockState.PINNED) & (self.ids >= 0)).tolist()
        drawn = (pinned, frame.selection, chosen.tolist())
        if drawn == self._few_drawn:
            return
        self._few_drawn = drawn
        replace_if_changed(self.chosen, {"x": self.x[chosen], "y": self.y[chosen]})
        corner = {
            "xs": [[round(self.x[b] + self.gap + d, 3) for d in (0.02, 0.3, 0.02)] for b in pinned],
            "ys": [[round(self.y[b] + self.gap + d, 3) for d in (0.02, 0.02, 0.3)] for b in pinned],
            "alpha": [1.0 if lit is None or lit[self.ids[b]] else self.theme.dim_alpha for b in pinned],
        }
        replace_if_changed(self.corners, corner)


def dim_levels(theme: Theme) -> tuple[float, ...]:
    """Strength of a cell: full, dimmed by a selection, in flight, both."""
    return (1.0, theme.dim_alpha, 0.5, theme.dim_alpha / 2)


def strip_palette(theme: Theme) -> list[str]:
    """Owner hues, and once more dimmed by a selection."""
    return [*OWNER_HUES, *(f"{hue}{round(255 * theme.dim_alpha):02X}" for hue in OWNER_HUES)]


def hatch_levels(theme: Theme) -> list[float]:
    """Strength of a hatch: none, by idle level, and by idle level when dimmed."""
    idle = [1 - 0.65 * level / _IDLE_LEVELS for level in range(_IDLE_LEVELS + 1)]
    return [0.0, *idle, *(a * theme.dim_alpha for a in idle)]


def about(frame: Frame, block: int) -> str:
    """Who reads a block, for the hover ("read by …")."""
    snapshot = frame.snapshot
    if snapshot.block_state[block] == BlockState.CACHED:
        return f"nobody since step {snapshot.last_used_step[block]}"
    readers = frame.readers(block)
    names = [frame.labels[i] for i in readers[:8].tolist()]
    return f"{', '.join(names)}{', …' if len(readers) > 8 else ''}" if names else "nobody"
