"""What happened, newest first, one sentence a line; filters for the kinds that people look for.

A click on a line goes to its step. A selection filters the log to its request or block. Evictions of one step are one line. The log keeps 5,000 lines and
shows the newest of them; while the engine runs it is redrawn at most twice a second, paused at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from bokeh.models import Div
from kvscope.engine.events import EventKind

from ..markup import ICONS, ITEM, esc, one_stop, plural
from ..sentences import Context, Story, lines
from ..story import ICON_OF
from ..theme import LIGHT, Theme
from .base import Frame, Selection, View

KEPT = 5000
_EVERY = 0.5  # seconds between redraws while the engine runs

FILTERS: dict[str, tuple[str, frozenset[EventKind]]] = {
    "all": ("All", frozenset(EventKind)),
    "preempted": (
        "Preempted",
        frozenset({EventKind.PREEMPTED, EventKind.SWAPPED_OUT, EventKind.SWAPPED_IN, EventKind.RESUMED}),
    ),
    "evicted": ("Evicted", frozenset({EventKind.EVICTED, EventKind.CACHE_RESET})),
    "copied": ("Copied", frozenset({EventKind.COPIED, EventKind.FORKED})),
    "cache": ("Cache hits and misses", frozenset({EventKind.CACHE_HIT, EventKind.CACHE_MISS})),
    "finished": (
        "Finished",
        frozenset({EventKind.FINISHED, EventKind.CANCELLED, EventKind.FAILED, EventKind.REFUSED}),
    ),
}


class EventLog(View):
    title = "Event log"

    def __init__(
        self,
        theme: Theme = LIGHT,
        *,
        shown: int = 40,
        with_filters: bool = True,
        stylesheets: Sequence = (),
        **callbacks,
    ):
        super().__init__(theme, **callbacks)
        self.root = Div(
            text=_nothing(None, "all"),
            stylesheets=list(stylesheets),
            sizing_mode="stretch_width",
            margin=0,
            disable_math=True,
        )
        self.shown, self._with_filters = shown, with_filters
        self.names_readers = False  # whether each line says in data-of whom it concerns, for a page without Python
        self.filter = "all"
        self.reset()

    def reset(self) -> None:
        self._context = Context()
        self._lines: deque[Story] = deque(maxlen=KEPT)
        self._drawn: tuple | None = None
        self._drawn_at = -1.0
        self._fresh = False
        self.num_lost = 0

    def update(self, frame: Frame) -> None:
        self.frame = frame
        self.num_lost += frame.lost
        told = lines(frame.events, self._context)
        self._context.learn(snapshot=frame.snapshot)
        self._lines.extend(told)
        self._fresh |= bool(told)
        told_now = not frame.running and bool(self._lines) and self._lines[-1].step == frame.snapshot.step
        asked = (self.filter, frame.selection, frame.running, told_now)
        if asked == self._drawn and (not self._fresh or (frame.running and frame.now - self._drawn_at < _EVERY)):
            return
        self._drawn, self._drawn_at, self._fresh = asked, frame.now, False
        self._draw()

    def _draw(self) -> None:
        newest = self.frame.snapshot.step
        body = "".join(_line(line, newest, self.names_readers) for line in self._chosen(self.shown))
        text = (self._filters() if self._with_filters else "") + (
            one_stop("log", self.title, body) if body else _nothing(self.frame.selection, self.filter)
        )
        if self.root.text != text:
            self.root.text = text

    def _filters(self) -> str:
        buttons = "".join(
            f'<button type="button" data-filter="{name}" aria-pressed="{str(name == self.filter).lower()}">{label}'
            "</button>"
            for name, (label, _) in FILTERS.items()
        )
        return f'<div class="filters">{buttons}</div>'

    def _chosen(self, count: int) -> list[Story]:
        """The newest `count` lines that pass the filter and concern the selection, newest first."""
        kinds = FILTERS[self.filter][1]
        selection = self.frame.selection if self.frame else None
        chosen: list[Story] = []
        for line in reversed(self._lines):
            if line.kind in kinds and _concerns(line, selection):
                chosen.append(line)
                if len(chosen) == count:
                    break
        return chosen

    def restyle(self, theme: Theme) -> None:
        self.theme = theme

    def summary(self) -> str:
        were = "was" if self.num_lost == 1 else "were"
        lost = f" {plural(self.num_lost, 'older event')} {were} dropped before this view read." if self.num_lost else ""
        return f"Newest first. A click on a line goes to its step.{lost}"

    def table(self) -> tuple[list[str], list[list[str]]]:
        rows = [[f"{s.step:,}", s.kind.replace("_", " "), f"{s.headline} {s.consequence}"] for s in self._chosen(200)]
        return ["Step", "Kind", "Sentence"], rows


def _nothing(selection: Selection | None, kind: str) -> str:
    what = "No event" if kind == "all" else f"No event of the kind “{FILTERS[kind][0]}”"
    where = f" of {selection.kind} {selection.id}" if selection is not None else ""
    return f'<p class="sum" style="padding:8px 4px">{what}{where} yet.</p>'


def _concerns(line: Story, selection: Selection | None) -> bool:
    return selection is None or f"{selection.kind[0]}{selection.id}" in concerned(line)


def concerned(line: Story) -> set[str]:
    """r6 and b95 for request 6 and block 95."""
    return {
        f"{kind}{int(number)}"
        for e in line.events
        for kind, number in (
            ("r", e.request_id), ("r", e.numbers.get("needed_by", -1)), ("b", e.block_id), ("b", e.numbers.get("source", -1))
        )
        if number >= 0
    }  # fmt: skip


def _line(line: Story, newest: int, names_readers: bool) -> str:
    of = f' data-of="{" ".join(sorted(concerned(line)))}"' if names_readers else ""
    return (
        f'<div class="e{" on" if line.step == newest else ""}" data-step="{line.step}" data-e="{line.events[0].index}"{of} {ITEM} '
        f'role="button"><time>{line.step:,}</time><span class="ic">'
        f"{ICONS[ICON_OF.get(line.kind, 'quiet')]}</span><span>{esc(line.headline)} <em>{esc(line.consequence)}</em>"
        "</span></div>"
    )
