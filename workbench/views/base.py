"""What every view shares: the frame it draws, the selection, and patches that send only the rows that changed.

A view is a function of a `Frame`: it has sources (ColumnDataSources with every column declared), a root to show, and
`update(frame)`. It never touches the engine and never owns a thread; whoever owns the document calls `update` under
one hold, and each source then sends at most one change a tick. `summary()` is the one sentence over the panel and its
alt text, `table()` its text twin. Views stand alone: without callbacks a tap simply does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from bokeh.core.property.vectorization import value
from bokeh.models import ColumnDataSource, Dodge, LinearColorMapper, LinearInterpolator, UIElement
from bokeh.plotting import figure
from kvscope.engine.events import Event
from kvscope.engine.snapshot import EngineSnapshot, RequestState

from ..theme import FONT, LIGHT, OwnerSlots, Theme, sequence_label

ENDED = frozenset({"finished", "cancelled", "failed"})
TABLE_ROWS = 200  # text twins show no more; `table()` says how many are left out


@dataclass(frozen=True, slots=True)
class Selection:
    """The one thing that is selected, in every view: a request or a block."""

    kind: str  # "request" | "block"
    id: int
    generation: int = -1  # of a block: which of its lives; −1 any


@dataclass(frozen=True)
class Frame:
    """One tick: the newest snapshot and what happened since the last frame. Derived values are computed once."""

    snapshot: EngineSnapshot
    events: Sequence[Event] = ()  # since the frame before, oldest first
    lost: int = 0  # events that fell out of the ring in between
    selection: Selection | None = None
    info: Any = None  # EngineInfo; None in tests and replays without one
    now: float = 0.0  # seconds, time.monotonic()
    slots: OwnerSlots = field(default_factory=OwnerSlots)  # shared by all views of a workbench

    def __post_init__(self) -> None:
        self.slots.update(r.id for r in self.snapshot.requests if r.status not in ENDED)

    @property
    def running(self) -> bool:
        return self.snapshot.state == "running"

    @cached_property
    def labels(self) -> list[str]:
        """What each of `snapshot.requests` is called: 3, or 3a once it has split."""
        return [label_of(r) for r in self.snapshot.requests]

    @cached_property
    def owner_slots(self) -> np.ndarray:
        """Hue slot of each of `snapshot.requests`, int64 [requests]."""
        return np.fromiter((self.slots.slot(r.id) for r in self.snapshot.requests), np.int64)

    @cached_property
    def request_ids(self) -> np.ndarray:
        return np.fromiter((r.id for r in self.snapshot.requests), np.int64)

    @cached_property
    def _readers(self) -> tuple[np.ndarray, np.ndarray]:
        """Readers of all blocks, grouped: (start of each block's readers [num_blocks + 1], reader index [sum])."""
        tables = [(i, t) for i, r in enumerate(self.snapshot.requests) for t in r.block_tables if len(t)]
        starts = np.zeros(self.snapshot.num_blocks + 1, np.int64)
        if not tables:
            return starts, np.zeros(0, np.int64)
        blocks = np.concatenate([t for _, t in tables])
        reader = np.repeat([i for i, _ in tables], [len(t) for _, t in tables])
        keep = blocks > 0  # the null block has no reader
        blocks, reader = blocks[keep], reader[keep]
        np.cumsum(np.bincount(blocks, minlength=self.snapshot.num_blocks), out=starts[1:])
        return starts, reader[np.argsort(blocks, kind="stable")]

    def readers(self, block_id: int) -> np.ndarray:
        """Indices into `snapshot.requests` of the sequences that read a block, in order of arrival."""
        starts, reader = self._readers
        return reader[starts[block_id] : starts[block_id + 1]]

    @cached_property
    def reader_codes(self) -> np.ndarray:
        """For each block a number that differs when its set of readers differs, int64 [num_blocks]; 0 without any."""
        starts, reader = self._readers
        children = np.fromiter((r.child for r in self.snapshot.requests), np.int64, len(self.snapshot.requests))
        names = ((self.request_ids * 64 + children).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)).astype(
            np.int64
        )  # spread, so that sums differ
        total = np.concatenate([np.zeros(1, np.int64), np.cumsum(names[reader])])
        return np.diff(total[starts])

    @cached_property
    def selected_requests(self) -> frozenset[int]:
        """Ids of the requests that the selection concerns; empty without one."""
        if self.selection is None:
            return frozenset()
        if self.selection.kind == "request":
            return frozenset({self.selection.id})
        if not 0 <= self.selection.id < self.snapshot.num_blocks:
            return frozenset()
        return frozenset(int(self.request_ids[i]) for i in self.readers(self.selection.id))

    @cached_property
    def selected_blocks(self) -> np.ndarray:
        """Ids of the blocks that get the accent ring, int64."""
        if self.selection is None:
            return np.zeros(0, np.int64)
        if self.selection.kind == "block":
            inside = 0 <= self.selection.id < self.snapshot.num_blocks
            return np.array([self.selection.id] if inside else [], np.int64)
        return self._blocks_of(self.selected_requests)

    @cached_property
    def lit_blocks(self) -> np.ndarray | None:
        """bool [num_blocks]: blocks that stay at full strength; None without a selection."""
        if self.selection is None:
            return None
        lit = np.zeros(self.snapshot.num_blocks, bool)
        lit[self.selected_blocks] = True
        lit[self._blocks_of(self.selected_requests)] = True
        return lit

    def choosing(self, selection: Selection | None) -> Frame:
        """This frame with another selection; what does not depend on it is not computed again."""
        frame = replace(self, selection=selection)
        kept = ("labels", "owner_slots", "request_ids", "_readers", "reader_codes")
        frame.__dict__.update({name: self.__dict__[name] for name in kept if name in self.__dict__})
        return frame

    def _blocks_of(self, request_ids: frozenset[int]) -> np.ndarray:
        tables = [t for r in self.snapshot.requests if r.id in request_ids for t in r.block_tables]
        blocks = np.unique(np.concatenate(tables)) if tables else np.zeros(0, np.int64)
        return blocks[blocks > 0].astype(np.int64)


