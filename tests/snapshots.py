"""Whether two snapshots are equal, field by field."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
from kvscope.engine.snapshot import EngineSnapshot


def assert_same(recorded: EngineSnapshot, live: EngineSnapshot) -> None:
    """In every field of the engine and of each request, types included; but `time`, which says when somebody looked."""
    for field in fields(live):
        if field.name not in ("time", "requests"):
            _assert_equal(getattr(recorded, field.name), getattr(live, field.name), field.name)
    assert list(recorded.counters) == list(live.counters)
    assert len(recorded.requests) == len(live.requests)
    for ours, theirs in zip(recorded.requests, live.requests, strict=True):
        for field in fields(theirs):
            where = f"request {theirs.id}.{theirs.child} {field.name} at step {live.step}"
            mine, other = getattr(ours, field.name), getattr(theirs, field.name)
            if field.name.endswith("_tables"):
                assert len(mine) == len(other), where
                for table, expected in zip(mine, other, strict=True):
                    _assert_equal(table, expected, where)
            else:
                _assert_equal(mine, other, where)


def _assert_equal(recorded, live, where: str) -> None:
    if isinstance(live, np.ndarray):
        assert recorded.dtype == live.dtype, where
        np.testing.assert_array_equal(recorded, live, where)
    else:
        assert recorded == live and type(recorded) is type(live), (where, recorded, live)
