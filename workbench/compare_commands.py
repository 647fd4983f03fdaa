"""What the buttons, keys and forms of a comparison's page do: the same methods that a cell can call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvscope.engine.events import EventKind

from .controls import sentence_of
from .scenarios import scenario
from .views.base import Selection

if TYPE_CHECKING:
    from .comparison import Comparison

UNTIL = {
    "eviction": EventKind.EVICTED, "preemption": EventKind.PREEMPTED, "copy": EventKind.COPIED, "finish": EventKind.FINISHED,
}  # fmt: skip


class CompareCommands:
    """Obeys the page's messages for one comparison."""

    def __init__(self, comparison: Comparison):
        self._cmp, self._choices = comparison, comparison.choices
        self._acts = {
            "toggle": self._toggle,
            "step": self._step,
            "back": lambda: self._look(-1),
            "first": lambda: comparison.goto(0),
            "now": lambda: comparison.goto(comparison.turn),
            "clear": lambda: self._choices.toggle(self._choices.selection),
            "previous": lambda: self._move(-1),
            "next": lambda: self._move(1),
            "tables": lambda: self._flip("all_tables"),
            "room": lambda: self._flip("room"),
            "theme": self._theme,
            "trace": lambda: self._flip("trace_open"),
        }
        self._kinds = {
            "do": lambda what: self._acts[what]() if what in self._acts else None,
            "submit": self._submit,
            "table": lambda view: self._choices.tables.symmetric_difference_update({view}),
            "label": lambda kind: setattr(self._choices, "label", kind),
            "select": lambda kind, number: self._choices.toggle(Selection(kind, int(number))),
            "pace": lambda pace: setattr(comparison, "pace", pace),
            "speed": lambda text: setattr(comparison, "speed", float(text) if text else None),
            "until": lambda kind: comparison._play(None, UNTIL[kind]),
            "hello": self._hello,
        }

    def run(self, kind: str, *values: Any) -> None:
        """Do what one message asks; unknown messages are ignored, errors are told on the page."""
        act = self._kinds.get(kind)
        if act is None:
            return
        try:
            act(*values)
        except Exception as error:  # whatever a method refuses is for the person at the screen
            self._choices.note = ("warn", sentence_of(error))

    def _toggle(self) -> None:
        if self._cmp.state == "running":
            self._cmp._wanted.clear()  # the turn that runs now may take a while, and this thread draws the page
        else:
            self._cmp.resume()

    def _step(self) -> None:
        at = self._cmp.looking_at
        if at is not None:
            self._look(1)
        elif self._cmp.state != "running":
            self._cmp._play(1, None)

    def _look(self, by: int) -> None:
        at = self._cmp.looking_at
        self._cmp.goto((self._cmp.turn if at is None else at) + by)

    def _move(self, by: int) -> None:
        requests = [r.id for side in self._cmp.sides for r in side.tally.snapshot.requests]
        self._choices.move(sorted(set(requests)), by)

    def _flip(self, name: str) -> None:
        setattr(self._choices, name, not getattr(self._choices, name))

    def _theme(self) -> None:
        self._flip("dark")
        self._choices.theme_chosen = True

    def _hello(self, facts: dict[str, Any]) -> None:
        if not self._choices.theme_chosen:
            self._choices.dark = bool(facts.get("dark"))

    def _submit(self, values: dict[str, str]) -> None:
        chosen = scenario(str(values.get("scenario", "")))
        self._cmp.submit(chosen)
        self._choices.note = ("ok", f"{chosen.title}: on every engine. {chosen.sentence}")
        self._cmp.resume()
