"""Some moments one after the other, as columns: what a recording is made of, in memory and in a file."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..events import Event
from .delta import BLOCK, CAUSES, KINDS, STATES, TOTALS, Delta, Met, stacked
from .words import Words

# What each moment has beside its rows: name: dtype.
MOMENT = {
    "step": "<i4", "time": "<f8", "state": "|u1", "leader": "<i4", "has_line": "|u1", "first_event": "<i8",
    **dict.fromkeys(TOTALS, "<i8"),
}  # fmt: skip

SPAN = 64  # moments that become columns together


class Span:
    """Moments `first` … `first + len − 1`, counted from the start of the recording. Never changed once made.

    `tables[name]`: all rows, [rows, columns]; `counts[name]`: how many of them belong to each moment, int32 [moments];
    `rows`: BLOCK, one for each row of "blocks"; `met`: sequences seen for the first time, with the moment.
    """

    def __init__(
        self,
        first: int,
        moments: dict[str, np.ndarray],
        tables: dict[str, np.ndarray],
        counts: dict[str, np.ndarray],
        rows: np.ndarray,
        met: list[tuple[int, Met]],
        texts: list[str],
        words: Words,
    ):
        self.first = first
        self.moments = moments  # by MOMENT's names, an entry a moment
        self.tables, self.counts, self.rows, self.met, self.texts, self.words = tables, counts, rows, met, texts, words
        self.steps = moments["step"]
        self._ends = {name: np.concatenate([[0], np.cumsum(count, dtype=np.int64)]) for name, count in counts.items()}

    @classmethod
    def of(cls, first: int, deltas: list[Delta], words: Words) -> Span:
        tables, counts, texts = stacked(deltas, words)
        rows = [delta.block_rows for delta in deltas if delta.block_rows is not None]
        return cls(
            first,
            {
                "step": np.array([d.step for d in deltas], np.int32),
                "time": np.array([d.time for d in deltas], np.float64),
                "state": np.array([STATES.index(d.state) for d in deltas], np.uint8),
                "leader": np.array([d.leader for d in deltas], np.int32),
                "has_line": np.array([d.has_line for d in deltas], np.uint8),
                "first_event": np.array([d.first_event for d in deltas], np.int64),
                **{
                    name: np.array(column, np.int64)
                    for name, column in zip(TOTALS, zip(*(d.totals for d in deltas), strict=True), strict=True)
                },
            },
            tables,
            counts,
            np.concatenate(rows) if rows else np.zeros(0, BLOCK),
            [(first + i, met) for i, delta in enumerate(deltas) for met in delta.met],
            texts,
            words,
        )

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def nbytes(self) -> int:
        arrays = (*self.moments.values(), *self.tables.values(), *self.counts.values(), *self._ends.values(), self.rows)
        return sum(array.nbytes for array in arrays) + 300 * len(self.met) + 80 * len(self.texts)

    @property
    def end(self) -> int:
        return self.first + len(self)

    def place(self, name: str, moments: int) -> int:
        """Where, in this table, the rows of the first `moments` moments end."""
        return int(self._ends[name][moments])

    def part(self, name: str, start: int, stop: int) -> np.ndarray:
        """The rows of this table that belong to moments `start` … `stop − 1`, counted from the span's first."""
        ends = self._ends[name]
        return self.tables[name][ends[start] : ends[stop]]

    def events(self, start: int, stop: int) -> Iterator[Event]:
        """Of these moments, counted from the span's first, oldest first."""
        values = self.part("numbers", start, stop)[:, 0].tolist()
        counts = self.counts["events"][start:stop]
        firsts = self.moments["first_event"][start:stop]
        index = np.repeat(firsts - np.concatenate([[0], np.cumsum(counts)[:-1]]), counts) + np.arange(counts.sum())
        times = self.part("event_times", start, stop)[:, 0].tolist()
        at = 0
        rows = self.part("events", start, stop).tolist()
        for number, time, row in zip(index.tolist(), times, rows, strict=True):
            step, kind, request_id, child, group, block, generation, cause, shape, text = row
            size = len(self.words.shapes[shape][0])
            numbers = self.words.named(shape, values[at : at + size])
            at += size
            yield Event(number, step, time, KINDS[kind], request_id, child, group, block, generation, CAUSES[cause],
                        numbers, self.texts[text] if text >= 0 else "")  # fmt: skip
