"""A page on film: what every part of it holds at each of many moments, so that a file can show it without Python.

A *cell* is one property of one model, or one column of a source. Its *strip* says which value it has from which moment on: the
whole value, or an edit of the one before. What a reader can choose in the page (a tab, a table in the place of a drawing) is an
*axis*; a cell that heeds one has a strip for each of its values.

The views draw as they always do, and a film looks at the changes of their document: it knows no view.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from bokeh.core.serialization import Serializer
from bokeh.document import Document

WHOLE_EVERY = 32  # edits in a row at most: what a jump to any moment has to go through

Axes = dict[str, tuple[str, ...]]  # what can be chosen, and from which values


class Cell(NamedTuple):
    model: str  # its id in the document
    attr: str
    column: str | None = None  # of a source's `data`


@dataclass
class Strip:
    """`at[i]` is the moment from which `versions[i]` holds: [value], or an edit of the one before. Of a column [drop, keep,
    [row, value, …], tail]: leave its first rows out, keep so many, change single ones, add the tail. Of a text [before, after,
    middle]: keep so many characters at its begin and end, and put the middle between them."""

    at: list[int] = field(default_factory=list)
    versions: list[list[Any]] = field(default_factory=list)
    _last: Any = None
    _edits: int = 0

    def add(self, moment: int, value: Any) -> None:
        if self.at and value == self._last:
            return
        if self.at == [moment]:  # what the cell held before the first moment was drawn in full
            self.at, self.versions = [], []
        version = edit(self._last, value) if self.at and self._edits < WHOLE_EVERY else None
        self._edits = 0 if version is None else self._edits + 1
        self._last = value
        self.at.append(moment)
        self.versions.append([value] if version is None else version)

    def same_as(self, other: Strip) -> bool:
        return self.at == other.at and self.versions == other.versions


Strips = dict[tuple[str, ...], Strip]  # by what is chosen on each axis


def edit(old: Any, new: Any) -> list[Any] | None:
    """How `new` is made of `old`, as `Strip` says; None where that is no shorter, or for what is neither column nor text."""
    if isinstance(old, str) and isinstance(new, str):
        return _edit_text(old, new)
    if not isinstance(old, list) or not isinstance(new, list):
        return None
    fell_out = old and new and old[0] != new[0] and new[0] in old
    drop = old.index(new[0]) if fell_out else 0
    keep = min(len(old) - drop, len(new))
    changed = [row for row in range(keep) if old[drop + row] != new[row]]
    if 2 * (2 * len(changed) + len(new) - keep) > len(new):
        return None
    return [drop, keep, [part for row in changed for part in (row, new[row])], new[keep:]]


def _edit_text(old: str, new: str) -> list[Any] | None:
    if not old or not new or max(max(old), max(new)) > "\uffff":  # beyond, a browser counts two for one character
        return None
    most = min(len(old), len(new))
    before = bisect_left(range(1, most + 1), True, key=lambda n: old[:n] != new[:n])
    after = bisect_left(range(1, most - before + 1), True, key=lambda n: old[-n:] != new[-n:])
    middle = new[before : len(new) - after]
    return None if 2 * len(middle) > len(new) else [before, after, middle]


class Film:
    """Looks at `document` from now on; what it holds now is `json`. `like`: the film of a document made alike, whose ids its own
    models then go by here."""

    def __init__(self, document: Document, like: Film | None = None):
        self.json = document.to_json(deferred=False)
        begin = dict(_objects(self.json))
        own = sorted(begin, key=lambda model: int(model[1:]))  # in the order in which they were made
        self.ids = own if like is None else like.ids
        self._names = dict(zip(own, self.ids, strict=True))
        self._models = {self._names[model.id]: model for model in document.models}
        self._under = {model: [self._names[inner] for inner, _ in _objects(held)] for model, held in begin.items()}
        self._begin = {self._names[model]: _renamed(held, self._names) for model, held in begin.items()}
        self._serializer = Serializer(references=set(document.models), deferred=False)
        self._changed: set[tuple[str, str]] = set()
        self._held: dict[str, dict[Cell, Any]] = {}  # of each model that ever changed
        self._strips: dict[Cell, tuple[Axes, Strips]] = {}
        document.on_change(self._note)

    def _note(self, event: Any) -> None:
        model = getattr(event, "column_source", None) or getattr(event, "model", None)
        if model is not None:
            self._changed.add((model.id, event.attr))

    def take(self, moment: int, models: Iterable[str], axes: Axes, chosen: tuple[str, ...]) -> None:
        """Keep what these models hold now, drawn for `moment` with the value `chosen` of each axis."""
        self._settle()
        for model in models:
            for cell, value in self._held.get(model, {}).items():
                if cell not in self._strips:
                    self._strips[cell] = axes, {key: Strip() for key in itertools.product(*axes.values())}
                    for strip in self._strips[cell][1].values():
                        strip.add(0, self._at_first(cell))
                self._strips[cell][1][chosen].add(moment, value)

    def cells(self) -> Iterator[tuple[Cell, Axes, Strips]]:
        """Each cell that ever changed, the axes that it heeds, and its strip for every choice of theirs."""
        for cell, (axes, strips) in self._strips.items():
            yield cell, *heeded(axes, strips)

    def inside(self, model: str) -> list[str]:
        """This model, by the id that it has itself, and all that stand under it alone."""
        return [self._names[model], *self._under[model]]

    def still(self, cell: Cell) -> tuple[Axes, Strips]:
        """A cell that never changed."""
        strip = Strip()
        strip.add(0, self._at_first(cell))
        return {}, {(): strip}

    def differing(self, other: Film) -> Iterator[Cell]:
        """The cells that another film, made like this one, begins with differently."""
        for model in self.ids:
            for attr in self._begin[model].keys() | other._begin[model].keys():
                here, there = self._part(Cell(model, attr)), other._part(Cell(model, attr))
                if here != there:
                    both = zip(_cells(model, attr, here), _cells(model, attr, there), strict=True)
                    yield from (cell for (cell, value), (_, other_value) in both if value != other_value)

    def _settle(self) -> None:
        """Read what the document's changes were about."""
        changed, self._changed = self._changed, set()
        for own_id, attr in changed:
            if own_id not in self._names:
                raise RuntimeError(
                    f"{own_id}.{attr}: a view made a model while it was drawn, and a film shows none of those"
                )
            model_id = self._names[own_id]
            model = self._models[model_id]
            value = self._serializer.encode(model.lookup(attr).get_value(model))
            if attr != "data":
                value = _renamed(value, self._names)
            self._held.setdefault(model_id, {}).update(_cells(model_id, attr, value))

    def _at_first(self, cell: Cell) -> Any:
        return dict(_cells(cell.model, cell.attr, self._part(cell))).get(cell, [])

    def _part(self, cell: Cell) -> Any:
        """What the property of a cell held at first."""
        held = self._begin[cell.model]
        if cell.attr in held:
            return held[cell.attr]
        kind = type(self._models[cell.model])
        return self._serializer.encode(kind.lookup(cell.attr).class_default(kind))


