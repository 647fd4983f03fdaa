"""What one step did to blocks: rings with a badge (taken, evicted then taken, copied on write) and copy arrows.

Marks belong to one step. While the engine is paused they stay; while it runs they fade within 0.7 s, or until a newer
step has marks of its own. Few rows, so each source is replaced when it differs.
"""

from __future__ import annotations

import math

import numpy as np
from kvscope.engine.events import Cause, EventKind
from kvscope.engine.snapshot import BlockState

from ..theme import Theme
from .base import Frame, empty_source, font, replace_if_changed
from .block_cells import CellGrid

FADE_SECONDS = 0.7
_FADE_LEVELS = 4
_HALF = 0.457  # half a cell without its gap
_MARKER = {"taken": "cross", "evicted": "x", "copied": "square", "locked": "y"}


def marks_of(events, step: int) -> dict[int, tuple[str, int]]:
    """Marks of one step: block id -> (mark, source block of a copy or −1)."""
    evicted, marks = set(), {}
    for event in events:
        if event.step != step or event.block_id < 0:
            continue
        if event.kind is EventKind.EVICTED and event.cause is not Cause.CACHE_RESET:
            evicted.add(event.block_id)
        elif event.kind is EventKind.ALLOCATED:
            marks[event.block_id] = ("evicted" if event.block_id in evicted else "taken", -1)
        elif event.kind is EventKind.COPIED:
            marks[event.block_id] = ("copied", int(event.numbers["source"]))
    return marks


