"""What the buttons, keys and forms of a comparison's page do: the same methods that a cell can call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvscope.engine.breakpoint import NAMES

from .page_commands import PageCommands
from .scenarios import scenario

if TYPE_CHECKING:
    from .comparison import Comparison


class CompareCommands(PageCommands):
    """Obeys the messages of one comparison's page."""

    kinds = PageCommands.kinds | {"submit", "pace", "speed", "until"}

    def __init__(self, comparison: Comparison):
        super().__init__(comparison.choices)
        self._cmp = comparison
        self.acts |= {
            "toggle": self._toggle,
            "step": self._step,
            "back": lambda: self._look(-1),
            "first": lambda: comparison.goto(0),
            "now": lambda: comparison.goto(comparison.turn),
        }

    def _pace(self, pace: str) -> None:
        self._cmp.pace = pace

    def _speed(self, text: str) -> None:
        self._cmp.speed = float(text) if text else None

    def _until(self, kind: str) -> None:
        self._cmp._play(None, NAMES[kind][1])

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
            self._cmp._play(1)

    def _look(self, by: int) -> None:
        at = self._cmp.looking_at
        self._cmp.goto((self._cmp.turn if at is None else at) + by)

    def _requests(self) -> list[int]:
        return sorted({r.id for side in self._cmp.sides for r in side.tally.snapshot.requests})

    def _submit(self, values: dict[str, str]) -> None:
        chosen = scenario(str(values.get("scenario", "")))
        self._cmp.submit(chosen)
        self._choices.note = ("ok", f"{chosen.title}: on every engine. {chosen.sentence}")
        self._cmp.resume()
