"""What changed from one moment to the next, in rows of plain numbers; and the tables that these rows make.

`TABLES` is the whole format: a recording is these tables and, per moment, how many rows of each it has. Rows of different
tables are independent; within a table later rows win.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np

from ..events import Cause, Event, EventKind
from .words import Words

# A block as its pool has it; the names are the pool's own.
BLOCK = np.dtype(
    [
        ("ref_count", "<i4"),
        ("generation", "<i4"),
        ("filled", "<i4"),
        ("last_used_step", "<i4"),
        ("before", "<i4"),
        ("hits", "<i4"),
        ("computed_for", "<i4"),
        ("last_use", "<i8"),
        ("published", "<i8"),
        ("priority", "<i8"),
        ("is_cached", "i1"),
        ("is_alone", "i1"),
        ("group", "i1"),
    ]
)

# name: (dtype, columns). A sequence is known by a number of its own (`no`), which is never given twice.
TABLES: dict[str, tuple[str, tuple[str, ...]]] = {
    "blocks": ("<i4", ("block",)),  # a row of BLOCK goes with each, in `Span.rows`
    "fills": ("<i4", ("block", "filled")),  # blocks of which nothing else has changed
    "progress": ("<i4", ("no", "computed", "tokens")),
    "standing": (
        "<i4",
        (
            "no", "status", "reserved", "cached", "since", "passed", "host",
            "why", "needed", "available", "kept", "behind",
        ),
    ),
    "edits": ("<i4", ("no", "table", "position", "block")),  # position −1: `block` entries are left
    "firsts": ("<i4", ("no",)),  # their first token came at
    "first_times": ("<f8", ("time",)),
    "gone": ("<i4", ("no",)),
    "line": ("<i4", ("no",)),  # all that wait, in order; only where `has_line`
    "counters": ("<u2", ("counter",)),  # has the value
    "counter_values": ("<f8", ("value",)),
    "events": (
        "<i4",
        ("step", "kind", "request_id", "child", "group", "block_id", "generation", "cause", "shape", "text"),
    ),
    "event_times": ("<f8", ("time",)),
    "numbers": ("<f8", ("number",)),  # of the events, one after the other; `shape` says how many, and their names
}  # fmt: skip

# Of `standing.why`, where it is no Cause.
RUNS, LEADS, BEHIND = -1, -2, -3  # −2: it leads the line, and no step has looked at it; −3: behind the one that leads

STATES = ("running", "paused", "stopped")
STATUSES = ("waiting", "running", "preempted", "finished", "cancelled", "failed")
KINDS, CAUSES = tuple(EventKind), tuple(Cause)
KIND_CODE = {kind: code for code, kind in enumerate(KINDS)}
CAUSE_CODE = {cause: code for code, cause in enumerate(CAUSES)}
# Of `Delta.totals`, each the sum of counters; all but the first only grow.
TOTALS = {
    "used_blocks": ("kvscope:num_blocks_used",),
    "evictions": ("kvscope:blocks_evicted_total",),
    "preemptions": ("vllm:num_preemptions_total",),
    "swaps": ("kvscope:blocks_swapped_out_total", "kvscope:blocks_swapped_in_total"),
    "copies": ("kvscope:blocks_copied_total",),
}


def empty_blocks(num_blocks: int) -> np.ndarray:
    """A pool in which nothing has happened yet: BLOCK [num_blocks]."""
    blocks = np.zeros(num_blocks, BLOCK)
    blocks["computed_for"] = -1
    return blocks


def totals_of(counters: Sequence[str]) -> Callable[[Sequence[float]], tuple[int, ...]]:
    """From the values of all counters to TOTALS."""
    places = [[counters.index(name) for name in names] for names in TOTALS.values()]
    return lambda values: tuple(int(sum(values[i] for i in its)) for its in places)


class Met:
    """What never changes of a sequence."""

    __slots__ = ("arrival", "child", "deadline", "id", "label", "no", "num_prompt", "num_samples", "priority")

    def __init__(
        self, no: int, id: int, child: int, num_samples: int, num_prompt: int, label: str, priority: int,
        deadline: float | None, arrival: float,
    ):  # fmt: skip
        self.no = no
        self.id = id
        self.child = child
        self.num_samples = num_samples
        self.num_prompt = num_prompt
        self.label = label
        self.priority = priority
        self.deadline = deadline
        self.arrival = arrival

    def as_list(self) -> list:
        return [self.no, self.id, self.child, self.num_samples, self.num_prompt, self.label, self.priority,
                self.deadline, self.arrival]  # fmt: skip


class Delta:
    """One moment: rows are appended flat, one number after the other."""

    __slots__ = (
        "block_rows", "blocks", "counter_values", "counters", "edits", "events", "fills", "first_event", "first_times",
        "firsts", "gone", "has_line", "leader", "line", "met", "progress", "standing", "state", "step", "time",
        "totals",
    )  # fmt: skip

    def __init__(self, step: int, time: float, state: str):
        self.step, self.time, self.state = step, time, state
        self.leader = -1  # request id of whoever leads the line
        self.totals: tuple[int, ...] = ()
        self.first_event = 0
        self.events: list[Event] = []
        self.met: list[Met] = []
        self.has_line = False
        self.blocks: list[int] = []
        self.block_rows: np.ndarray | None = None
        self.fills: list[int] = []
        self.progress: list[int] = []
        self.standing: list[int] = []
        self.edits: list[int] = []
        self.firsts: list[int] = []
        self.first_times: list[float] = []
        self.gone: list[int] = []
        self.line: list[int] = []
        self.counters: list[int] = []
        self.counter_values: list[float] = []


_FLAT = tuple(name for name in TABLES if name not in ("events", "event_times", "numbers"))


def stacked(deltas: list[Delta], words: Words) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], list[str]]:
    """The rows of these deltas as tables [rows, columns], how many rows of each table each delta has (int32 [deltas]), and
    the texts of their events."""
    tables, counts = {}, {}
    for name in _FLAT:
        parts = [getattr(delta, name) for delta in deltas]
        tables[name], counts[name] = _table(name, list(chain.from_iterable(parts)), [len(part) for part in parts])
    rows, times, numbers, texts, ends = [], [], [], [], []
    for delta in deltas:
        for event in delta.events:
            shape, values = words.shape_of(event.numbers)
            text = -1
            if event.text:
                text = len(texts)
                texts.append(event.text)
            rows += (
                event.step, KIND_CODE[event.kind], event.request_id, event.child, event.group, event.block_id,
                event.generation, CAUSE_CODE[event.cause], shape, text,
            )  # fmt: skip
            times.append(event.time)
            numbers += values
        ends.append((len(rows), len(times), len(numbers)))
    for column, (name, flat) in enumerate((("events", rows), ("event_times", times), ("numbers", numbers))):
        lengths = np.diff([end[column] for end in ends], prepend=0).tolist()
        tables[name], counts[name] = _table(name, flat, lengths)
    return tables, counts, texts


def _table(name: str, flat: list, lengths: list[int]) -> tuple[np.ndarray, np.ndarray]:
    dtype, columns = TABLES[name]
    width = len(columns)
    return np.array(flat, dtype).reshape(-1, width), np.array(lengths, np.int32) // width