class StepMarks:
    """Draws the marks of the newest marked step over a `CellGrid`."""

    def __init__(self, grid: CellGrid):
        self.grid = grid
        self.fades = True  # False where the reader asked for less motion
        self._step, self._born = -1, 0.0
        self._marks: dict[int, tuple[str, int]] = {}
        self.marks = empty_source(
            "left",
            "right",
            "top",
            "bottom",
            "colour",
            "dash",
            "alpha",
            "x",
            "y",
            "symbol",
            "cross",
            "front",
            "behind_x",
            "behind_y",
            "front_x",
            "front_y",
        )
        self.arrows = empty_source("x0", "y0", "x1", "y1", "cx0", "cy0", "cx1", "cy1", "angle", "alpha")
        self.halos = empty_source("x", "y", "text", "face", "size")

    @property
    def sources(self):
        return {"marks": self.marks, "arrows": self.arrows, "halos": self.halos}

    def draw_under(self) -> None:
        """Arrows, and a halo behind the labels that they cross."""
        fig = self.grid.fig
        curve = {k: k for k in ("x0", "y0", "x1", "y1", "cx0", "cy0", "cx1", "cy1")} | {"source": self.arrows}
        self._arrow_halo = fig.bezier(**curve, line_width=5, line_alpha="alpha")
        self._arrow = fig.bezier(**curve, line_width=2.2, line_alpha="alpha")
        self._tail = fig.scatter("x0", "y0", source=self.arrows, size=8, line_width=1.2, alpha="alpha")
        self._head = fig.scatter(
            "x1", "y1", source=self.arrows, size=11, marker="triangle", angle="angle", alpha="alpha"
        )
        self._halo = fig.text(
            "x", "y", text="text", source=self.halos, text_color="face", text_outline_color="face", text_font=font(),
            text_font_size="size", text_align="center", text_baseline="middle", text_font_style="bold",
        )  # fmt: skip

    def draw_over(self) -> None:
        """Rings and badges."""
        fig = self.grid.fig
        ring = {"left": "left", "right": "right", "top": "top", "bottom": "bottom", "source": self.marks}
        self._ring = fig.quad(
            **ring, fill_color=None, line_color="colour", line_alpha="alpha", line_dash="dash", border_radius=7
        )
        badge = {"source": self.marks, "alpha": "alpha"}
        self._rim = fig.scatter("x", "y", **badge, line_color=None)
        self._disc = fig.scatter("x", "y", **badge, color="colour", line_color=None)
        self._cross = fig.scatter("x", "y", **badge, marker="symbol", size="cross", fill_color=None)
        self._behind = fig.scatter("behind_x", "behind_y", **badge, marker="square", size="front", fill_color=None)
        self._front = fig.scatter("front_x", "front_y", **badge, marker="square", size="front", line_color=None)
        self.paint(self.grid.theme)

    def paint(self, theme: Theme) -> None:
        size = theme.px
        self._ring.glyph.line_width = 2.8
        self._rim.glyph.size, self._disc.glyph.size = size(17), size(15)
        self._cross.glyph.line_width = 2.1 * theme.scale
        self._behind.glyph.line_width = 1.5
        for part in (self._rim, self._front):
            part.glyph.fill_color = theme.panel
        for part in (self._cross, self._behind, self._arrow_halo, self._tail):
            part.glyph.line_color = theme.panel
        self._arrow.glyph.line_color = theme.ink
        self._tail.glyph.fill_color = self._head.glyph.fill_color = self._head.glyph.line_color = theme.ink
        self._halo.glyph.text_outline_width = 5

    # -- one frame --------------------------------------------------------------------------------------------------

    def update(self, frame: Frame) -> None:
        step = max((e.step for e in frame.events if e.kind is EventKind.ALLOCATED), default=-1)
        if step >= 0:
            self._step, self._born, self._marks = step, frame.now, marks_of(frame.events, step)
        elif frame.events and frame.snapshot.step != self._step and not frame.running:
            self._marks = {}
        self._draw(frame)

    def _draw(self, frame: Frame) -> None:
        state, lit = frame.snapshot.block_state, frame.lit_blocks
        alpha = 1.0
        if frame.running and self.fades:
            age = min(1.0, max(0.0, (frame.now - self._born) / FADE_SECONDS))
            alpha = 1 - math.floor(age * _FADE_LEVELS) / _FADE_LEVELS
        marks = dict(self._marks) if alpha > 0 else {}
        marks |= dict.fromkeys(np.flatnonzero(state == BlockState.IN_FLIGHT).tolist(), ("locked", -1))
        shown = {
            b: mark for b, mark in marks.items()
            if b < len(state) and state[b] >= BlockState.ACTIVE and (lit is None or lit[b])
        }  # fmt: skip
        self._draw_rings(shown, alpha)
        self._draw_arrows({b: source for b, (kind, source) in shown.items() if kind == "copied"}, alpha)

    def _draw_rings(self, shown: dict[int, tuple[str, int]], alpha: float) -> None:
        grid, theme = self.grid, self.grid.theme
        blocks, kinds = list(shown), [kind for kind, _ in shown.values()]
        edge, x, y = 0.045, grid.right[blocks] - 0.06, grid.top[blocks] + 0.06
        copied = [kind == "copied" for kind in kinds]
        replace_if_changed(self.marks, {
            "left": (grid.left[blocks] - edge).round(3).tolist(), "right": (grid.right[blocks] + edge).round(3).tolist(),
            "top": (grid.top[blocks] - edge).round(3).tolist(), "bottom": (grid.bottom[blocks] + edge).round(3).tolist(),
            "colour": [theme.warn if kind == "evicted" else theme.ink for kind in kinds],
            "dash": ["dashed" if kind == "evicted" else "solid" for kind in kinds],
            "alpha": [alpha] * len(blocks),
            "x": x.round(3).tolist(), "y": y.round(3).tolist(), "symbol": [_MARKER[kind] for kind in kinds],
            "cross": [0 if c else theme.px(8) for c in copied], "front": [theme.px(6) if c else 0 for c in copied],
            "behind_x": (x - 0.035).round(3).tolist(), "behind_y": (y - 0.035).round(3).tolist(),
            "front_x": (x + 0.03).round(3).tolist(), "front_y": (y + 0.03).round(3).tolist(),
        })  # fmt: skip

    def _draw_arrows(self, copies: dict[int, int], alpha: float) -> None:
        columns: dict[str, list] = {name: [] for name in self.arrows.data}
        crossed: set[int] = set()
        for copy, source in copies.items():
            if source >= self.grid.num_blocks:
                continue
            curve = self._curve(source, copy)
            for name, number in zip(columns, (*curve, alpha), strict=True):
                columns[name].append(round(number, 3))
            crossed |= self._cells_under(curve) | {copy, source}
        replace_if_changed(self.arrows, columns)
        cells, blocks = self.grid.cells.data, sorted(crossed)
        if self.grid.labelled:
            replace_if_changed(self.halos, {
                "x": self.grid.x[blocks] + 0.5, "y": [cells["baseline"][b] for b in blocks],
                "text": [cells["label"][b] for b in blocks], "face": [cells["face"][b] for b in blocks],
                "size": [cells["size"][b] for b in blocks],
            })  # fmt: skip

    def _curve(self, source: int, copy: int) -> tuple[float, ...]:
        """Cubic from the edge of the source to the edge of the copy, bent a little: x0 y0 x1 y1 cx0 cy0 cx1 cy1 angle."""
        grid = self.grid
        sx, sy, tx, ty = (float(a[b]) + 0.5 for b in (source, copy) for a in (grid.x, grid.y))
        mx, my = (sx + tx) / 2 - (ty - sy) * 0.2, (sy + ty) / 2 + (tx - sx) * 0.12

        def cut(x: float, y: float, distance: float) -> tuple[float, float]:
            dx, dy = mx - x, my - y
            reach = max(abs(dx), abs(dy)) or 1.0
            return x + dx / reach * distance, y + dy / reach * distance

        (x0, y0), (x1, y1) = cut(sx, sy, _HALF), cut(tx, ty, _HALF + 0.12)
        control = [x0 + (mx - x0) * 2 / 3, y0 + (my - y0) * 2 / 3, x1 + (mx - x1) * 2 / 3, y1 + (my - y1) * 2 / 3]
        return (x0, y0, x1, y1, *control, math.atan2(-(x1 - mx), -(y1 - my)))

    def _cells_under(self, curve: tuple[float, ...]) -> set[int]:
        x0, y0, x1, y1, cx0, cy0, cx1, cy1, _ = curve
        t = np.linspace(0, 1, 64)
        x = (1 - t) ** 3 * x0 + 3 * (1 - t) ** 2 * t * cx0 + 3 * (1 - t) * t**2 * cx1 + t**3 * x1
        y = (1 - t) ** 3 * y0 + 3 * (1 - t) ** 2 * t * cy0 + 3 * (1 - t) * t**2 * cy1 + t**3 * y1
        inside = (x >= 0) & (x < self.grid.columns) & (y >= 0)
        blocks = np.floor(y[inside]).astype(int) * self.grid.columns + np.floor(x[inside]).astype(int)
        return {int(b) for b in blocks if b < self.grid.num_blocks}
