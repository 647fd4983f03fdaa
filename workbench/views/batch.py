"""The batch of each step: how many of its tokens were decode and how many prefill, and the budget that it may not exceed."""

from __future__ import annotations

from bokeh.models import BasicTicker, ColumnDataSource, NumeralTickFormatter, Range1d, Span
from kvscope.engine.events import EventKind

from ..markup import plural
from ..theme import LIGHT, Theme
from .base import Frame, View, empty_source, font, paint_figure, plain_figure, replace_if_changed
from .charts import round_top, spread_apart

STEPS = 60  # shown


class Batch(View):
    title = "Batch in each step"

    def __init__(self, theme: Theme = LIGHT, **callbacks):
        super().__init__(theme, **callbacks)
        self.bars = ColumnDataSource({"step": [], "decode": [], "total": []})
        self.ends = empty_source("x", "y", "number", "name", "colour")
        self.sources = {"bars": self.bars, "ends": self.ends}
        self._anew = False
        self._budget_tokens = 0
        self._last: tuple[int, int, int] = (0, 0, 0)  # decode tokens, prefill tokens, sequences
        self.figure = fig = plain_figure(
            theme, x_range=Range1d(0, 1.4 * STEPS), y_range=Range1d(0, 1), height=190, min_border_left=36
        )
        fig.ygrid.visible = True
        fig.yaxis.ticker = BasicTicker(desired_num_ticks=3, num_minor_ticks=0)
        fig.xaxis.ticker = BasicTicker(desired_num_ticks=3, mantissas=[1, 2, 5], min_interval=1, num_minor_ticks=0)
        fig.xaxis.axis_label = "step"
        for axis in fig.axis:
            axis.formatter = NumeralTickFormatter(format="0,0")
        common = {"x": "step", "width": 0.72, "source": self.bars, "line_color": None}
        self._decode = fig.vbar(**common, bottom=0, top="decode")
        self._prefill = fig.vbar(**common, bottom="decode", top="total", hatch_pattern="vertical_line", hatch_scale=4)
        self._budget = Span(
            location=0, dimension="width", line_dash="dotted", line_width=1.8, visible=False, level="underlay"
        )
        fig.add_layout(self._budget)
        words = {"x": "x", "y": "y", "source": self.ends, "x_offset": 6, "text_font": font()}
        self._numbers = fig.text(
            **words, text="number", text_color="colour", text_font_style="bold", text_baseline="bottom", y_offset=-1
        )
        self._names = fig.text(**words, text="name", text_baseline="top")
        self.root = fig
        self.restyle(theme)

    def reset(self) -> None:
        self._anew, self._last = True, (0, 0, 0)

    def update(self, frame: Frame) -> None:
        self.frame = frame
        steps = [event for event in frame.events if event.kind is EventKind.STEP][-STEPS:]
        if not steps and not self._anew:
            return
        numbers = [e.numbers for e in steps]
        decode = [int(n.get("decode_tokens", 0)) for n in numbers]
        prefill = [int(n.get("prefill_tokens", 0)) for n in numbers]
        new = {
            "step": [e.step for e in steps],
            "decode": decode,
            "total": [d + p for d, p in zip(decode, prefill, strict=True)],
        }
        if self._anew:
            self._anew, self.bars.data = False, new
        else:
            self.bars.stream(new, rollover=STEPS)
        if steps:
            self._last = decode[-1], prefill[-1], int(numbers[-1].get("sequences", 0))
            self._budget_tokens = int(numbers[-1].get("token_budget", 0))
        self._fit()

    def _fit(self) -> None:
        fig, held = self.figure, self.bars.data
        budget = self._budget_tokens
        highest = max(held["total"], default=0)
        near = 0 < budget <= 4 * max(1, highest)  # else the bars would be too low to be read
        top = round_top(max(highest, budget if near else 0)) * 1.1
        first = held["step"][0] if len(held["step"]) else 0
        for bounds, start, end in ((fig.x_range, first - 1, first + 1.4 * STEPS), (fig.y_range, 0, top)):
            if (bounds.start, bounds.end) != (start, end):
                bounds.start, bounds.end = start, end
        if (self._budget.location, self._budget.visible) != (budget, near):
            self._budget.location, self._budget.visible = budget, near
        self._words()

    def _words(self) -> None:
        held, top, theme = self.bars.data, self.figure.y_range.end, self.theme
        if not len(held["step"]):
            replace_if_changed(self.ends, {name: [] for name in self.ends.data})
            return
        decode, prefill, _ = self._last
        rows = [
            (decode / 2, f"{decode:,}", "decode", theme.decode),
            (decode + prefill, f"{prefill:,}", "prefill", theme.prefill),
        ]
        if self._budget.visible:
            rows.append((self._budget.location, f"{self._budget.location:,}", "budget", theme.ink))
        y = spread_apart([row[0] for row in rows], 0.24 * top, top)
        replace_if_changed(self.ends, {
            "x": [held["step"][-1] + 0.5] * len(rows), "y": [round(place, 1) for place in y],
            "number": [row[1] for row in rows], "name": [row[2] for row in rows], "colour": [row[3] for row in rows],
        })  # fmt: skip

    def restyle(self, theme: Theme) -> None:
        self.theme = theme
        fig = self.figure
        paint_figure(fig, theme)
        fig.height = theme.px(190)
        fig.xaxis.axis_label_text_color, fig.xaxis.axis_label_text_font_size = theme.muted, theme.font(12.5)
        fig.xaxis.axis_label_text_font_style = "normal"
        self._decode.glyph.fill_color = theme.decode
        self._prefill.glyph.fill_color, self._prefill.glyph.hatch_color = theme.prefill, theme.panel
        self._budget.line_color = theme.ink
        self._numbers.glyph.text_font_size, self._names.glyph.text_font_size = theme.font(13.5), theme.font(13)
        self._names.glyph.text_color = theme.muted
        for text in (self._numbers, self._names):
            text.glyph.background_fill_color = theme.panel  # no line of the grid goes through a word
        self._words()

    @property
    def empty(self) -> bool:
        return not len(self.bars.data["step"])

    def summary(self) -> str:
        if self.empty:
            return "No step has run yet."
        decode, prefill, sequences = self._last
        step = int(self.bars.data["step"][-1])
        return f"Step {step:,} processed {plural(decode + prefill, 'token')} for {plural(sequences, 'sequence')}."

    def table(self) -> tuple[list[str], list[list[str]]]:
        held = self.bars.data
        rows = [
            [f"{step:,}", f"{decode:,}", f"{total - decode:,}"]
            for step, decode, total in zip(held["step"], held["decode"], held["total"], strict=True)
        ]
        return ["Step", "Decode tokens", "Prefill tokens"], rows[-8:]
