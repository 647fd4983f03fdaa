"""Cells of the pool map up to 4,096 blocks: faces, hatches, feet, owner strips, labels and the selection ring.

Cell (column, row) covers the unit square at (id mod columns, id div columns), y growing downwards. Two sources hold
one row a block: `cells` (everything that may change by a patch of a few rows) and `hatch` (one multi-line a block, of
which only the alpha changes). `strips` and `chosen` hold a few rows and are replaced when they differ. Hatches are
lines and dots are dotted lines, never fill patterns: those freeze a software-rendered page.
"""

from __future__ import annotations

import numpy as np
from bokeh.core.property.vectorization import value
from bokeh.models import ColumnDataSource, LinearColorMapper
from bokeh.plotting import figure
from kvscope.engine.snapshot import BlockState

from ..theme import OWNER_HUES, Theme
from . import glyph
from .base import Frame, Rows, empty_source, font, replace_if_changed

GAP = 0.085  # between cells, in cells
_IDLE_STEPS, _IDLE_LEVELS = 60, 6  # a hatch pales over 60 idle steps, in 6 levels
_STRIP = 8  # owner hues on a shared block
_FONTS = (15.5, 14, 13, 11.5)  # px by label length: up to 2, 3, 4, more
_UPPER, _MIDDLE = 0.42, 0.5  # label heights: above the foot, and in the middle of a cell without one
_LABEL_HEIGHT = np.array([_MIDDLE, _MIDDLE, _UPPER, _UPPER, _MIDDLE, _UPPER])


def hatch_lines(count: int, low: float, high: float) -> list[tuple[float, float, float, float]]:
    """`count` lines at 45° (x0, y0, x1, y1) clipped to the square from `low` to `high`."""
    side = high - low
    lines = []
    for offset in (np.arange(count) + 0.5) * 2 * side / count:
        near, far = max(0.0, offset - side), min(side, offset)
        lines.append((low + near, low + offset - near, low + far, low + offset - far))
    return lines


