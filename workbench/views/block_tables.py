"""Block tables: one row a sequence, one chip a logical block, the physical id in the chip.

Where neighbouring rows hold the same block at the same place, one tall ink chip spans them: the memory exists once.
Rows are ordered so that equal prefixes touch, and the samples of one request hang on a bracket. A chip keeps its row
in the source for as long as it lives, so that a decode step sends the last chips of the rows and nothing else.

A sequence has a table in each KV group of the model: the rows of a group stand together, and what fell out of a window is the
null block.
"""

from __future__ import annotations

import numpy as np
from bokeh.events import Tap
from bokeh.models import FixedTicker, Range1d
from kvscope.engine.snapshot import RequestState

from ..theme import LIGHT, OWNER_HUES, Theme
from . import glyph
from .base import (
    ENDED,
    Frame,
    Rows,
    View,
    Whose,
    at,
    by_code,
    capped,
    empty_source,
    font,
    plain_figure,
    relook,
    replace_if_changed,
)  # fmt: skip
from .block_cells import dim_levels
from .block_chips import SIDE, ChipGrid

MAX_ROWS = 40  # more sequences are counted, not drawn
ROW_HEIGHT, HEAD = 30, 24  # px
_ID_COLUMNS = 36  # above so many logical blocks the chips are too narrow for ids
_GUTTER, _TAIL = 2.5, 3.6  # data units left and right of the chips


