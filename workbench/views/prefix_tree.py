"""The prefix cache as a tree: one chip a block, x = tokens from the start of the text, a row a branch.

Each text is headed by its first words and the request that computed it. A chip says who reads the block (×N where several
do); a hatched one has no reader and carries its place in the order of eviction. Below stands what the latest requests found,
and why they found no more. The tree is what the engine's cache says of its blocks, whichever kind of cache it is.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
from bokeh.events import Tap
from bokeh.layouts import column
from bokeh.models import Div, FixedTicker, Range1d
from kvscope.engine.events import Event, EventKind
from kvscope.engine.outputs import RequestOutput
from kvscope.engine.snapshot import ALONE, NOT_CACHED, ROOT, BlockState

from ..markup import ITEM, chip, esc, one_stop, plural
from ..sentences import Context, sentence
from ..theme import LIGHT, Theme
from . import glyph
from .base import Frame, View, Whose, capped, empty_source, font, plain_figure, replace_if_changed
from .block_chips import SIDE, ChipGrid
from .forest import Forest, lay_out
from .html import Pace

MAX_ROWS, MAX_COLUMNS = 32, 48
_ROW_HEIGHT, _HEAD = 23, 24  # px
_PLACES = 99  # of the order of eviction that are written into chips
_PLACE_LABEL = 1 << 50  # above all codes of `glyph.label_codes`
_LOOKUPS = 6  # of the latest requests
_SPECIAL = re.compile(r"<\|im_start\|>\w*|<\|[^|>]*\|>|</?s>|\s+")  # of the usual chat templates


class PrefixTree(View):
    """`texts` and `decode` give the first words of a text; without them its request's first words stand for it."""

    title = "Prefix cache"
    needs = ("texts", "decode", "stylesheets")

    def __init__(
        self,
        theme: Theme = LIGHT,
        *,
        texts: Callable[[int], RequestOutput | None] = lambda request_id: None,
        decode: Callable[[int], str] = str,
        stylesheets: Sequence = (),
        **callbacks,
    ):
        super().__init__(theme, **callbacks)
        self._texts, self._decode = texts, decode
        self.heads = empty_source("y", "text")
        self.twigs = empty_source("xs", "ys")
        self.tails = empty_source("x", "y", "text")
        self.found = Div(stylesheets=list(stylesheets), sizing_mode="stretch_width", margin=0, disable_math=True)
        self._pace = Pace()
        self._build()
        self.reset()

    def reset(self) -> None:
        self._context = Context()
        self._words: dict[tuple[int, int], str] = {}  # (block, generation) -> how its text begins
        self._lookups: deque[tuple[Event, int, int, str]] = deque(maxlen=_LOOKUPS)
        self._forest = Forest([], {}, 0, 0)
        self._grid = np.zeros((0, 0), np.int64)
        self._pace.reset()

    # -- building -----------------------------------------------------------------------------------------------------

    def _build(self) -> None:
        theme = self.theme
        self.figure = fig = plain_figure(
            theme, x_range=Range1d(-0.1, 1), y_range=Range1d(2, -0.06), height=80, x_axis_location="above", min_border=0,
        )  # fmt: skip
        fig.yaxis.visible = False
        fig.xaxis.ticker = self._ticker = FixedTicker()
        self._twigs = fig.multi_line("xs", "ys", source=self.twigs, line_width=1.6)
        self._chips = ChipGrid(fig, theme, codes=self._codes, words=self._label, hatched=True, middle=0.54)
        self._head_text = fig.text(
            0.02, "y", text="text", source=self.heads, text_font=font(), text_baseline="bottom", y_offset=-4
        )
        self._tail_text = fig.text("x", "y", text="text", source=self.tails, text_font=font(), text_baseline="middle")
        self.sources = self._chips.sources | {"heads": self.heads, "twigs": self.twigs, "tails": self.tails}
        fig.on_event(Tap, self._tapped)
        self.root = column(fig, self.found, sizing_mode="stretch_width", margin=0, spacing=0)
        self.restyle(theme)

    def restyle(self, theme: Theme) -> None:
        self.theme = theme
        fig = self.figure
        fig.xaxis.major_label_text_color = theme.muted
        fig.xaxis.major_label_text_font_size = theme.font(12.5)
        self._chips.paint(theme)
        self._twigs.glyph.line_color = theme.ink
        for text, size in ((self._head_text, 13.5), (self._tail_text, 12.5)):
            text.glyph.text_color, text.glyph.text_font_size = theme.muted, theme.font(size)
        self._head_text.glyph.text_color = theme.ink
        if self.frame is not None:
            self._draw(self.frame)

    # -- one frame ----------------------------------------------------------------------------------------------------

    def update(self, frame: Frame) -> None:
        self.frame = frame
        self._learn(frame)
        if self._pace.due(frame):
            self._draw(frame)

    def _learn(self, frame: Frame) -> None:
        """What the latest requests found, from the events; the second of a hit and a miss says what was missing."""
        for event in frame.events:
            self._context.learn((event,))
            if event.kind not in (EventKind.CACHE_HIT, EventKind.CACHE_MISS):
                continue
            n = event.numbers
            if event.kind is EventKind.CACHE_HIT:
                entry = event, int(n["cached_tokens"]), int(n["prompt_tokens"]), ""
            else:
                why = sentence(event, self._context).headline.partition(" because ")[2].rstrip(".")
                entry = event, int(n["matched_tokens"]), int(n["prompt_tokens"]), why
                last = self._lookups[-1][0] if self._lookups else None
                if last is not None and (last.step, last.request_id, last.kind) == (event.step, event.request_id, EventKind.CACHE_HIT):  # fmt: skip
                    self._lookups.pop()
            self._lookups.append(entry)
        self._context.learn(snapshot=frame.snapshot)

    def _draw(self, frame: Frame) -> None:
        forest = lay_out(frame.snapshot, most_rows=MAX_ROWS, most_columns=MAX_COLUMNS)
        columns = max((b.column + len(b.blocks) for b in forest.branches), default=0)
        self._forest = forest
        self._grid = np.full((forest.num_rows, columns), -1, np.int64)
        for branch in forest.branches:
            self._grid[branch.row, branch.column : branch.column + len(branch.blocks)] = branch.blocks
        self._size(max(1, forest.num_rows), max(12, columns))
        self._chips.update(frame, self._grid)
        self._draw_words(frame, forest)
        lookups = "".join(self._lookup(frame, *entry) for entry in reversed(self._lookups))
        html = (
            '<p class="sum" style="margin-top:10px">What the latest requests found</p>'
            + one_stop("line", "Lookups", lookups)
            if lookups
            else ""
        )
        if self.found.text != html:
            self.found.text = html

    def _size(self, rows: int, columns: int) -> None:
        columns = -(-(columns + 2) // 4) * 4  # room for the words behind the last chip
        fig, size = self.figure, self._tokens_a_block()
        height = self.theme.px(_HEAD + _ROW_HEIGHT * rows)
        if (fig.height, fig.y_range.start) != (height, rows):
            fig.height, fig.y_range.start = height, rows
        if fig.x_range.end != columns:
            fig.x_range.end = columns
            every = 4 if columns <= 32 else 8
            ticks = list(range(0, columns, every))
            fig.xaxis.major_label_overrides = {t: f"{t * size:,}" if t else "token 0" for t in ticks}
            self._ticker.ticks = ticks
        self._chips.show_ids(columns <= 40, 12 if columns <= 24 else 11)

    def _tokens_a_block(self) -> int:
        """Of those that stand in chains, which belong to groups without a window."""
        snapshot = self.frame.snapshot
        chained = np.flatnonzero(snapshot.parent >= ROOT)
        return int(snapshot.slots[chained[0]]) if len(chained) else snapshot.block_size

    def _draw_words(self, frame: Frame, forest: Forest) -> None:
        snapshot = frame.snapshot
        replace_if_changed(self.heads, {
            "y": [row + 1.0 for row in forest.headings],
            "text": [self._heading(frame, block) for block in forest.headings.values()],
        })  # fmt: skip
        xs, ys = [], []
        for branch in forest.branches:
            if branch.parent_row >= 0:
                x = branch.column - 0.03
                xs.append([x, x, branch.column + 0.04])
                ys.append([branch.parent_row + 0.9, branch.row + 0.5, branch.row + 0.5])
        replace_if_changed(self.twigs, {"xs": xs, "ys": ys})
        x, y, text = [], [], []
        for branch in forest.branches:
            last = branch.blocks[-1]
            words = ["…"] if branch.goes_on else []
            if snapshot.block_state[last] == BlockState.CACHED:
                words.append(f"idle {snapshot.step - snapshot.last_used_step[last]}")
            if words:
                x.append(branch.column + len(branch.blocks) + 0.12)
                y.append(branch.row + 0.5)
                text.append(" ".join(words))
        replace_if_changed(self.tails, {"x": x, "y": y, "text": text})

    def _heading(self, frame: Frame, block: int) -> str:
        computed_for = int(frame.snapshot.computed_for[block])
        words = self._opening(frame, block, computed_for)
        who = f"first computed for request {computed_for}" if computed_for >= 0 else ""
        return f"{words} {who}".strip()

    def _opening(self, frame: Frame, block: int, computed_for: int) -> str:
        key = block, int(frame.snapshot.generation[block])
        if key not in self._words:
            output = self._texts(computed_for)
            if output is None or not output.prompt_token_ids:
                return self._context.opening(computed_for).replace("the same text", "A text")
            tokens = output.prompt_token_ids[: max(24, frame.snapshot.block_size)]
            text = _SPECIAL.sub(" ", "".join(self._decode(token) for token in tokens)).split()
            if len(self._words) > 4 * MAX_ROWS:
                del self._words[next(iter(self._words))]
            self._words[key] = f"“{' '.join(text[:7])} …”"
        return self._words[key]

    # -- what chips say -----------------------------------------------------------------------------------------------

    def _codes(self, frame: Frame) -> np.ndarray:
        codes = glyph.label_codes(frame, "owner")
        order = frame.snapshot.eviction_order
        codes[order] = 0
        codes[order[:_PLACES]] = _PLACE_LABEL + np.arange(1, 1 + min(_PLACES, len(order)))
        self._names = dict(zip(glyph.sequence_codes(frame).tolist(), frame.labels, strict=True))
        return codes

    def _label(self, code: int) -> str:
        return f"{code - _PLACE_LABEL}." if code > _PLACE_LABEL else glyph.label_text(code, "owner", self._names)

    def _lookup(self, frame: Frame, event: Event, found: int, asked: int, why: str) -> str:
        share = 100 * found / max(1, asked)
        reason = f" No more because {esc(why)}." if why and found else f" Because {esc(why)}." if why else ""
        dimmed = " dim" if frame.selection is not None and event.request_id not in frame.selected_requests else ""
        return (
            f'<div class="row{dimmed}" data-r="{event.request_id}" data-e="{event.index}" {ITEM} role="button">'
            f"{chip(str(event.request_id), event.request_id, frame.slots)}<span><b>{share:.0f} %</b>: {found:,} of "
            f"{asked:,} tokens.<em>{reason}</em></span></div>"
        )

    def _tapped(self, event: Tap) -> None:
        if self.frame is None or event.x is None or event.y is None:
            return
        row, place = int(event.y // 1), int(event.x // 1)
        if not (0 <= row < self._grid.shape[0] and 0 <= place < self._grid.shape[1]) or self._grid[row, place] < 0:
            return
        if event.x - place > SIDE:
            return
        self.choose("block", int(self._grid[row, place]))

    # -- words --------------------------------------------------------------------------------------------------------

    @property
    def empty(self) -> bool:
        return not self._forest.branches

    def whose(self) -> dict[str, Whose]:
        return self._chips.whose()

    def summary(self) -> str:
        if self.frame is None or not (self.frame.snapshot.parent != NOT_CACHED).any():
            return "No text can be found in the cache yet. A block can be found when it is full and its request has gone on."
        parent = self.frame.snapshot.parent
        alone = int((parent == ALONE).sum())
        text = f"{plural(int((parent != NOT_CACHED).sum()), 'block')} can be found by their text. Branches start where texts differ; hatched blocks have no reader and are evicted in the numbered order."  # fmt: skip
        if alone:
            text += f" {alone:,} of layers with a window stand for themselves and are not drawn."
        if self._forest.num_left_out:
            text += f" {self._forest.num_left_out:,} more are not drawn."
        return text

    def table(self) -> tuple[list[str], list[list[str]]]:
        headers = ["Block", "From token", "Readers", "Hits", "Idle", "Evicted as", "Computed for", "Text"]
        if self.frame is None:
            return headers, []
        snapshot = self.frame.snapshot
        place = {block: i for i, block in enumerate(snapshot.eviction_order.tolist(), 1)}
        heads = sorted(self._forest.headings.items())
        rows = []
        for branch in self._forest.branches:
            root = [block for row, block in heads if row < branch.row][-1]
            opening = self._opening(self.frame, root, int(snapshot.computed_for[root]))
            for i, block in enumerate(branch.blocks):
                idle = snapshot.step - int(snapshot.last_used_step[block]) if block in place else 0
                rows.append([
                    str(block), f"{(branch.column + i) * int(snapshot.slots[block]):,}", str(snapshot.ref_count[block]),
                    str(snapshot.num_hits[block]), plural(idle, "step") if block in place else "–",
                    f"{place[block]}." if block in place else "–", str(snapshot.computed_for[block]), opening,
                ])  # fmt: skip
        return headers, capped(rows)
