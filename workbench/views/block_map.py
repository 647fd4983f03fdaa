"""The pool map: every KV block as one cell, who owns it, how full it is, and what the last step did to it.

x = id mod columns, y = id div columns. Up to 512 blocks: labelled cells, 16 a row. Up to 4,096: cells without labels,
64 a row. Above: an image with one pixel a block. Under both a lens shows a part of it as labelled cells. A tap selects the block under it through `on_select`; a second tap on
the same block clears the selection. By key a cursor does the same; the page's script moves it (see `roving`). `label` changes
only the text in the cells, never a colour.
"""

from __future__ import annotations

from functools import partial

from bokeh.events import Tap
from bokeh.layouts import column
from bokeh.models import Div, HoverTool, Range1d
from bokeh.plotting import figure

from ..theme import FONT, LIGHT, OWNER_HUES, Theme
from . import glyph, legend
from .base import ENDED, Frame, View, Whose, capped, empty_source, font, plain_figure
from .block_cells import CellGrid, square
from .block_image import COLUMNS as IMAGE_COLUMNS
from .block_image import STATE_WORDS, ImageGrid
from .block_lens import BlockLens
from .block_marks import StepMarks
from .block_svg import summary, svg
from .host_strip import HostStrip

__all__ = ["BlockMap", "svg"]

LABELLED_UPTO, CELLS_UPTO = 512, 4096
MANY_OWNERS = 8  # above so many in a large pool colour shows the state
COUNT_EVERY = 0.25  # seconds between changes of the legend's counts while the engine runs
_PITCH = 47  # px of a labelled cell with its gap, at most
_FOCUSED = ":host(:focus-within){outline:2px solid var(--accent);outline-offset:1px;border-radius:6px}"


