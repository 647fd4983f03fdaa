"""What one step did to blocks: rings with a badge (taken, evicted then taken, copied on write) and copy arrows.

Marks belong to one step. While the engine is paused they stay; while it runs they fade within 0.7 s, or until a newer
step has marks of its own. Few rows, so each source is replaced when it differs.
"""

from __future__ import annotations

import math

import numpy as np
from bokeh.core.property.vectorization import value
from kvscope.engine.events import Cause, EventKind
from kvscope.engine.snapshot import BlockState

from ..theme import Theme
from .base import Frame, at, by_code, empty_source, font, relook, replace_if_changed
from .block_cells import CellGrid
from .glyph import LABEL_RISE, MARKS, face_palette

FADE_SECONDS = 0.7
_FADE_LEVELS = 4
_HALF = 0.457  # half a cell without its gap
_RING, _BADGE = 1.0, 0.4  # side of a ring, and how far its badge is from the middle of the cell, in cells
_HALO = ("label", "face", "size", "bar")
_SYMBOLS = {"taken": "cross", "evicted": "x", "locked": "y"}  # a copied block has two squares instead


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
        self.reset()
        self._drawn: tuple[dict, float] = ({}, 1.0)
        self.marks = empty_source("x", "y", "kind", "alpha")
        self.arrows = empty_source("x0", "y0", "x1", "y1", "cx0", "cy0", "cx1", "cy1", "angle", "alpha")
        self.halos = empty_source(*_HALO, "x", "y")

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
        self._halo_face = by_code("face", face_palette(self.grid.theme))
        self._halo = fig.text(
            at("x", 0.5), at("y", 0.5), text="label", source=self.halos, text_color=self._halo_face,
            text_outline_color=self._halo_face, text_font=font(),
            text_font_size="size", text_align="center", text_baseline="middle", text_font_style="bold",
            x_offset=by_code("bar", (0, 2, 2)), y_offset=by_code("face", LABEL_RISE),
        )  # fmt: skip

    def draw_over(self) -> None:
        """Rings and badges; which colour and symbol follows from the kind of a mark."""
        fig, theme = self.grid.fig, self.grid.theme
        self._solid = by_code("kind", self._palette(theme, dashed=False))
        self._dashed = by_code("kind", self._palette(theme, dashed=True))
        self._colour = by_code("kind", self._palette(theme))
        ring = {"x": "x", "y": "y", "width": _RING, "height": _RING, "source": self.marks, "line_alpha": "alpha"}
        self._rings = [
            fig.rect(**ring, fill_color=None, line_color=colour, line_dash=dash, border_radius=7, line_width=2.8)
            for colour, dash in ((self._solid, "solid"), (self._dashed, value([5, 3])))
        ]
        self._rim, self._disc = (
            self._badge(0, marker="circle"),
            self._badge(0, marker="circle", fill_color=self._colour),
        )
        self._symbols = {
            kind: self._badge(0, marker=marker, size=by_code("kind", self._sizes(theme, kind)))
            for kind, marker in _SYMBOLS.items()
        }
        copied = by_code("kind", [0.75 * size for size in self._sizes(theme, "copied")])
        self._behind = self._badge(-0.035, marker="square", size=copied)
        self._front = self._badge(0.03, marker="square", size=copied)
        self.paint(theme)

    def _badge(self, shift: float, **options):
        """A scatter at the upper right corner of marked cells, moved by `shift` cells along the diagonal."""
        place = {"x": at("x", _BADGE + shift), "y": at("y", shift - _BADGE)}
        return self.grid.fig.scatter(
            **place, source=self.marks, alpha="alpha", line_color=None, **{"fill_color": None, **options}
        )

    @staticmethod
    def _palette(theme: Theme, *, dashed: bool | None = None) -> list[str]:
        """Colour by kind; rings draw evicted blocks dashed and the others solid, so each hides the kinds of the other."""
        hidden = "#00000000"
        colours = [theme.warn if kind == "evicted" else theme.ink for kind in MARKS]
        if dashed is None:
            return colours
        return [
            colour if (kind == "evicted") == dashed else hidden for kind, colour in zip(MARKS, colours, strict=True)
        ]

    @staticmethod
    def _sizes(theme: Theme, shown: str) -> list[float]:
        return [8.0 * theme.scale if kind == shown else 0.0 for kind in MARKS]

    def paint(self, theme: Theme) -> None:
        self._drawn = ({}, -1.0)
        relook(self._solid, self._palette(theme, dashed=False))
        relook(self._dashed, self._palette(theme, dashed=True))
        relook(self._colour, self._palette(theme))
        relook(self._halo_face, face_palette(theme))
        self._rim.glyph.size, self._disc.glyph.size = theme.px(17), theme.px(15)
        for part in (self._rim, self._front):
            part.glyph.fill_color = theme.panel
        for part in (*self._symbols.values(), self._behind, self._arrow_halo, self._tail):
            part.glyph.line_color = theme.panel
        for symbol in self._symbols.values():
            symbol.glyph.line_width = 2.1 * theme.scale
        self._behind.glyph.line_width = 1.5
        self._arrow.glyph.line_color = theme.ink
        self._tail.glyph.fill_color = self._head.glyph.fill_color = self._head.glyph.line_color = theme.ink
        self._halo.glyph.text_outline_width = 5

    # -- one frame --------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        self._step, self._born = -1, 0.0
        self._marks: dict[int, tuple[str, int]] = {}

    def update(self, frame: Frame) -> None:
        step = max((e.step for e in frame.events if e.kind is EventKind.ALLOCATED), default=-1)
        if step >= 0 and (frame.running or step == frame.snapshot.step):
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
        if (shown, alpha) == self._drawn:
            return
        self._drawn = shown, alpha
        self._draw_rings(shown, alpha)
        self._draw_arrows({b: source for b, (kind, source) in shown.items() if kind == "copied"}, alpha)

    def _draw_rings(self, shown: dict[int, tuple[str, int]], alpha: float) -> None:
        blocks = list(shown)
        replace_if_changed(self.marks, {
            "x": (self.grid.x[blocks] + 0.5).tolist(), "y": (self.grid.y[blocks] + 0.5).tolist(),
            "kind": [MARKS.index(kind) for kind, _ in shown.values()], "alpha": [alpha] * len(blocks),
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
        if self.grid.labelled:
            self._draw_halos(sorted(b for b in crossed if not self.grid.cells.data["dim"][b]))

    def _draw_halos(self, blocks: list[int]) -> None:
        cells = self.grid.cells.data
        columns = {name: [cells[name][b] for b in blocks] for name in _HALO}
        replace_if_changed(self.halos, columns | {c: getattr(self.grid, c)[blocks].astype(int).tolist() for c in "xy"})

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
