"""One view in its frame on a page: title and sentence, drawing, text twin, and what it needs of the choices.

The sentence and the table are written at a pace that can be read; a table stands in the place of the drawing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from bokeh.models import Column, Div

from .markup import panel_head, table
from .selection import TABS, Choices
from .tick import Reader, Tick
from .views.base import View
from .views.event_log import EventLog
from .views.output import Output

HEADS_EVERY = 0.5  # seconds between refreshes of the panels' sentences while the engine runs
TABLES_EVERY = 1.0


@dataclass
class Panel:
    """A view in its frame: head, drawing, text twin. `name` is what the Table button and `Choices.tables` say."""

    name: str
    view: View
    root: Column
    head: Div | None = None
    twin: Div | None = None
    widths: frozenset[str] = frozenset({"narrow", "medium", "wide"})
    tabs: frozenset[str] = frozenset(TABS)
    reader: Reader = field(default_factory=Reader)
    looked_at: int = 0  # where the keyboard moved the lens of a pool map to
    drawn: dict[str, float] = field(default_factory=dict)

    def update(self, tick: Tick, choices: Choices, *, force: bool, drawn_at: float = -math.inf) -> None:
        frame = self.reader.read(tick, self.view, drawn_at=drawn_at)
        as_table = choices.shows_table(self.name)
        if isinstance(self.view, Output):
            self.view.as_table, self.view.sample, self.view.token = as_table, choices.sample, choices.token
        if isinstance(self.view, EventLog):
            self.view.filter = choices.log_filter
        if self.name == "block_map" and getattr(self.view, "label", choices.label) != choices.label:
            self.view.label = choices.label
        if self.name == "block_map" and self.looked_at != choices.lens:
            self.looked_at = choices.lens
            self.view.look_at(choices.lens)
        self.view.update(frame)
        if self.head is None or self.twin is None:
            return
        drawn = not as_table and not self.view.empty
        if self.twin.css_classes != classes(as_table) or self.view.root.visible != drawn:
            self.view.root.visible, self.twin.css_classes = drawn, classes(as_table)
            force = True
        if self._due("head", tick.now, HEADS_EVERY, force):
            write(self.head, self._head(choices, as_table))
        if as_table and self._due("twin", tick.now, TABLES_EVERY, force):
            write(self.twin, f'<div class="scroll">{table(*self.view.table())}</div>')

    def _due(self, what: str, now: float, every: float, force: bool) -> bool:
        if not force and now - self.drawn.get(what, -every) < every:
            return False
        self.drawn[what] = now
        return True

    def _head(self, choices: Choices, as_table: bool) -> str:
        tools = ""
        if self.name == "block_map":
            options = "".join(f"<option{' selected' * (k == choices.label)}>{k}</option>" for k in self.view.LABELS)
            tools = f'<label class="menu">Label<select data-label>{options}</select></label>'
        return panel_head(self.view.title, self.view.summary(), view=self.name, as_table=as_table, tools=tools)


def classes(shown: bool) -> list[str]:
    """Of a part that is shown, or is not."""
    return [] if shown else ["kv-off"]


def write(div: Div, text: str) -> None:
    """Change the text of a part if it differs."""
    if div.text != text:
        div.text = text
