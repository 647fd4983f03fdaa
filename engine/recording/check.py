"""Whether the numbers of a file can be what they claim to be: every one that is used as an index is in range."""

from __future__ import annotations

import numpy as np

from .archive import Damaged
from .delta import BEHIND, CAUSES, KINDS, STATES, STATUSES, TABLES
from .state import Facts
from .words import Words


def check(
    facts: Facts,
    arrays: dict[str, np.ndarray],
    rows: np.ndarray,
    met: list[int],
    words: Words,
    num_texts: int,
    first: int,
) -> None:
    """Raises Damaged. `met`: the moments in which sequences were seen for the first time."""
    steps = arrays["moment/step"]
    moments = len(steps)
    _that(type(first) is int and 0 <= first <= 2**40 and moments > 0, "it holds no moment")
    _that(all(len(array) == moments for name, array in arrays.items() if name.startswith("moment/")), "moments differ")
    _that(steps[0] >= 0 and (np.diff(steps) >= 0).all(), "its steps are out of order")
    _that(
        met == sorted(met) and all(first <= moment < first + moments for moment in met),
        "its sequences are out of order",
    )
    for name in TABLES:
        counts = arrays[f"count/{name}"]
        _that(len(counts) == moments and (counts >= 0).all(), f"{name} is cut off")
        _that(int(counts.sum(dtype=np.int64)) == len(arrays[f"table/{name}"]), f"{name} is cut off")
    for one, other in (("firsts", "first_times"), ("counters", "counter_values"), ("events", "event_times")):
        _that((arrays[f"count/{one}"] == arrays[f"count/{other}"]).all(), f"{one} and {other} differ")
    column = {
        (name, c): arrays[f"table/{name}"][:, i] for name, (_, names) in TABLES.items() for i, c in enumerate(names)
    }
    blocks, groups = facts.num_blocks, facts.num_groups
    ranges = {
        ("blocks", "block"): (0, blocks),
        ("fills", "block"): (0, blocks),
        ("counters", "counter"): (0, len(facts.counters)),
        ("standing", "status"): (0, len(STATUSES)),
        ("standing", "why"): (BEHIND, len(CAUSES)),
        ("edits", "table"): (0, 2 * groups),
        ("edits", "position"): (-1, 2**31),
        ("events", "kind"): (0, len(KINDS)),
        ("events", "cause"): (0, len(CAUSES)),
        ("events", "shape"): (0, len(words.shapes)),
        ("events", "text"): (-1, num_texts),
    }
    for key, (low, high) in ranges.items():
        _that(_within(column[key], low, high), f"{key[0]} name a {key[1]} that there is not")
    in_pool = (column["edits", "table"] < groups) & (column["edits", "position"] >= 0)
    _that(_within(column["edits", "block"][in_pool], 0, blocks), "block tables name blocks that there are not")
    _that(_within(column["edits", "block"][column["edits", "position"] < 0], 0, 2**31), "a block table is cut wrongly")
    _that(_within(rows["group"], 0, groups), "blocks belong to groups that there are not")
    _that(_within(rows["before"], 0, blocks), "cached text continues blocks that there are not")
    _that(_within(arrays["moment/state"], 0, len(STATES)), "it has states that this version does not know")
    sizes = np.array([len(names) for names, _ in words.shapes], np.int64)
    _that(all(len(names) == len(whole) for names, whole in words.shapes), "its numbers have no kinds")
    ends = np.concatenate([[0], np.cumsum(sizes[column["events", "shape"]])]) if len(sizes) else np.zeros(1, np.int64)
    taken = np.diff(ends[np.concatenate([[0], np.cumsum(arrays["count/events"])])])
    _that((taken == arrays["count/numbers"]).all(), "its events have more or fewer numbers than they name")


def _within(values: np.ndarray, low: int, high: int) -> bool:
    return not len(values) or (int(values.min()) >= low and int(values.max()) < high)


def _that(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Damaged(otherwise)