class CellGrid:
    """Draws blocks of a frame into `fig`; `columns` cells a row, with labels where the cells are large enough."""

    def __init__(self, fig: figure, theme: Theme, num_blocks: int, columns: int, *, labelled: bool):
        self.fig, self.theme, self.labelled = fig, theme, labelled
        self.num_blocks, self.columns = num_blocks, columns
        self.label = "owner"
        self._names: dict[int, str] = {}
        self._readers_drawn: tuple | None = None
        self._size_codes = np.zeros(num_blocks, np.int64)
        ids = np.arange(num_blocks)
        self.x, self.y = (ids % columns).astype(float), (ids // columns).astype(float)
        gap = GAP / 2 if labelled else 0.07
        self.left, self.right = self.x + gap, self.x + 1 - gap
        self.top, self.bottom = self.y + gap, self.y + 1 - gap
        self.cells = ColumnDataSource(self._cells())
        self.hatch = ColumnDataSource(self._hatch(7 if labelled else 3, gap))
        self.strips = empty_source("left", "right", "y", "hue", "alpha")
        self.chosen = empty_source("left", "right", "top", "bottom")
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
        foot = self.top + (self.bottom - self.top) * (1 - glyph.FOOT)
        third = (self.bottom - foot) / 3
        data = {
            "left": self.left, "right": self.right, "top": self.top, "bottom": self.bottom, "middle": (self.x + 0.5).tolist(),
            "foot": foot, "dots1": foot + third, "dots2": foot + 2 * third, "unwritten": [float("nan")] * n,
            "face": [self.theme.free] * n, "outline": [self.theme.free_line] * n, "width": [1.0] * n, "alpha": [1.0] * n,
        }  # fmt: skip
        if self.labelled:
            data |= {
                "label": [""] * n, "ink": [self.theme.ink] * n, "size": [self.theme.font(_FONTS[0])] * n,
                "baseline": (self.y + _MIDDLE).tolist(), "bar_x": self.left + 0.085, "bar_top": self.top + 0.1,
                "bar_bottom": self.top + 0.6, "bar": [0.0] * n, "block": np.arange(n), "state": [""] * n,
                "generation": [0] * n, "readers": [""] * n, "ref_count": [0] * n, "filled": [0] * n,
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

    # -- renderers, from the bottom up: faces, hatch, feet, outlines, strips, (arrows), labels, ring ----------------

    def _draw_under(self) -> None:
        fig, radius = self.fig, glyph.RADIUS if self.labelled else 2
        box = {"left": "left", "right": "right", "top": "top", "bottom": "bottom", "source": self.cells}
        self.faces = fig.quad(**box, fill_color="face", fill_alpha="alpha", line_color=None, border_radius=radius)
        self.hatching = fig.multi_line(
            "xs", "ys", source=self.hatch, line_alpha="alpha", line_width=2.2 if self.labelled else 1.4
        )
        corner = {"bottom_right": radius, "bottom_left": 0, "top_left": 0, "top_right": 0}
        self.feet = fig.quad(
            left="unwritten", right="right", top="foot", bottom="bottom", source=self.cells, fill_alpha="alpha",
            line_color=None, border_radius=corner,
        )  # fmt: skip
        dots = {"x0": "unwritten", "x1": "right", "source": self.cells, "line_alpha": "alpha", "line_cap": "round"}
        self.dots = [
            fig.segment(**dots, y0=y, y1=y, line_dash=value([0, 5]), line_dash_offset=offset)
            for y, offset in (("dots1", 4), ("dots2", 1))
        ]
        self.outlines = fig.quad(
            **box, fill_color=None, line_color="outline", line_alpha="alpha", line_width="width", border_radius=radius
        )
        mapper = LinearColorMapper(palette=list(OWNER_HUES), low=0, high=len(OWNER_HUES) - 1)
        self.strip_bars = fig.hbar(
            y="y", height=0.115, left="left", right="right", source=self.strips, fill_alpha="alpha", line_color=None,
            fill_color={"field": "hue", "transform": mapper},
        )  # fmt: skip
        self.pinned = fig.patches("xs", "ys", source=self.corners, line_color=None, fill_alpha="alpha")
        if self.labelled:
            self.bars = fig.segment("bar_x", "bar_top", "bar_x", "bar_bottom", source=self.cells, line_alpha="bar")

    def draw_over(self) -> None:
        """Labels and the selection ring: above what the caller drew on the faces (copy arrows)."""
        ring = {"left": "left", "right": "right", "top": "top", "bottom": "bottom", "source": self.chosen}
        self.ring_halo = self.fig.quad(**ring, fill_color=None, line_width=5.5, border_radius=7)
        self.ring = self.fig.quad(**ring, fill_color=None, line_width=3.2, border_radius=7)
        if self.labelled:
            self.texts = self.fig.text(
                "middle", "baseline", text="label", source=self.cells, text_color="ink", text_alpha="alpha",
                text_font_size="size", text_align="center", text_baseline="middle", text_font_style="bold",
                text_font=font(),
            )  # fmt: skip
        self.paint(self.theme)

    def paint(self, theme: Theme) -> None:
        """Colours and widths that are the same for all rows; what differs by row is sent by the next update."""
        self.theme = theme
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
        self._readers_drawn = None
        self.rows.forget()
        self.hatch_rows.forget()

    # -- one frame --------------------------------------------------------------------------------------------------

    def update(self, frame: Frame, *, by_state: bool) -> None:
        snapshot, theme, rows = frame.snapshot, self.theme, self.rows
        state = snapshot.block_state
        lit = frame.lit_blocks
        dimmed = np.zeros(self.num_blocks, np.int64) if lit is None else (~lit).astype(np.int64)
        strength = (1.0, theme.dim_alpha)
        rows.set("face", glyph.face_codes(frame, by_state=by_state), glyph.face_palette(theme))
        rows.set("outline", state, glyph.outline_palette(theme))
        rows.set("width", (state == BlockState.PINNED).astype(np.int8), (1.0, 1.6))
        in_flight = state == BlockState.IN_FLIGHT
        rows.set("alpha", dimmed + 2 * in_flight, (*strength, 0.5, theme.dim_alpha / 2))
        written = np.where((state >= BlockState.ACTIVE) & (state != BlockState.PINNED), snapshot.filled, 0)
        rows.set(
            "unwritten",
            np.where((written > 0) & (written < snapshot.block_size), written, -1),
            self._unwritten(snapshot.block_size),
        )
        if self.labelled:
            self._update_labels(frame, dimmed, written)
        rows.flush()
        idle = np.clip((snapshot.step - snapshot.last_used_step) * _IDLE_LEVELS // _IDLE_STEPS, 0, _IDLE_LEVELS)
        hatch = np.where(state == BlockState.CACHED, 1 + idle + dimmed * (_IDLE_LEVELS + 1), 0)
        levels = [round(a * (1 - 0.65 * i / _IDLE_LEVELS), 2) for a in strength for i in range(_IDLE_LEVELS + 1)]
        self.hatch_rows.set("alpha", hatch, (0.0, *levels))
        self.hatch_rows.flush()
        self._update_strips(frame, lit)
        self._update_few(frame, lit)

    def _unwritten(self, block_size: int):
        """Left edge of the unwritten part of the foot; NaN hides it."""

        def encode(rows: np.ndarray, written: np.ndarray) -> list[float]:
            left, right = self.left[rows], self.right[rows]
            return np.where(written < 0, np.nan, left + (right - left) * written / block_size).round(3).tolist()

        return encode

    def _update_labels(self, frame: Frame, dimmed: np.ndarray, written: np.ndarray) -> None:
        snapshot, theme, rows = frame.snapshot, self.theme, self.rows
        state = snapshot.block_state
        names = dict(zip(glyph.sequence_codes(frame).tolist(), frame.labels, strict=True))

        def text(changed: np.ndarray, codes: np.ndarray) -> list[str]:
            words = [glyph.label_text(code, self.label, names) for code in codes.tolist()]
            self._size_codes[changed] = [min(max(len(word) - 2, 0), len(_FONTS) - 1) for word in words]
            return words

        rows.set("label", glyph.label_codes(frame, self.label), text)
        rows.set("size", self._size_codes, [theme.font(size) for size in _FONTS])
        rows.set("ink", state, glyph.label_palette(theme))
        height = (_LABEL_HEIGHT[state] * 100).astype(np.int64)
        rows.set("baseline", height, lambda changed, codes: (self.y[changed] + codes / 100).round(2).tolist())
        bar = glyph.barred(frame)
        rows.set("bar", bar * (1 + dimmed), (0.0, 1.0, theme.dim_alpha))
        rows.set(
            "middle",
            bar.astype(np.int8),
            lambda changed, codes: (self.x[changed] + 0.5 + 0.05 * codes).round(2).tolist(),
        )
        rows.set("state", state, glyph.STATE_WORDS)
        rows.set("generation", snapshot.generation)
        rows.set("ref_count", snapshot.ref_count)
        rows.set("filled", np.where(state == BlockState.CACHED, snapshot.filled, written))
        rows.set(
            "readers",
            self._reader_codes(frame),
            lambda changed, codes: [readers_text(frame, b) for b in changed.tolist()],
        )

    @staticmethod
    def _reader_codes(frame: Frame) -> np.ndarray:
        """A number that changes when the readers of a block, or the last use of a cached one, change."""
        snapshot = frame.snapshot
        return np.where(snapshot.block_state == BlockState.CACHED, -1 - snapshot.last_used_step, frame.reader_codes)

    def _update_strips(self, frame: Frame, lit: np.ndarray | None) -> None:
        snapshot = frame.snapshot
        shared = np.flatnonzero(snapshot.block_state == BlockState.SHARED)
        drawn = (shared.tolist(), frame.reader_codes[shared].tolist(), None if lit is None else lit[shared].tolist())
        if drawn == self._readers_drawn or not self.labelled:
            return
        self._readers_drawn = drawn
        left, right, y, hue, alpha = [], [], [], [], []
        for block in shared.tolist():
            hues = list(dict.fromkeys((frame.owner_slots[frame.readers(block)] % len(OWNER_HUES)).tolist()))[:_STRIP]
            inner = self.left[block] + 0.1
            width = (self.right[block] - 0.1 - inner) / max(1, len(hues))
            left.extend(inner + i * width for i in range(len(hues)))
            right.extend(inner + (i + 1) * width - 0.02 for i in range(len(hues)))
            y.extend([self.top[block] + 0.125] * len(hues))
            hue.extend(hues)
            alpha.extend([1.0 if lit is None or lit[block] else self.theme.dim_alpha] * len(hues))
        numbers = {"left": left, "right": right, "y": y, "alpha": alpha}
        self.strips.data = {k: np.array(v, np.float32) for k, v in numbers.items()} | {"hue": np.array(hue, np.uint8)}

    def _update_few(self, frame: Frame, lit: np.ndarray | None) -> None:
        """The ring around chosen blocks and the corner of pinned ones."""
        chosen = frame.selected_blocks
        replace_if_changed(
            self.chosen, {name: getattr(self, name)[chosen] for name in ("left", "right", "top", "bottom")}
        )
        pinned = np.flatnonzero(frame.snapshot.block_state == BlockState.PINNED).tolist()
        corner = {
            "xs": [[round(self.left[b] + d, 3) for d in (0.02, 0.3, 0.02)] for b in pinned],
            "ys": [[round(self.top[b] + d, 3) for d in (0.02, 0.02, 0.3)] for b in pinned],
            "alpha": [1.0 if lit is None or lit[b] else self.theme.dim_alpha for b in pinned],
        }
        replace_if_changed(self.corners, corner)


def readers_text(frame: Frame, block: int) -> str:
    """Who reads a block, for the hover."""
    snapshot = frame.snapshot
    if snapshot.block_state[block] == BlockState.CACHED:
        return f"nobody; last used at step {snapshot.last_used_step[block]}"
    names = [frame.labels[i] for i in frame.readers(block)[:9].tolist()]
    return ", ".join(names[:8]) + (", …" if len(names) > 8 else "") if names else "nobody"
