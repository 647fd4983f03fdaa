"""The page of a comparison: numbers in paired bars, then each side's pool and timeline, next to each other.

It is a `Screen` like a workbench's, with a tick that reads every side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from bokeh.models import Column, InlineStyleSheet

from . import stylesheet
from .compare_header import CompareHeader
from .export import twin_html
from .layout import Screen
from .selection import Choices
from .stylesheet import NARROW
from .tick import Tick
from .views.base import Selection
from .views.compare_numbers import CSS, CompareNumbers
from .views.header import Status
from .views.reserved_map import ReservedMap
from .views.timeline import Timeline

if TYPE_CHECKING:
    from .comparison import Comparison

_SIDES_CSS = f""":host{{display:grid;gap:12px;grid-template-columns:minmax(0,1fr);align-items:start;width:auto;margin-top:12px}}
@container kv (min-width:{NARROW}px){{:host{{grid-template-columns:repeat(auto-fit,minmax(420px,1fr))}}}}"""
_FORM_CSS = """.cmpform{display:flex;flex-wrap:wrap;gap:8px 12px;align-items:end;padding:0 0 8px}
.cmpform label{display:grid;gap:2px;font-size:13.5px;color:var(--muted)} .cmpform select{width:auto}"""


class CompareTick(Tick):
    """The tick of side A, with those of all sides as `sides`. `steps`: where each side is looked at; None: the newest."""

    def __init__(self, sides: Sequence[Any], selection: Selection | None, steps: Sequence[int] | None):
        shown = sides if steps is None else [side.at(step) for side, step in zip(sides, steps, strict=True)]
        super().__init__(shown[0], selection, sides[0].slots)
        rest = [Tick(engine, selection, side.slots) for engine, side in zip(shown[1:], sides[1:], strict=True)]
        self.sides: list[Tick] = [self, *rest]
        self.asked = tuple(tick.asked for tick in self.sides) if rest else self.asked


def status(comparison: Comparison, error: tuple[str, str]) -> Status:
    """What the header says besides the frames."""
    return Status(
        at=comparison.looking_at, newest=comparison.turn, engine=comparison.state, speed=comparison.speed, error=error[0],
        traceback=error[1], closed=comparison.closed, unit="turn", has_parts=False,
    )  # fmt: skip


class CompareScreen(Screen):
    """All views of a comparison on one page."""

    def __init__(self, choices: Choices, on_message: Callable[..., None], *, sides: Sequence[Any], **options: Any):
        self._sides = sides
        self._extra = InlineStyleSheet()
        super().__init__(choices, on_message, **options)

    def _make_header(self) -> CompareHeader:
        header = CompareHeader(self._theme, self._sheets, sides=self._sides)
        header.form.stylesheets = [*header.form.stylesheets, self._extra]
        return header

    def _page(self) -> Column:
        self._side_of: list[int] = []
        self._sheets["sides"] = InlineStyleSheet()
        self._dress()
        numbers = CompareNumbers(self._theme, sides=self._sides, stylesheets=[self._sheets["parts"], self._extra])
        top = self._add(0, "numbers", numbers)
        columns = []
        for i, side in enumerate(self._sides):
            title = f"{side.letter}. {side.name}"
            pool = ReservedMap(self._theme, name=title, sentence=side.sentence, on_select=self._on_select)
            timeline = Timeline(self._theme, on_select=self._on_select)
            columns.append(self._column(self._add(i, "block_map", pool), self._add(i, "timeline", timeline)))
        return self._outer(self.header.root, self.note, top, self._grid("sides", *columns), self.header.foot)

    def _add(self, side: int, name: str, view: Any) -> Column:
        self._side_of.append(side)
        return self._panel(name, view)

    def _update_panels(self, tick: Any, *, everything: bool) -> None:
        force = everything or tick.snapshot.state != "running"
        for panel, side in zip(self.panels, self._side_of, strict=True):
            panel.update(tick.sides[side], self.choices, force=force)

    def _restyle(self, theme: Any) -> None:
        super()._restyle(theme)
        self._dress()

    def _dress(self) -> None:
        self._extra.css = stylesheet.scaled(CSS + _FORM_CSS, self._theme.scale)
        self._sheets["sides"].css = stylesheet.scaled(_SIDES_CSS, self._theme.scale)

    def saved_copy(self, tick: Any) -> str:
        return twin_html(self._twin, self.header, [panel.view for panel in self.panels])