class BlockTables(View):
    title = "Block tables"

    def __init__(self, theme: Theme = LIGHT, **callbacks):
        super().__init__(theme, **callbacks)
        self._order: list[int] = []  # drawn row -> index into snapshot.requests
        self._groups: list[int] = []  # drawn row -> KV group
        self._order_of: tuple | None = None
        self._grid = np.zeros((0, 0), np.int64)
        self.tails = empty_source("x", "y", "label", "hue", "bar", "dim", "text")
        self.forks = empty_source("xs", "ys", "dim")
        self.parents = empty_source("y", "label", "hue", "bar", "dim")
        self._forked: list[int] = []  # request of each row of `forks`
        self._parents: list[int] = []
        self._tail_rows = Rows(self.tails)
        self._build()

    # -- building -----------------------------------------------------------------------------------------------------

    def _build(self) -> None:
        theme = self.theme
        self.figure = fig = plain_figure(
            theme, x_range=Range1d(-_GUTTER, 12 + _TAIL), y_range=Range1d(1, -0.06), height=2 * ROW_HEIGHT,
            x_axis_location="above", min_border=0,
        )  # fmt: skip
        fig.yaxis.visible = False
        fig.xaxis.ticker = self._ticker = FixedTicker()  # one for good: a new model costs a walk over the document
        fig.xaxis.major_label_overrides = {t + SIDE / 2: str(t) for t in range(0, 256, 2)}
        self._axis(12)
        self._chips = ChipGrid(fig, theme)
        self._build_gutter()
        self.sources = self._chips.sources | {"tails": self.tails, "forks": self.forks, "parents": self.parents}
        fig.on_event(Tap, self._tapped)
        self.root = fig
        self.restyle(theme)

    def _build_gutter(self) -> None:
        """Sequence chips at the left, brackets of forks, and what each row holds at the right."""
        fig, theme = self.figure, self.theme
        alpha = self._alpha = by_code("dim", dim_levels(theme))
        self._bar = by_code("bar", (0.0, 1.0, theme.dim_alpha))
        self._brackets = fig.multi_line("xs", "ys", source=self.forks, line_width=1.6, line_alpha=alpha)
        self._gutter_ids, self._gutter_lines = [], []
        for source, left, right in ((self.tails, -1.22, -0.22), (self.parents, -2.44, -1.5)):
            box = {"left": left, "right": right, "top": at("y", 0.14), "bottom": at("y", 0.84), "source": source}
            fig.quad(**box, fill_color=by_code("hue", OWNER_HUES), fill_alpha=alpha, line_color=None, border_radius=4)
            self._gutter_lines.append(fig.quad(**box, fill_color=None, line_alpha=alpha, border_radius=4))
            bar = {"x0": left + 0.1, "x1": left + 0.1, "y0": at("y", 0.24), "y1": at("y", 0.74), "source": source}
            fig.segment(**bar, line_color=glyph.ON_OWNER, line_alpha=self._bar, line_width=2.4)
            self._gutter_ids.append(
                fig.text(
                    (left + right) / 2, at("y", 0.5), text="label", source=source, text_color=glyph.ON_OWNER,
                    text_alpha=alpha, text_font=font(), text_font_style="bold", text_align="center",
                    text_baseline="middle",
                )
            )  # fmt: skip
        self._tail_text = fig.text(
            at("x", 0.12), at("y", 0.5), text="text", source=self.tails, text_font=font(), text_alpha=alpha,
            text_baseline="middle",
        )  # fmt: skip

    def _axis(self, columns: int) -> None:
        every = 2 if columns <= 24 else 4 if columns <= 48 else 8
        self._ticker.ticks = [t + SIDE / 2 for t in range(0, columns, every)]

    def restyle(self, theme: Theme) -> None:
        self.theme = theme
        fig = self.figure
        fig.xaxis.major_label_text_color = theme.muted
        fig.xaxis.major_label_text_font_size = theme.font(12.5)
        relook(self._alpha, dim_levels(theme))
        relook(self._bar, (0.0, 1.0, theme.dim_alpha))
        self._chips.paint(theme)
        self._brackets.glyph.line_color = theme.ink
        over = f"{theme.cell_line}{round(255 * theme.cell_line_alpha):02X}"
        for lines in self._gutter_lines:
            lines.glyph.line_color = over
        for text in self._gutter_ids:
            text.glyph.text_font_size = theme.font(13.5)
        self._tail_text.glyph.text_color = theme.muted
        self._tail_text.glyph.text_font_size = theme.font(13)
        self._tail_rows.forget()
        self._size(max(1, len(self._order)), max(12, self._grid.shape[1]))
        if self.frame is not None:
            self.update(self.frame)

    # -- one frame ----------------------------------------------------------------------------------------------------

    def update(self, frame: Frame) -> None:
        self.frame = frame
        order, groups = self._arrange(frame)
        tables = [frame.snapshot.requests[i].block_tables[g] for i, g in zip(order, groups, strict=True)]
        columns = max(map(len, tables), default=0)
        if (len(order), columns) != (len(self._order), self._grid.shape[1]):
            self._size(max(1, len(order)), max(12, columns))
        self._order, self._groups = order, groups
        self._grid = np.full((len(order), columns), -1, np.int64)
        for row, blocks in enumerate(tables):
            self._grid[row, : len(blocks)] = blocks
        self._chips.update(frame, self._grid)
        self._draw_tails(frame, tables)

    def _arrange(self, frame: Frame) -> tuple[list[int], list[int]]:
        """Order of rows: group by group, and in each the sequences in order of arrival, but those that share a prefix next to
        each other. (indices into snapshot.requests, groups)."""
        snapshot = frame.snapshot
        rows = [
            (group, i) for i, r in enumerate(snapshot.requests) if r.status not in ENDED
            for group, table in enumerate(r.block_tables) if len(table)
        ]  # fmt: skip
        shared = np.flatnonzero(snapshot.ref_count > 1)
        same = (rows, shared.tobytes(), frame.reader_codes[shared].tobytes())
        if same != self._order_of:
            self._order_of = same
            first = np.where(snapshot.ref_count > 0, snapshot.owner, 0).astype(np.int64)
            place = first * snapshot.num_blocks + np.arange(snapshot.num_blocks)
            rows = sorted(
                rows, key=lambda row: (row[0], *place[snapshot.requests[row[1]].block_tables[row[0]]].tolist(), row[1])
            )
            self._arranged = [i for _, i in rows[:MAX_ROWS]], [group for group, _ in rows[:MAX_ROWS]]
        return self._arranged

    def _size(self, rows: int, columns: int) -> None:
        columns = -(-columns // 4) * 4
        fig = self.figure
        fig.height = self.theme.px(HEAD + ROW_HEIGHT * rows)
        fig.y_range.start, fig.y_range.end = rows, -0.06
        wide = columns / 12
        fig.x_range.start, fig.x_range.end = -_GUTTER * wide**0.6, columns + _TAIL * wide**0.6
        self._axis(columns)
        self._chips.show_ids(columns <= _ID_COLUMNS, 13.5 if columns <= 20 else 12.5 if columns <= 28 else 11)

    def _draw_tails(self, frame: Frame, tables: list[np.ndarray]) -> None:
        snapshot, order = frame.snapshot, self._order
        chosen = frame.selected_requests
        requests = [snapshot.requests[i] for i in order]
        dim = [int(frame.selection is not None and r.id not in chosen) for r in requests]
        slots = frame.owner_slots[order] if order else np.zeros(0, np.int64)
        names = [frame.labels[i] for i in order]
        bars = [int(slot >= len(OWNER_HUES)) * (1 + d) for slot, d in zip(slots.tolist(), dim, strict=True)]
        fixed = {
            "x": [len(t) for t in tables], "y": list(range(len(order))), "label": names, "bar": bars, "dim": dim,
            "hue": (slots % len(OWNER_HUES)).tolist(),
        }  # fmt: skip
        own = [int(np.count_nonzero((snapshot.ref_count[t] == 1) & (t > 0))) for t in tables]
        suffix = [f", {words}" if (words := group_words(frame, g)) else "" for g in self._groups]
        tokens = np.array([r.num_computed_tokens for r in requests], np.int64)
        codes = tokens * 4096 + np.array(own, np.int64)
        if any(fixed[name] != self.tails.data[name] for name in fixed):
            self.tails.data = fixed | {
                "text": [_tail_text(c) + end for c, end in zip(codes.tolist(), suffix, strict=True)]
            }
            self._tail_rows.forget()
            self._tail_rows.know("text", codes)
            self._draw_forks(requests, fixed)
        else:

            def encode(rows: np.ndarray, changed: np.ndarray) -> list[str]:
                return [_tail_text(c) + suffix[row] for row, c in zip(rows.tolist(), changed.tolist(), strict=True)]

            self._tail_rows.set("text", codes, encode)
            self._tail_rows.flush()

    def _draw_forks(self, requests: list[RequestState], fixed: dict[str, list]) -> None:
        """A chip for a request with several samples, and a bracket from it to each of them."""
        forks: dict[str, list] = {"xs": [], "ys": [], "dim": []}
        parents: dict[str, list] = {"y": [], "label": [], "hue": [], "bar": [], "dim": []}
        rows_of: dict[tuple[int, int], list[int]] = {}
        self._forked, self._parents = [], []
        for row, (request, group) in enumerate(zip(requests, self._groups, strict=True)):
            rows_of.setdefault((request.id, group), []).append(row)
        for (request_id, _), rows in rows_of.items():
            if len(rows) < 2:
                continue
            first = rows[0]
            self._parents.append(request_id)
            self._forked += [request_id] * len(rows)
            for name, cell in (("y", first), ("label", str(request_id))):
                parents[name].append(cell)
            for name in ("hue", "bar", "dim"):
                parents[name].append(fixed[name][first])
            forks["xs"].append([-1.5, -1.22])
            forks["ys"].append([first + 0.5, first + 0.5])
            forks["dim"].append(fixed["dim"][first])
            for row in rows[1:]:
                forks["xs"].append([-1.97, -1.97, -1.22])
                forks["ys"].append([first + 0.84, row + 0.5, row + 0.5])
                forks["dim"].append(fixed["dim"][first])
        replace_if_changed(self.forks, forks)
        replace_if_changed(self.parents, parents)

    def whose(self) -> dict[str, Whose]:
        rows = [] if self.frame is None else [self.frame.snapshot.requests[i].id for i in self._order]
        ids = {"tails": rows, "forks": self._forked, "parents": self._parents}
        gutter = {name: Whose("request", of, {"dim": 1, "bar": 1}) for name, of in ids.items()}
        return self._chips.whose() | gutter

    # -- taps, summary, twin --------------------------------------------------------------------------------------------

    def _tapped(self, event: Tap) -> None:
        if self.frame is None or event.x is None or event.y is None:
            return
        row, column = int(event.y // 1), int(event.x // 1)
        if not 0 <= row < len(self._order):
            return
        if column < 0:
            self.choose("request", self.frame.snapshot.requests[self._order[row]].id)
        elif column < self._grid.shape[1] and self._grid[row, column] >= 0:
            self.choose("block", int(self._grid[row, column]))

    @property
    def empty(self) -> bool:
        return not self._order

    def summary(self) -> str:
        if self.empty:
            return "No sequence holds a block. Each gets a row as soon as it runs."
        text = "One row per sequence, in reading order. A tall black chip is one block that several rows share."
        if self.theme.name == "dark":
            text = text.replace("black", "white")
        rows = len(self._order_of[0]) if self._order_of else 0
        return f"{text} {rows - MAX_ROWS} more rows are not drawn." if rows > MAX_ROWS else text

    def table(self) -> tuple[list[str], list[list[str]]]:
        headers = ["Sequence", "Tokens", "Blocks in logical order"]
        if self.frame is None:
            return headers, []
        snapshot, rows = self.frame.snapshot, []
        for i, group in zip(self._order, self._groups, strict=True):
            request = snapshot.requests[i]
            blocks = request.block_tables[group].tolist()
            ids = [
                f"{b}×{snapshot.ref_count[b]}" if snapshot.ref_count[b] > 1 else str(b) if b else "null" for b in blocks
            ]
            words = group_words(self.frame, group)
            name = f"{self.frame.labels[i]}, {words}" if words else self.frame.labels[i]
            rows.append([name, f"{request.num_computed_tokens:,}", " ".join(ids)])
        return headers, capped(rows)


def group_words(frame: Frame, group: int) -> str:
    """What a KV group is called where a model has several: "window of 512", "all tokens"; "" where it has one. And its block size,
    where that is not the same for all."""
    requests = frame.snapshot.requests
    if not requests or len(requests[0].block_tables) < 2:
        return ""
    size = f", blocks of {frame.snapshot.block_sizes[group]}" if frame.snapshot.block_sizes else ""
    spec = getattr(frame.info, "spec", None)  # a recording holds the plain facts only
    if spec is None:
        return f"KV group {group}{size}"
    window = spec.kv_groups[group].window
    return f"KV group {group}: " + (f"window of {window:,}" if window else "all tokens") + size


def _tail_text(code: int) -> str:
    tokens, own = divmod(code, 4096)
    return f"{tokens:,} token{'' if tokens == 1 else 's'}, {own} own"
