"""What a file holds so that its reader can select something: which blocks each request reads, whose the rows of the sources are,
and the inspector of each request and block at every moment. With it the player in the file does what the views do live.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvscope.engine.snapshot import EngineSnapshot

from .film import Strip
from .panel import Panel
from .tick import Reader, Tick
from .views.base import ENDED, Selection, View
from .views.block_map import LABELLED_UPTO
from .views.output import Output
from .views.timeline import Timeline

_SHOWN = 900  # characters of a text


class FilmedSelection:
    """`take` at every moment, after the panels have been drawn for it; then `json`."""

    def __init__(self) -> None:
        self._tick: Tick
        self._reader = Reader()
        self._inspector = Output(
            texts=lambda number: self._tick.output(number),
            decode=lambda token: self._tick.decode(token),
            shown=_SHOWN,
        )
        self._reads: dict[int, Strip] = {}
        self._cards: dict[str, Strip] = {}
        self._whose: dict[tuple[str, str, str], Strip] = {}
        self._adds: dict[tuple[str, str, str], dict[str, int]] = {}
        self._reasons: dict[str, dict[int, Strip]] = {}
        self._live: set[int] = set()

    def take(self, moment: int, tick: Tick, panels: Iterable[Panel]) -> None:
        self._note_reads(moment, tick.snapshot)
        for panel in panels:
            self._note_whose(moment, panel.view)
        self._note_cards(moment, tick)

    def _note_reads(self, moment: int, snapshot: EngineSnapshot) -> None:
        """Which blocks each request reads."""
        now: dict[int, set[int]] = {number: set() for number in self._reads}
        for request in snapshot.requests:
            now.setdefault(request.id, set()).update(b for t in request.block_tables for b in t.tolist() if b > 0)
        for number, blocks in now.items():
            self._note(self._reads, number, moment, sorted(blocks), before=[])

    def _note_whose(self, moment: int, view: View) -> None:
        for name, (kind, ids, adds) in view.whose().items():
            source = view.sources[name]
            if source.document is None:  # of a part that this page has not
                continue
            key = source.id, kind, view.sources["chosen"].id if name in ("cells", "chips") else ""
            self._adds[key] = {column: step for column, step in adds.items() if column in source.data}
            self._note(self._whose, key, moment, list(ids), before=[])
        if isinstance(view, Timeline):
            strips, reasons = self._reasons.setdefault(view.why.id, {}), view.reasons()
            for number in strips.keys() | reasons.keys():
                self._note(strips, number, moment, list(reasons.get(number, ())), before=[])

    def _note_cards(self, moment: int, tick: Tick) -> None:
        self._tick, view = tick, self._inspector
        frame = self._reader.read(tick, view)
        view.update(frame)
        live = {request.id for request in tick.snapshot.requests if request.status not in ENDED}
        for number in sorted(live | self._live):  # of one that has just ended the last words too
            output = tick.output(number)
            for sample in range(max(1, len(output.outputs)) if output is not None else 1):
                view.sample = sample
                card = view.card(frame.choosing(Selection("request", number)))
                self._note(self._cards, f"request {number} {sample}", moment, card)
        self._live, view.sample = live, 0
        if tick.snapshot.num_blocks <= LABELLED_UPTO:
            for block in range(tick.snapshot.num_blocks):
                self._note(
                    self._cards, f"block {block} 0", moment, view.card(frame.choosing(Selection("block", block)))
                )

    @staticmethod
    def _note(strips: dict, key: Any, moment: int, value: Any, *, before: Any = "") -> None:
        if key not in strips:
            strips[key] = Strip()
            strips[key].add(0, before)
        strips[key].add(moment, value)

    def json(self) -> dict[str, Any]:
        """What the player reads, by the names that it knows it by."""
        return {
            "reads": _plain(self._reads),
            "cards": _plain(self._cards),
            "whose": [[*key, self._adds[key], strip.at, strip.versions] for key, strip in self._whose.items()],
            "reasons": {source: _plain(strips) for source, strips in self._reasons.items()},
        }


def _plain(strips: dict[Any, Strip]) -> dict[Any, list]:
    return {key: [strip.at, strip.versions] for key, strip in strips.items()}
