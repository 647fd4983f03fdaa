"""A recording filmed: the workbench's own screen, drawn at every moment, for every choice that a file lets its reader make.

What is filmed apart from the step: the player's buttons while it plays and at each speed, the tabs, each panel as a drawing and as
a table, the log with each filter, the pool with each label, and all of it in both themes. A selection is not: for that see
`film_selection`. What needs an engine is taken off the page.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
from bokeh.document import Document
from bokeh.events import Tap
from bokeh.models import Column, CustomJS, Div, InlineStyleSheet
from kvscope.engine.breakpoint import NAMES

from .film import Axes, Cell, Film, Strips, heeded
from .film_selection import FilmedSelection
from .layout import Panel, Screen
from .player import PLAYED
from .recorder import Recording, Series
from .selection import TABS, Choices
from .theme import THEMES, OwnerSlots
from .tick import Tick
from .views.block_map import BlockMap
from .views.block_tables import BlockTables
from .views.event_log import FILTERS, EventLog
from .views.eviction_queue import EvictionQueue
from .views.header import KEYS, Status, foot_html, highlighted_html
from .views.output import Output
from .views.player_html import SPEEDS, UNTIL
from .views.prefix_tree import PrefixTree
from .views.timeline import Timeline

_NO_YES = ("false", "true")
_LINES = 80  # of the log: a selection hides those that do not concern it
_PLAYER: Axes = {"playing": _NO_YES, "speed": tuple("" if speed is None else f"{speed:g}" for speed in SPEEDS)}
_TABS: Axes = {"tab": TABS, "tables": _NO_YES}
_KEYS_WITH_PYTHON = frozenset({"R", "S</kbd>, <kbd>Shift</kbd> + <kbd>S", "/", "Ctrl</kbd> <kbd>Enter"})
_ONLY_WITH_PYTHON = "[data-do=reset],[data-do=room]{display:none!important}"
_TAPPED = 'bus.tags = [Date.now() + 0.5, "tapped", hit.id, cb_obj.x, cb_obj.y];'
_HIT: dict[type, dict[str, str]] = {
    Timeline: {"rows": "rows"}, BlockTables: {"chips": "chips", "rows": "tails"}, PrefixTree: {"chips": "chips"},
    EvictionQueue: {"chips": "chips"},
}  # fmt: skip
_TAPPED_POOL = """
const [count, columns] = cursor.tags, x = Math.floor(cb_obj.x), block = Math.floor(cb_obj.y) * columns + x;
if (x >= 0 && x < columns && block >= 0 && block < count) bus.tags = [Date.now() + 0.5, "select", "block", block];
"""


def filmed(
    recording: Recording, steps: list[int], title: str, theme: str, slots: OwnerSlots
) -> tuple[dict[str, Any], str]:
    """(what the player in the file gets, the last state as plain HTML). `steps`: those that are kept, ascending."""
    takes = [_Take(theme), _Take(next(name for name in THEMES if name != theme))]
    selected = FilmedSelection()
    track = SimpleNamespace(series=_between(recording.series, steps[0], steps[-1]))
    for moment, step in enumerate(steps):
        tick = Tick(recording.at(step), None, slots, recording=track)
        for take in takes:
            take.draw(
                moment,
                tick,
                takes[0],
                Status(at=step, newest=steps[-1], engine="", file=title, closed=True, has_parts=False),
            )
        selected.take(moment, tick, takes[0].screen.panels)
    kinds = ("event", *UNTIL)
    run = {
        "document": takes[0].film.json,
        "root": takes[0].screen.root.id,
        "bus": takes[0].screen.bus.id,
        "sheet": takes[0].sheet.id,
        "taps": takes[0].taps,
        "inspectors": [panel.view.root.id for panel in takes[0].screen.panels if isinstance(panel.view, Output)],
        "options": takes[0].screen.header.tabs.id,
        "highlighted": highlighted_html("{}"),
        **selected.json(),
        "steps": steps,
        "events": {kind: _moments(recording.steps_with(*NAMES[kind][1]), steps) for kind in kinds},
        "ends": {kind: NAMES[kind][0] for kind in kinds},
        "played": PLAYED,
        "dark": theme == "dark",
        "cells": [
            [*cell, list(axes), {"|".join(key): [strip.at, strip.versions] for key, strip in strips.items()}]
            for cell, axes, strips in _in_both_themes(*takes, dark_first=theme == "dark")
        ],
    }
    return run, takes[0].screen.saved_copy(tick, "This is a recording: nothing runs here.")


class _Take:
    """One screen in one theme, drawn at moment after moment and put on film."""

    def __init__(self, theme: str):
        self.choices = Choices(dark=theme == "dark", theme_chosen=True)
        self.screen = Screen(self.choices, lambda *message: None)
        self._without_python()
        self.document = Document()
        self.document.add_root(self.screen.root)
        self.screen.add_script(self.document)
        self.film: Film

    def _without_python(self) -> None:
        screen, self.sheet = self.screen, InlineStyleSheet(css=_ONLY_WITH_PYTHON)
        for column in screen.root.select({"type": Column}):
            if screen.note in column.children:
                column.css_classes = ["kv-off"]  # the submit form
        for panel in screen.panels:
            if panel.name == "host":
                panel.root.css_classes = ["kv-off"]  # this machine, now: no part of what was recorded
        screen.panels = [panel for panel in screen.panels if panel.name != "host"]
        for panel in screen.panels:
            if isinstance(panel.view, BlockMap):
                panel.view.with_lens = False  # it could not be moved
            if isinstance(panel.view, EventLog):
                panel.view.names_readers, panel.view.shown = True, _LINES
        for part in screen.root.select({"type": Div}):
            part.stylesheets = [*part.stylesheets, self.sheet]
        screen.header.foot.text = foot_html([(key, text) for key, text in KEYS if key not in _KEYS_WITH_PYTHON])

    def _load_film(self, like: Film | None) -> None:
        """At the first moment: which models heed which choices."""
        self.taps: dict[str, dict[str, str]] = {}  # by figure the sources that say what was hit
        for view in (panel.view for panel in self.screen.panels):
            if isinstance(view, BlockMap):
                cursor = view.figure.select_one({"name": "cursor"}).data_source
                view.figure.js_on_event(
                    Tap, CustomJS(args={"bus": self.screen.bus, "cursor": cursor}, code=_TAPPED_POOL)
                )
            elif hits := {kind: view.sources[name].id for kind, name in _HIT.get(type(view), {}).items()}:
                self.taps[view.figure.id] = hits
                view.figure.js_on_event(Tap, CustomJS(args={"bus": self.screen.bus, "hit": view.figure}, code=_TAPPED))
        self.film, header = Film(self.document, like), self.screen.header
        self._player = [*self.film.inside(header.buttons.id), *self.film.inside(header.position.id)]
        self._options = self.film.inside(header.tabs.id)
        self._panels = [(panel, _axes(panel), self.film.inside(panel.root.id)) for panel in self.screen.panels]
        apart = {*self._player, *self._options, *itertools.chain.from_iterable(ids for *_, ids in self._panels)}
        messages = {*self.film.inside(self.screen.pulse.id), *self.film.inside(self.screen.bus.id)}  # not what is seen
        self._rest = [model for model in self.film.ids if model not in apart | messages]

    def draw(self, moment: int, tick: Tick, first: _Take, status: Status) -> None:
        choices, header = self.choices, self.screen.header
        self.screen.update(tick, status, everything=True)
        if not moment:
            self._load_film(None if first is self else first.film)
        self.film.take(moment, self._rest, {}, ())
        for playing, speed in itertools.product(*_PLAYER.values()):
            header.show(choices, replace(status, playing=playing == "true", speed=float(speed or 0) or None), tick)
            self.film.take(moment, self._player, _PLAYER, (playing, speed))
        for tab, tables in itertools.product(*_TABS.values()):
            choices.tab, choices.all_tables = tab, tables == "true"
            header.show(choices, status, tick)
            self.film.take(moment, self._options, _TABS, (tab, tables))
        for panel, axes, models in self._panels:
            for chosen in itertools.product(*axes.values()):
                look = dict(zip(axes, chosen, strict=True))
                choices.all_tables = look[f"table:{panel.name}"] == "true"
                choices.log_filter, choices.label = look.get("filter", "all"), look.get("label", "owner")
                self.screen.redraw(panel, tick)
                self.film.take(moment, models, axes, chosen)
        choices.tab, choices.all_tables, choices.log_filter, choices.label = TABS[0], False, "all", "owner"


def _axes(panel: Panel) -> Axes:
    """What changes a panel beside the step. The first values are those that the page begins with."""
    axes = {f"table:{panel.name}": _NO_YES}
    if panel.name == "event_log":
        axes["filter"] = tuple(FILTERS)
    if panel.name == "block_map":
        axes["label"] = tuple(panel.view.LABELS)
    return axes


def _in_both_themes(first: _Take, second: _Take, *, dark_first: bool) -> Iterator[tuple[Cell, Axes, Strips]]:
    """The cells of two screens that are made alike as those of one, with an axis more where they differ."""
    theme = {"dark": _NO_YES[::-1] if dark_first else _NO_YES}
    ours, theirs = ({cell: found for cell, *found in take.film.cells()} for take in (first, second))
    for cell in dict.fromkeys((*ours, *theirs, *first.film.differing(second.film))):
        films = ours.get(cell) or first.film.still(cell), theirs.get(cell) or second.film.still(cell)
        axes = {**theme, **films[0][0], **films[1][0]}
        strips = {}
        for key in itertools.product(*axes.values()):
            chosen = dict(zip(axes, key, strict=True))
            own, found = films[key[0] != theme["dark"][0]]
            strips[key] = found[tuple(chosen[axis] for axis in own)]
        axes, strips = heeded(axes, strips)
        if axes or any(len(strip.at) > 1 for strip in strips.values()):
            yield cell, axes, strips


def _between(series: Series, first: int, last: int) -> Series:
    inside = (series.steps >= first) & (series.steps <= last)
    return Series(**{column.name: getattr(series, column.name)[inside] for column in fields(series)})


def _moments(found: np.ndarray, steps: list[int]) -> list[int]:
    """The moments that show what came in these steps, each once."""
    inside = found[(found >= steps[0]) & (found <= steps[-1])]
    return np.unique(np.searchsorted(steps, inside)).tolist()