def label_of(request: RequestState) -> str:
    """3 for a request, 3a to 3d for its samples once the prompt is done and it has split."""
    forked = request.num_samples > 1 and request.num_output_tokens > 0
    return sequence_label(request.id, request.child, forked=forked)


class Whose(NamedTuple):
    """Whose the rows of a source are: a page without Python dims them with it. `adds` says what dimming adds to the codes of
    a column; of "bar", "alpha" and "hatch" a code of 0 stays."""

    kind: str  # "request" | "block"
    ids: list[int]  # of each row; −1 nobody's
    adds: dict[str, int]


class View:
    """Base of all views. A subclass builds `self.sources` and `self.root`, and implements the four methods below."""

    title = ""
    needs: tuple[str, ...] = ()  # of "texts", "decode" and "stylesheets": options that a page gives it

    def __init__(
        self,
        theme: Theme = LIGHT,
        *,
        on_select: Callable[[Selection | None], None] | None = None,
    ):
        self.theme = theme
        self.on_select = on_select or (lambda selection: None)
        self.sources: dict[str, ColumnDataSource] = {}
        self.root: UIElement
        self.frame: Frame | None = None

    @property
    def empty(self) -> bool:
        """Nothing to draw yet: the panel then shows the summary alone, never a bare axis."""
        return False

    @property
    def source(self) -> ColumnDataSource:
        """The first source: the one that holds what the view is about."""
        return next(iter(self.sources.values()))

    def choose(self, kind: str, number: int) -> None:
        """What a tap on a request or a block does: select it, or drop the selection where it is selected already."""
        generation = int(self.frame.snapshot.generation[number]) if kind == "block" else -1
        chosen = Selection(kind, number, generation)
        self.on_select(None if self.frame.selection == chosen else chosen)

    def update(self, frame: Frame) -> None:
        """Draw `frame`. Called by the owner of the document, under one hold."""
        raise NotImplementedError

    def reset(self) -> None:
        """Forget what was kept of earlier frames, because time went back or another recording is shown: the next frame
        brings every event from the start on, and draws what a page would show that had followed step by step. Sources may
        keep their rows until then. A view that draws a frame from its snapshot alone keeps nothing."""

    def whose(self) -> dict[str, Whose]:
        """By name, the sources that a selection dims row by row, as they were drawn last."""
        return {}

    def summary(self) -> str:
        """The sentence over the panel; also its alt text."""
        raise NotImplementedError

    def table(self) -> tuple[list[str], list[list[str]]]:
        """The text twin: headers and at most TABLE_ROWS rows."""
        raise NotImplementedError

    def restyle(self, theme: Theme) -> None:
        """Repaint in place with another theme; no figure is rebuilt."""
        raise NotImplementedError


def capped(rows: list[list[str]]) -> list[list[str]]:
    """The first TABLE_ROWS rows, and one more that says how many are left out."""
    if len(rows) <= TABLE_ROWS:
        return rows
    return [*rows[:TABLE_ROWS], [f"and {len(rows) - TABLE_ROWS:,} more", *[""] * (len(rows[0]) - 1)]]


