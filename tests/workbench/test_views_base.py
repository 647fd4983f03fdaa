"""What all views lean on: frames, patches of the rows that changed, and sources replaced only when they differ."""

import numpy as np
import pytest
from bokeh.models import ColumnDataSource
from fake_frames import FakeSource
from kvscope.workbench.views.base import (
    TABLE_ROWS,
    Rows,
    Selection,
    by_code,
    capped,
    patch_changed,
    relook,
    replace_if_changed,
)  # fmt: skip


@pytest.fixture
def counted(monkeypatch):
    """A source of eight rows, and the patches that reached it."""
    source, patches = ColumnDataSource({"a": [0] * 8, "b": [""] * 8}), []
    original = ColumnDataSource.patch
    monkeypatch.setattr(ColumnDataSource, "patch", lambda self, patch: (patches.append(patch), original(self, patch)))
    return source, patches


def test_only_changed_rows_are_sent(counted):
    source, patches = counted
    rows = Rows(source)
    rows.set("a", np.arange(8))
    rows.flush()
    assert patches == [{"a": [(slice(0, 8), [0, 1, 2, 3, 4, 5, 6, 7])]}]
    rows.set("a", np.array([0, 1, 9, 3, 4, 5, 6, 8]))
    rows.set("b", np.array([0, 0, 1, 0, 0, 0, 0, 0]), ("", "x"))
    rows.flush()
    assert patches[1] == {"a": [(2, 9), (7, 8)], "b": [(slice(0, 8), ["", "", "x", "", "", "", "", ""])]}
    assert source.data["a"] == [0, 1, 9, 3, 4, 5, 6, 8]
    rows.set("a", np.array([0, 1, 9, 3, 4, 5, 6, 8]))
    rows.flush()
    assert len(patches) == 2


def test_forgotten_columns_are_sent_in_full(counted):
    source, patches = counted
    rows = Rows(source)
    rows.set("a", np.arange(8))
    rows.flush()
    rows.forget(("a",))
    rows.set("a", np.arange(8), lambda places, codes: (places + codes).tolist())
    rows.flush()
    assert source.data["a"] == [0, 2, 4, 6, 8, 10, 12, 14] and len(patches) == 2


def test_starting_with_other_rows_is_one_change(counted):
    source, patches = counted
    rows = Rows(source)
    rows.start({"a": [0] * 3, "b": [""] * 3})
    rows.set("a", np.array([5, 6, 7]))
    rows.flush()
    assert source.data["a"] == [5, 6, 7] and source.data["b"] == ["", "", ""] and not patches


def test_small_sources_are_replaced_only_when_they_differ():
    source = ColumnDataSource({"x": [], "name": []})
    assert replace_if_changed(source, {"x": np.array([1.0]), "name": ["a"]})
    assert not replace_if_changed(source, {"x": np.array([1.0]), "name": ["a"]})
    assert replace_if_changed(source, {"x": np.array([1.0]), "name": ["b"]})
    assert replace_if_changed(source, {"x": np.array([1.0, 2.0]), "name": ["b", "c"]})


def test_patch_changed_patches_cells_or_replaces_rows(counted):
    source, patches = counted
    patch_changed(source, {"a": [0, 0, 3, 0, 0, 0, 0, 0], "b": [""] * 8})
    assert patches == [{"a": [(2, 3)]}]
    patch_changed(source, {"a": [1], "b": ["x"]})
    assert source.data["a"] == [1] and len(patches) == 1


def test_codes_are_looked_up_in_colours_or_numbers():
    colour, number = by_code("face", ("#000000", "#FFFFFF")), by_code("dim", (1.0, 0.2))
    relook(colour, ("#111111", "#EEEEEE"))
    relook(number, (1.0, 0.3))
    assert colour["transform"].palette == ["#111111", "#EEEEEE"] and number["transform"].y == [1.0, 0.3]


def test_readers_of_blocks_and_their_codes():
    frame = FakeSource().frame(steps=93)
    snapshot = frame.snapshot
    for block in range(1, 128):
        expected = [i for i, r in enumerate(snapshot.requests) if block in r.block_tables[0]]
        assert frame.readers(block).tolist() == expected
    assert len(frame.readers(0)) == 0
    groups = {}
    for block in range(1, 128):
        groups.setdefault(tuple(frame.readers(block).tolist()), set()).add(int(frame.reader_codes[block]))
    assert all(len(codes) == 1 for codes in groups.values())
    assert len({next(iter(c)) for c in groups.values()}) == len(groups)


def test_labels_gain_a_letter_when_a_request_splits():
    source = FakeSource()
    assert "3a" not in source.frame(steps=13).labels
    assert [name for name in source.frame(steps=1).labels if name.startswith("3")] == ["3a", "3b", "3c", "3d"]


def test_a_selection_that_is_gone_selects_nothing():
    frame = FakeSource().frame(steps=5, selection=Selection("request", 77))
    assert not len(frame.selected_blocks) and not frame.lit_blocks.any()
    frame = FakeSource().frame(steps=5, selection=Selection("block", 9_999))
    assert not len(frame.selected_blocks) and not frame.selected_requests


def test_text_twins_are_capped():
    rows = capped([[str(i), "x"] for i in range(TABLE_ROWS + 30)])
    assert len(rows) == TABLE_ROWS + 1 and rows[-1] == ["and 30 more", ""]
