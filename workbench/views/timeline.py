"""Timeline: one row a request, one shape a phase, over the last 110 steps.

    o.....   waiting: ring and dotted line          [||||]   prefill: tall, striped, the cached share hatched on top
    ======   decode: solid, one lane a live sample  - - -    preempted: dashed line with a pause disc
    #        finished: ink square

Point at a shape to read what it is and why.
"""

from __future__ import annotations

import numpy as np
from bokeh.core.property.vectorization import value
from bokeh.events import Tap
from bokeh.layouts import column
from bokeh.models import ColumnDataSource, Div, FixedTicker, HoverTool, Range1d

from ..theme import FONT, LIGHT, OWNER_HUES, Theme
from . import legend
from .base import (
    Frame,
    View,
    Whose,
    at,
    by_code,
    capped,
    empty_source,
    font,
    paint_figure,
    patch_changed,
    plain_figure,
    relook,
    replace_if_changed,
)  # fmt: skip
from .glyph import ON_OWNER
from .phases import Phases, Span
from .timeline_shapes import COLUMNS, Shapes, padded

WINDOW, MAX_ROWS = 110, 24  # steps, requests
ROW_HEIGHT, HEAD = 23, 26  # px
_GUTTER = 8  # steps: request chips at the left


class Timeline(View):
    title = "Timeline"
    lanes: ColumnDataSource
    prefills: ColumnDataSource
    lines: ColumnDataSource
    dots: ColumnDataSource
    hatches: ColumnDataSource

    def __init__(self, theme: Theme = LIGHT, **callbacks):
        super().__init__(theme, **callbacks)
        self._drawn: list[int] = []
        self.reset()
        for name, columns in COLUMNS.items():
            setattr(self, name, ColumnDataSource(padded([], columns)))
        self.rows = empty_source("y", "label", "hue", "bar", "dim", "band")
        self.now = empty_source("x", "text")
        self.why = empty_source("x", "y", "text")
        self.sources = {
            "lanes": self.lanes, "prefills": self.prefills, "lines": self.lines, "dots": self.dots,
            "hatches": self.hatches, "rows": self.rows, "now": self.now, "why": self.why,
        }  # fmt: skip
        self._build()

    # -- building -----------------------------------------------------------------------------------------------------

    def _build(self) -> None:
        theme = self.theme
        self.figure = fig = plain_figure(
            theme, x_range=Range1d(-_GUTTER, WINDOW), y_range=Range1d(1, 0), height=HEAD + 2 * ROW_HEIGHT,
            x_axis_location="above", min_border=0, min_border_right=4,
        )  # fmt: skip
        fig.extra_x_ranges = {"gutter": Range1d(0, WINDOW + _GUTTER)}  # chips stay while steps move under them
        fig.yaxis.visible = False
        fig.xgrid.visible = True
        fig.xaxis.ticker = fig.xgrid.ticker = self._ticker = FixedTicker()
        self._alpha = alpha = by_code("dim", (1.0, theme.dim_alpha))
        self._stripes = by_code("dim", (0.62, 0.62 * theme.dim_alpha))
        hue = by_code("hue", OWNER_HUES)
        self._band = fig.hbar(
            at("y", 0.5), height=0.96, left=0, right=WINDOW + _GUTTER,
            source=self.rows, fill_alpha="band", line_color=None, x_range_name="gutter",
        )  # fmt: skip
        self._waits = by_code("kind", self._line_colours(theme, dashed=False))
        self._stops = by_code("kind", self._line_colours(theme, dashed=True))
        line = {"x0": "x0", "x1": "x1", "y0": "y", "y1": "y", "source": self.lines, "line_alpha": alpha}
        dotted = fig.segment(**line, line_color=self._waits, line_width=2.4, line_cap="round", line_dash=value([0, 5]))
        fig.segment(**line, line_color=self._stops, line_width=2.6, line_dash=value([7, 4]))
        box = {"left": "x0", "right": "x1", "top": "y0", "bottom": "y1"}
        solid = fig.quad(**box, source=self.lanes, fill_color=hue, fill_alpha=alpha, line_color=None)
        tall = fig.quad(
            **box, source=self.prefills, fill_color=hue, fill_alpha=alpha, line_color=None, hatch_pattern="vertical_line",
            hatch_color=ON_OWNER, hatch_alpha=self._stripes, hatch_scale=3.6, hatch_weight=1.4,
        )  # fmt: skip
        self._cached = fig.quad(
            left="x0", right="x1", top="y0", bottom="part", source=self.prefills, fill_alpha=alpha, line_color=None
        )
        self._hatching = fig.multi_line("xs", "ys", source=self.hatches, line_width=1.4, line_alpha=alpha)
        self._frames = fig.quad(**box, source=self.prefills, fill_color=None, line_width=1.3, line_alpha=alpha)
        self._build_dots(alpha)
        self._build_rows(alpha, hue)
        self._hover = HoverTool(
            renderers=[solid, tall, dotted], tooltips="", point_policy="follow_mouse", line_policy="interp"
        )
        fig.add_tools(self._hover)
        fig.on_event(Tap, self._tapped)
        self._legend = Div(sizing_mode="stretch_width", margin=0)
        self.root = column(self._legend, fig, sizing_mode="stretch_width", margin=0, spacing=0)
        self.restyle(theme)

    @staticmethod
    def _line_colours(theme: Theme, *, dashed: bool) -> tuple[str, str]:
        """Waiting is dotted and preempted dashed; each line hides the other."""
        hidden = "#00000000"
        return (hidden, theme.warn) if dashed else (theme.line2, hidden)

    def _build_dots(self, alpha: dict) -> None:
        """Ring of waiting, disc of preempted, square of finished; each hides the other kinds by a size of 0."""
        fig = self.figure
        place = {"x": "x", "y": "y", "source": self.dots, "alpha": alpha}
        self._rings = fig.scatter(**place, size=by_code("kind", (9, 0, 0)), line_width=2)
        self._discs = fig.scatter(**place, size=by_code("kind", (0, 17, 0)), line_color=None)
        self._pauses = [
            fig.scatter(
                at("x", shift), "y", source=self.dots, alpha=alpha, marker="dash", angle=np.pi / 2, line_width=2.6,
                size=by_code("kind", (0, 8, 0)),
            )
            for shift in (-0.45, 0.45)
        ]  # fmt: skip
        self._squares = fig.scatter(**place, size=by_code("kind", (0, 0, 12)), marker="square", line_color=None)

    def _build_rows(self, alpha: dict, hue: dict) -> None:
        fig = self.figure
        self._now = fig.segment(x0="x", x1="x", y0=-1, y1=1000, source=self.now, line_width=1.6)
        self._now_text = fig.text(
            "x", 0, text="text", source=self.now, text_align="center", text_baseline="bottom", text_font=font(),
            text_font_style="bold", y_offset=-8,
        )  # fmt: skip
        self._now_text.level = "overlay"
        fixed = {"source": self.rows, "x_range_name": "gutter"}
        self._margin = fig.hbar(at("y", 0.5), height=1.02, left=-1, right=_GUTTER - 0.4, line_color=None, **fixed)
        chip = {"left": 0.5, "right": _GUTTER - 1.6, "top": at("y", 0.1), "bottom": at("y", 0.88), **fixed}
        self._chips = fig.quad(**chip, fill_color=hue, fill_alpha=alpha, line_alpha=alpha, border_radius=4)
        bar = {"x0": 1.05, "x1": 1.05, "y0": at("y", 0.22), "y1": at("y", 0.76), **fixed}
        self._bar = by_code("bar", (0.0, 1.0, self.theme.dim_alpha))
        fig.segment(**bar, line_color=ON_OWNER, line_alpha=self._bar, line_width=2.6)
        self._labels = fig.text(
            (_GUTTER - 1.1) / 2, at("y", 0.5), text="label", text_color=ON_OWNER, text_alpha=alpha, **fixed,
            text_align="center", text_baseline="middle", text_font_style="bold", text_font=font(),
        )  # fmt: skip
        halo, words = {"text_outline_width": 5}, {"text_baseline": "middle", "text_font": font(), "source": self.why}
        self._why_halo = fig.text("x", "y", text="text", **words, **halo)
        self._why = fig.text("x", "y", text="text", **words)

    def restyle(self, theme: Theme) -> None:
        self.theme = theme
        paint_figure(self.figure, theme)
        self.figure.min_border_top = theme.px(HEAD - 3)  # for the current step's number, also before the first tick
        self._legend.text = legend.phases(theme)
        self.figure.xgrid.grid_line_color = theme.line
        relook(self._alpha, (1.0, theme.dim_alpha))
        relook(self._bar, (0.0, 1.0, theme.dim_alpha))
        relook(self._stripes, (0.62, 0.62 * theme.dim_alpha))
        relook(self._waits, self._line_colours(theme, dashed=False))
        relook(self._stops, self._line_colours(theme, dashed=True))
        line = f"{theme.cell_line}{round(255 * theme.cell_line_alpha):02X}"
        self._chips.glyph.line_color = line
        self._cached.glyph.fill_color, self._hatching.glyph.line_color = theme.cached, theme.hatch
        self._band.glyph.fill_color = theme.accent_soft
        self._margin.glyph.fill_color = theme.panel
        self._frames.glyph.line_color = self._now.glyph.line_color = self._squares.glyph.fill_color = theme.ink
        self._rings.glyph.fill_color, self._rings.glyph.line_color = theme.panel, theme.line2
        self._discs.glyph.fill_color = theme.warn
        for pause in self._pauses:
            pause.glyph.line_color = theme.panel
        for text, size, colour in (
            (self._labels, 13.5, ON_OWNER), (self._now_text, 13, theme.ink), (self._why, 13, theme.ink),
            (self._why_halo, 13, theme.accent_soft),
        ):  # fmt: skip
            text.glyph.text_font_size, text.glyph.text_color = theme.font(size), colour
        self._why_halo.glyph.text_outline_color = theme.accent_soft
        self._hover.tooltips = (
            f'<div style="margin:-6px -10px;padding:7px 11px;background:{theme.panel};color:{theme.ink};max-width:340px;'
            f"border:1px solid {theme.line2};border-radius:6px;font:{theme.font(13.5)}/1.4 {FONT.replace(chr(34), '')}"
            '"><b>Request @request</b>: @about</div>'
        )
        self._drawn = []
        if self.frame is not None:
            self._draw(self.frame)

    # -- one frame ----------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        self.phases = Phases()
        self._same: tuple | None = None
        self._open: list[tuple[str, int, Span, int | None]] = []
        self._requests: dict[str, list[int]] = {}  # of each row of a source

    def update(self, frame: Frame) -> None:
        self.frame = frame
        self.phases.update(frame)
        self._draw(frame)

    def _draw(self, frame: Frame) -> None:
        now, start = frame.snapshot.step, self._start()
        shown = [r for r, spans in sorted(self.phases.spans.items()) if spans[-1].open or spans[-1].last >= start][
            -MAX_ROWS:
        ]
        if len(shown) != len(self._drawn) or not self._drawn:
            count = max(1, len(shown))
            self.figure.height = self.theme.px(HEAD + ROW_HEIGHT * count)
            self.figure.y_range.start = count
        self._drawn = shown
        bounds = self.figure.x_range
        gutter = start - _GUTTER
        if bounds.start != gutter:
            bounds.start, bounds.end = gutter, start + WINDOW
        ticks = [t for t in range(start // 20 * 20 + 20, now, 20) if now - t > 8]
        if ticks != self._ticker.ticks:
            self._ticker.ticks = ticks
        replace_if_changed(self.now, {"x": [now], "text": [f"step {now}"]})
        self._draw_rows(frame, shown)
        self._draw_spans(frame, shown, start)

    def _start(self) -> int:
        """The first step in the window."""
        return max(0, self.frame.snapshot.step - WINDOW + 4)

    def _dim(self, frame: Frame, request_id: int) -> int:
        return int(frame.selection is not None and request_id not in frame.selected_requests)

    def _draw_rows(self, frame: Frame, shown: list[int]) -> None:
        slots = [frame.slots.slot(r) for r in shown]
        dims = [self._dim(frame, r) for r in shown]
        chosen = frame.selected_requests
        replace_if_changed(self.rows, {
            "y": list(range(len(shown))), "label": [str(r) for r in shown], "hue": [s % len(OWNER_HUES) for s in slots],
            "bar": [(s >= len(OWNER_HUES)) * (1 + d) for s, d in zip(slots, dims, strict=True)], "dim": dims,
            "band": [float(r in chosen) for r in shown],
        })  # fmt: skip

    def _draw_spans(self, frame: Frame, shown: list[int], start: int) -> None:
        """Spans in order of creation, so that a new one is a new row; between changes only the open ends move."""
        same = (self.phases.changes, shown, frame.selection, self.theme, [frame.slots.slot(r) for r in shown])
        if same == self._same:
            self._move_ends()
            return
        self._same, shapes = same, Shapes()
        places = {request_id: y for y, request_id in enumerate(shown)}
        spans = [
            (span, request_id)
            for request_id in shown
            for span in self.phases.spans[request_id]
            if span.open or span.last >= start or span is self.phases.spans[request_id][-1]
        ]
        for span, request_id in sorted(spans, key=lambda pair: pair[0].number):
            told = {"dim": self._dim(frame, request_id), "request": request_id, "about": span.about()}
            hue = frame.slots.slot(request_id) % len(OWNER_HUES)
            shapes.add(span, places[request_id], hue, told)
        self._open, self._requests = shapes.open, {}
        for name, columns in COLUMNS.items():
            data = padded(shapes.rows[name], (*columns, "request"))
            self._requests[name] = data["request"]
            patch_changed(getattr(self, name), {column: data[column] for column in columns})
        said = self.reasons().get(frame.selection.id) if frame.selection and frame.selection.kind == "request" else None
        x, y, text = ([part] for part in said) if said else ([], [], [])
        replace_if_changed(self.why, {"x": x, "y": y, "text": text})

    def _move_ends(self) -> None:
        moved: dict[str, list[tuple[int, int]]] = {}
        for name, row, span, child in self._open:
            end = span.last if child is None else span.lanes[child]
            if getattr(self, name).data["x1"][row] != end:
                moved.setdefault(name, []).append((row, end))
        for name, patch in moved.items():
            getattr(self, name).patch({"x1": patch})

    def reasons(self) -> dict[int, tuple[float, float, str]]:
        """By request: why it waits, or what happened to it last, and where in its row that is said when it is selected."""
        start, reasons = self._start(), {}
        for y, request_id in enumerate(self._drawn):
            told = [s for s in self.phases.spans[request_id] if s.why and s.phase in ("waiting", "preempted")]
            if told and (told[-1].open or told[-1].phase == "preempted"):
                reasons[request_id] = (max(start, told[-1].first) + 3, y + 0.48, told[-1].why)
        return reasons

    def whose(self) -> dict[str, Whose]:
        rows = {"rows": Whose("request", self._drawn, {"dim": 1, "bar": 1})}
        return rows | {name: Whose("request", ids, {"dim": 1}) for name, ids in self._requests.items()}

    # -- taps, summary, twin --------------------------------------------------------------------------------------------

    def _tapped(self, event: Tap) -> None:
        if self.frame is None or event.x is None or event.y is None or not 0 <= event.y < len(self._drawn):
            return
        self.choose("request", self._drawn[int(event.y)])

    @property
    def empty(self) -> bool:
        return not self._drawn

    def summary(self) -> str:
        if self.empty:
            return "Nothing has run yet. Each request gets a row when it arrives."
        return "Prefill computes the prompt; decode writes one token in each step. Point at a bar to see why."

    def table(self) -> tuple[list[str], list[list[str]]]:
        rows = []
        for request_id in self._drawn:
            for span in self.phases.spans[request_id]:
                steps = f"{span.first}" if span.first == span.last else f"{span.first}–{span.last}"
                rows.append([str(request_id), steps, span.phase, span.why])
        return ["Request", "Steps", "Phase", "Why"], capped(rows)