class BlockMap(View):
    title = "KV block pool"
    LABELS = glyph.LABELS
    is_inset = False  # True: cells without labels and marks, and neither legend nor host strip
    widest_cell = _PITCH
    with_lens = True  # above LABELLED_UPTO blocks

    def __init__(self, theme: Theme = LIGHT, **callbacks):
        super().__init__(theme, **callbacks)
        self._label = "owner"
        self._num_blocks = 0
        self._counts: dict[str, int] = {}
        self._counted_at = float("-inf")
        self._legend = Div(sizing_mode="stretch_width", margin=0)
        self._grid: CellGrid | ImageGrid | None = None
        self._marks: StepMarks | None = None
        self._lens: BlockLens | None = None
        self._looked_at = -1  # the block that the lens was last moved to by a selection
        self.host = HostStrip(theme)
        self.root = column(self._legend, sizing_mode="stretch_width", margin=0, spacing=0)
        self._show_pool(128)

    # -- building -----------------------------------------------------------------------------------------------------

    def _show_pool(self, num_blocks: int) -> None:
        """Build the figure for a pool of this size; once, and again only when an engine with another pool comes."""
        self._num_blocks = num_blocks
        labelled, cells = num_blocks <= LABELLED_UPTO and not self.is_inset, num_blocks <= CELLS_UPTO
        columns = 16 if num_blocks <= LABELLED_UPTO else 64 if cells else IMAGE_COLUMNS
        num_rows = -(-num_blocks // columns)
        gutter, margin = columns * (0.058 if labelled else 0.12 if self.is_inset else 0.075), columns * 0.008
        width, height = columns + gutter + margin, num_rows + 2 * margin
        self.figure = fig = plain_figure(
            self.theme, x_range=Range1d(-gutter, columns + margin), y_range=Range1d(num_rows + margin, -margin),
            aspect_ratio=width / height, sizing_mode="scale_width", min_border=0,
            max_width=round(self.widest_cell * 16 * 1.066 * self.theme.scale), stylesheets=[_FOCUSED],
            html_attributes={"data-pool": self.title},
        )  # fmt: skip
        fig.axis.visible = False
        if cells and self.is_inset:
            self._grid, self._marks = CellGrid(fig, self.theme, num_blocks, columns, labelled=False), None
            self._grid.draw_over()
        elif cells:
            self._grid = CellGrid(fig, self.theme, num_blocks, columns, labelled=labelled)
            self._marks = StepMarks(self._grid)
            self._marks.draw_under()
            self._grid.draw_over()
            self._marks.draw_over()
            self._grid.label = self._label
        else:
            self._grid, self._marks = ImageGrid(fig, self.theme, num_blocks), None
        self._lens = None
        if num_blocks > LABELLED_UPTO and self.with_lens and not self.is_inset:
            tap = partial(self.choose, "block")
            self._lens = BlockLens(fig, self.theme, num_blocks, columns, self._tooltip(), tap)
            self._lens.figure.max_width, self._lens.grid.label = fig.max_width, self._label
        self._draw_cursor(fig, columns)
        self._row_labels(fig, columns, num_rows, gutter)
        self._add_hover(fig)
        fig.on_event(Tap, self._tapped)
        self.sources = dict(self._grid.sources) | (self._marks.sources if self._marks else {}) | self.host.sources
        lens = [] if self._lens is None else [self._lens.root]
        self.sources |= self._lens.sources if self._lens is not None else {}
        self._paint_legend()
        self.root.children = [fig] if self.is_inset else [self._legend, fig, *lens, self.host.root]

    def _draw_cursor(self, fig: figure, columns: int) -> None:
        """Where the keyboard stands: one row of x and y, which the page writes."""
        words = STATE_WORDS if isinstance(self._grid, ImageGrid) else glyph.FACE_WORDS
        source = empty_source("x", "y")
        source.tags = [self._num_blocks, columns, list(words), self._lens is not None]
        box = {**square(-0.07, 1.07), "source": source, "fill_color": None, "border_radius": 9}
        self._cursor_halo = fig.quad(**box, line_width=6.5, line_color=self.theme.panel)
        self._cursor = fig.quad(**box, line_width=3, line_dash=[6, 3], line_color=self.theme.accent, name="cursor")

    def _row_labels(self, fig: figure, columns: int, num_rows: int, gutter: float) -> None:
        every = {16: 1, 64: 2}.get(columns, max(1, num_rows // 4))
        rows = range(0, num_rows, every)
        source = empty_source("x", "y", "text")
        source.data = {
            "x": [-gutter * 0.22] * len(rows), "y": [r + 0.5 for r in rows], "text": [f"{r * columns:,}" for r in rows]
        }  # fmt: skip
        self._row_text = fig.text(
            "x", "y", text="text", source=source, text_align="right", text_baseline="middle", text_font=font(),
            text_color=self.theme.muted, text_font_size=self.theme.font(13),
        )  # fmt: skip

    def _add_hover(self, fig: figure) -> None:
        self._hover = None
        if isinstance(self._grid, CellGrid) and self._grid.labelled:
            self._hover = HoverTool(renderers=[self._grid.faces], tooltips=self._tooltip(), point_policy="follow_mouse")
            fig.add_tools(self._hover)

    def _tooltip(self) -> str:
        t = self.theme
        return (
            f'<div style="margin:-6px -10px;padding:7px 11px;background:{t.panel};color:{t.ink};border:1px solid '
            f"{t.line2};border-radius:6px;font:{t.font(13.5)}/1.4 {FONT.replace(chr(34), '')};max-width:{t.px(320)}px"
            '"><b>Block @block</b>, generation @generation<br>read by @about<br>'
            "@filled slots written</div>"
        )

    # -- controls -----------------------------------------------------------------------------------------------------

    @property
    def label(self) -> str:
        """What stands in the cells: one of LABELS."""
        return self._label

    @label.setter
    def label(self, kind: str) -> None:
        if kind not in self.LABELS:
            raise ValueError(f"label={kind!r}: must be one of {', '.join(self.LABELS)}")
        self._label = kind
        if isinstance(self._grid, CellGrid):
            self._grid.label = kind
            self._grid.rows.forget(("label",))
        if self._lens is not None:
            self._lens.grid.label = kind
            self._lens.grid.rows.forget(("label",))
        if self.frame is not None:
            self.update(self.frame)

    def _tapped(self, event: Tap) -> None:
        if self.frame is None or event.x is None or event.y is None or self._grid is None:
            return
        x, y = int(event.x // 1), int(event.y // 1)
        block = y * self._grid.columns + x
        if not (0 <= x < self._grid.columns and 0 <= block < self._num_blocks):
            return
        self.choose("block", block)

    # -- one frame ----------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        self._counted_at = float("-inf")
        if self._marks is not None:
            self._marks.reset()

    def update(self, frame: Frame) -> None:
        self.frame = frame
        if frame.snapshot.num_blocks != self._num_blocks:
            self._show_pool(frame.snapshot.num_blocks)
        self._grid.update(frame, by_state=self._by_state(frame))
        if self._marks is not None:
            self._marks.update(frame)
        if self._lens is not None:
            self._follow(frame)
            self._lens.update(frame, by_state=self._by_state(frame))
        self.host.update(frame)
        counts = glyph.count_states(frame)
        late = not frame.running or not 0 <= frame.now - self._counted_at < COUNT_EVERY
        if counts != self._counts and late:
            self._counts, self._counted_at = counts, frame.now
            self._legend.styles = self._legend_counts()

    def look_at(self, block: int) -> None:
        """Move the lens, if there is one, to where this block is."""
        if self._lens is not None:
            self._lens.look_at(block)

    def _follow(self, frame: Frame) -> None:
        """A block that is selected comes into the lens; of a request its first one."""
        wanted = int(frame.selected_blocks[0]) if len(frame.selected_blocks) else -1
        if wanted != self._looked_at and wanted >= 0 and not self._lens.shows(wanted):
            self._lens.look_at(wanted)
        self._looked_at = wanted

    def _by_state(self, frame: Frame) -> bool:
        owners = len({r.id for r in frame.snapshot.requests if r.status not in ENDED})
        return self._num_blocks > LABELLED_UPTO and owners > MANY_OWNERS

    def restyle(self, theme: Theme) -> None:
        self.theme = theme
        self.figure.max_width = round(self.widest_cell * 16 * 1.066 * theme.scale)
        self._row_text.glyph.text_color = theme.muted
        self._row_text.glyph.text_font_size = theme.font(13)
        if self._hover is not None:
            self._hover.tooltips = self._tooltip()
        self._cursor_halo.glyph.line_color, self._cursor.glyph.line_color = theme.panel, theme.accent
        self._grid.paint(theme)
        self.host.paint(theme)
        if self._lens is not None:
            self._lens.paint(theme, self._tooltip())
            self._lens.figure.max_width = self.figure.max_width
        if self._marks is not None:
            self._marks.paint(theme)
        self._paint_legend()
        if self.frame is not None:
            self.update(self.frame)

    # -- legend, summary, twins ---------------------------------------------------------------------------------------

    def _paint_legend(self) -> None:
        """The glyphs are sent once; the live counts are CSS variables, so that a tick sends five numbers."""
        large = self._num_blocks > LABELLED_UPTO
        hue = self.theme.active if large else OWNER_HUES[0]
        self._legend.text = legend_html(self.theme, hue, with_marks=self._marks is not None)
        self._legend.styles = self._legend_counts()

    def _legend_counts(self) -> dict[str, str]:
        return {f"--{name}": f"'{count:,}'" for name, count in self._counts.items()}

    def whose(self) -> dict[str, Whose]:
        return self.host.whose() | (self._grid.whose() if isinstance(self._grid, CellGrid) else {})

    def summary(self) -> str:
        if self.frame is None:
            return "Each square is one block of KV memory."
        return summary(self.frame)

    def svg(self, theme: Theme = LIGHT) -> str:
        """The pool as one SVG, for a saved notebook; "" before the first frame."""
        return "" if self.frame is None else svg(self.frame, theme)

    def table(self) -> tuple[list[str], list[list[str]]]:
        headers = ["Owner", "Blocks", "Written slots", "Unwritten"]
        if self.frame is None:
            return headers, []
        snapshot = self.frame.snapshot
        rows = []
        for name, request in zip(self.frame.labels, snapshot.requests, strict=True):
            blocks = [b for table in request.block_tables for b in table.tolist() if b > 0]
            if blocks:
                written = int(snapshot.filled[blocks].sum())
                unwritten = int(snapshot.slots[blocks].sum()) - written
                rows.append([name, " ".join(map(str, blocks)), f"{written:,}", f"{unwritten:,}"])
        cached = snapshot.eviction_order.tolist()
        if cached:
            ids = " ".join(map(str, cached[:200])) + (" …" if len(cached) > 200 else "")
            rows.append(["cached, next to be evicted first", ids, f"{int(snapshot.filled[cached].sum()):,}", "–"])
        rows += [[f"{i}, swapped out", f"{n:,} host blocks", "–", "–"] for i, n in self.host.waiting.items()]
        return headers, capped(rows)


def legend_html(theme: Theme, hue: str, *, with_marks: bool) -> str:
    """Two lines: the states with their live counts, and the marks of a step."""
    glyphs = (
        ("empty", "empty", {"state": 0}),
        ("cached", "cached", {"state": 1}),
        ("active", "active", {"state": 2}),
        ("shared", "shared", {"state": 3, "strip": OWNER_HUES[:3], "label": "×N", "font_size": 11}),
        ("unwritten", "unwritten slots", {"state": 2, "written": 0.375}),
    )
    patterns = glyph.svg_patterns(theme)
    states = [
        legend.icon(theme, 24, 24, patterns + glyph.block_svg(theme, hue=hue, **options))
        + f'{words}<b class="{name}"></b>'
        for name, words, options in glyphs
    ]
    marks = [legend.icon(theme, 20, 20, glyph.mark_svg(theme, m)) + glyph.MARK_WORDS[m] for m in glyph.MARKS[:3]]
    counts = "".join(f".{name}::before{{content:var(--{name},'0')}}" for name, _, _ in glyphs)
    return (
        f'<style>{legend.style(theme)}{counts}</style><div aria-hidden="true">{legend.line(states)}'
        + (legend.line(marks, "In this step:") if with_marks else "")
        + "</div>"
    )