def heeded(axes: Axes, strips: Strips) -> tuple[Axes, Strips]:
    """Without the axes that make no difference."""
    for place, (name, values) in enumerate(axes.items()):
        alike = all(
            strip.same_as(strips[(*key[:place], values[0], *key[place + 1 :])]) for key, strip in strips.items()
        )
        if alike:
            fewer = {key[:place] + key[place + 1 :]: strip for key, strip in strips.items() if key[place] == values[0]}
            return heeded({axis: axes[axis] for axis in axes if axis != name}, fewer)
    return axes, strips


def _cells(model: str, attr: str, value: Any) -> Iterator[tuple[Cell, Any]]:
    if attr != "data":
        yield Cell(model, attr), value
    else:
        yield from ((Cell(model, attr, column), rows) for column, rows in value["entries"])


def _objects(part: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """(id, attributes) of all models in a document's JSON."""
    if isinstance(part, dict):
        if part.get("type") == "object" and "id" in part:
            yield part["id"], part.get("attributes", {})
        part = list(part.values())
    if isinstance(part, list | tuple):
        for inner in part:
            yield from _objects(inner)


def _renamed(part: Any, names: dict[str, str]) -> Any:
    """With the models that it holds as references, under other names: a cell is a property, not what stands under it."""
    if isinstance(part, dict):
        if part.get("id") in names:
            return {"id": names[part["id"]]}
        return {key: _renamed(value, names) for key, value in part.items()}
    return [_renamed(inner, names) for inner in part] if isinstance(part, list | tuple) else part
