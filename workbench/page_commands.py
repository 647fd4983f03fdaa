"""What every page obeys, that of a workbench and that of a comparison: the selection, tables, labels, type and theme.

The page sends `[kind, value]` messages (see `bus`); `run` is the one place that obeys them. It runs on the thread that owns
the documents, and turns an error into a sentence on the page instead of a traceback nobody sees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .selection import Choices
from .views.base import Selection


class PageCommands:
    """A message of one of the `kinds` calls the method of that name. A subclass adds to them, and to `acts`, which says what the
    page's `data-do` names stand for."""

    kinds = frozenset({"do", "table", "label", "select", "lens", "hello"})

    def __init__(self, choices: Choices):
        self._choices = choices
        self.acts: dict[str, Callable[[], object]] = {
            "clear": lambda: choices.select(None),
            "previous": lambda: choices.move(self._requests(), -1),
            "next": lambda: choices.move(self._requests(), 1),
            "tables": lambda: self._flip("all_tables"),
            "room": lambda: self._flip("room"),
            "theme": self._theme,
            "trace": lambda: self._flip("trace_open"),
        }

    def run(self, kind: str, *values: Any) -> None:
        """Do what one message asks; unknown messages are ignored, errors are told on the page."""
        if kind not in self.kinds:
            return
        try:
            getattr(self, f"_{kind}")(*values)
        except Exception as error:  # whatever a method refuses is for the person at the screen
            self._choices.note = ("warn", sentence_of(error))

    def _requests(self) -> Sequence[int]:
        """Ids of those that `previous` and `next` go through."""
        raise NotImplementedError

    def _do(self, what: str) -> None:
        if what in self.acts:
            self.acts[what]()

    def _flip(self, name: str) -> None:
        setattr(self._choices, name, not getattr(self._choices, name))

    def _theme(self) -> None:
        self._flip("dark")
        self._choices.theme_chosen = True

    def _table(self, view: str) -> None:
        self._choices.tables ^= {view}

    def _label(self, kind: str) -> None:
        self._choices.label = kind

    def _select(self, kind: str, number: float) -> None:
        if kind in ("request", "block"):
            self._choices.toggle(Selection(kind, int(number)))

    def _lens(self, block: float) -> None:
        self._choices.lens = int(block)

    def _hello(self, facts: dict[str, Any]) -> None:
        if not self._choices.theme_chosen:
            self._choices.dark = bool(facts.get("dark"))


def sentence_of(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    text = text[0].upper() + text[1:] if text[0].isalpha() and " " in text.split("=")[0] else text
    return text if text.endswith(".") else f"{text}."