class Rows:
    """The columns of one source that change row by row; `flush()` sends one patch with only the rows that differ.

    Each column is compared through `codes`, an integer array with one entry a row, and only changed rows are turned
    into what the browser needs: through a palette (a sequence, indexed by code) or a function (rows, codes) -> values.
    """

    _RUN = 6  # from this many neighbours on, one slice is shorter than single rows

    def __init__(self, source: ColumnDataSource):
        self.source = source
        self._codes: dict[str, np.ndarray] = {}
        self._patch: dict[str, list[tuple[int | slice, Any]]] = {}
        self._fresh: dict[str, list] | None = None

    def set(self, column: str, codes: np.ndarray, encode: Sequence | Callable | None = None) -> None:
        old = self._codes.get(column)
        new_rows = old is None or len(old) != len(codes)
        rows = np.arange(len(codes)) if new_rows else np.flatnonzero(codes != old)
        if not len(rows):
            return
        new = codes[rows]
        if encode is None:
            values = new.tolist()
        elif callable(encode):
            values = encode(rows, new)
        else:
            values = [encode[code] for code in new.tolist()]
        self._codes[column] = codes.copy()
        self._patch[column] = self._pack(rows, values)

    def know(self, column: str, codes: np.ndarray) -> None:
        """Take `codes` as already sent, because the whole source was just replaced."""
        self._codes[column] = codes.copy()

    def _pack(self, rows: np.ndarray, values: list) -> list[tuple[int | slice, Any]]:
        edges = np.flatnonzero(np.diff(rows) > 1) + 1
        packed: list[tuple[int | slice, Any]] = []
        for start, stop in zip([0, *edges.tolist()], [*edges.tolist(), len(rows)], strict=True):
            first = int(rows[start])
            if stop - start >= self._RUN:
                packed.append((slice(first, first + stop - start), values[start:stop]))
            else:
                packed.extend(zip(range(first, first + stop - start), values[start:stop], strict=True))
        return packed

    def start(self, data: dict[str, list]) -> None:
        """Begin with other rows: the next `flush` sends all of `data`, changed by what was set since, at once."""
        self._fresh = data
        self._codes.clear()

    def flush(self) -> None:
        patch, self._patch = self._patch, {}
        if self._fresh is not None:
            data, self._fresh = self._fresh, None
            for column, changes in patch.items():
                for place, values in changes:
                    data[column][place] = values
            self.source.data = data
        elif patch:
            self.source.patch(patch)

    def forget(self, columns: Sequence[str] | None = None) -> None:
        """Send these columns (default: all) in full next time; used when a theme changes what the codes mean."""
        for column in list(self._codes) if columns is None else columns:
            self._codes.pop(column, None)


def empty_source(*columns: str) -> ColumnDataSource:
    """A source with every column declared and no rows yet."""
    return ColumnDataSource({column: [] for column in columns})


def at(column: str, shift: float) -> dict[str, Any]:
    """`column` + `shift`, added in the browser: a cell needs two numbers, not one for every edge of its parts."""
    return {"field": column, "transform": Dodge(value=shift)}


def by_code(column: str, values: Sequence) -> dict[str, Any]:
    """Code i of an integer column stands for `values[i]` (colours or numbers), looked up in the browser: a tick then
    sends small integers, and a theme changes the look-up instead of the rows."""
    codes = list(range(len(values)))
    if isinstance(values[0], str):
        return {"field": column, "transform": LinearColorMapper(palette=list(values), low=0, high=codes[-1])}
    return {"field": column, "transform": LinearInterpolator(x=codes, y=list(values))}


def relook(spec: dict[str, Any], values: Sequence) -> None:
    """Change what the codes of `by_code` stand for."""
    transform = spec["transform"]
    if isinstance(transform, LinearColorMapper):
        transform.palette = list(values)
    else:
        transform.y = list(values)


def replace_if_changed(source: ColumnDataSource, data: dict[str, Any]) -> bool:
    """Set all of `data` in one change, and only if it differs from what the source holds; for small sources."""
    held = source.data
    if held.keys() == data.keys() and all(_same(held[name], data[name]) for name in data):
        return False
    source.data = data
    return True


def patch_changed(source: ColumnDataSource, data: dict[str, list]) -> None:
    """Make a source of lists hold `data` with one change: a patch of the cells that differ, or everything when the
    number of rows did."""
    held = source.data
    count = len(next(iter(data.values())))
    if len(next(iter(held.values()))) != count:
        source.data = data
        return
    patch = {}
    for name, new in data.items():
        old = held[name]
        if new != old:
            patch[name] = [(i, new[i]) for i in range(count) if new[i] != old[i]]
    if patch:
        source.patch(patch)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return len(a) == len(b) and bool(np.all(np.asarray(a) == np.asarray(b)))
    return a == b


def font() -> Any:
    """The system stack, as a Bokeh value (a bare string would be read as a column name)."""
    return value(FONT)


_CLEAR = ".bk-Canvas{background:none}"


def plain_figure(theme: Theme, **options: Any) -> figure:
    """A figure with no toolbar, grid or default tools, through which its panel is seen. One that paints its own ground
    keeps a hairline of the theme before: Bokeh clears half a pixel too little at two of its edges."""
    fig = figure(
        **{
            "toolbar_location": None,
            "tools": [],
            "output_backend": "canvas",
            "outline_line_color": None,
            "background_fill_color": None,
            "border_fill_color": None,
            "min_border": 2,
            "sizing_mode": "stretch_width",
            **options,
            "stylesheets": [_CLEAR, *options.get("stylesheets", ())],
        }
    )
    fig.grid.visible = False
    for axis in fig.axis:
        axis.axis_line_color = axis.major_tick_line_color = axis.minor_tick_line_color = None
        axis.major_label_text_font = FONT
        axis.major_label_standoff = 6
    paint_figure(fig, theme)
    return fig


def paint_figure(fig: figure, theme: Theme) -> None:
    """Axis text and grid of a figure in `theme`."""
    for axis in fig.axis:
        axis.major_label_text_color = theme.muted
        axis.major_label_text_font_size = theme.font(12.5)
    for grid in fig.grid:
        grid.grid_line_color = theme.line
