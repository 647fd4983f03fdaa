"""Block tables through their data: shared blocks stand once, samples hang together, a step sends the last chips."""

import numpy as np
from bokeh.events import Tap
from fake_frames import FakeEngine, FakeSource
from fake_model import greedy, make_core
from kvscope.workbench.theme import DARK, OwnerSlots
from kvscope.workbench.views.base import Frame, Selection
from kvscope.workbench.views.block_chips import vertical_runs
from kvscope.workbench.views.block_tables import MAX_ROWS, BlockTables


def drawn(steps, **options):
    view, source = BlockTables(**options), FakeSource()
    for _ in range(steps):
        frame = source.frame()
        view.update(frame)
    return view, frame, source


def chips(view):
    """What is drawn: {(row, logical): (height, label)}."""
    data = view.source.data
    return {
        (int(y), int(x)): (height, label)
        for x, y, height, label in zip(data["x"], data["y"], data["height"], data["label"], strict=True)
        if x == x
    }


def test_vertical_runs():
    grid = np.array([[1, 2, -1], [1, 3, 7], [4, 3, 7]])
    row, column, height = vertical_runs(grid)
    assert list(zip(row.tolist(), column.tolist(), height.tolist(), strict=True)) == [
        (0, 0, 2), (2, 0, 1), (0, 1, 1), (1, 1, 2), (1, 2, 2),
    ]  # fmt: skip
    assert [len(part) for part in vertical_runs(np.zeros((0, 0), int))] == [0, 0, 0]


def test_a_shared_block_is_one_tall_chip():
    view, _, _ = drawn(93)
    names, drawn_chips = view.tails.data["label"], chips(view)
    assert names == ["1", "2", "3a", "3b", "3c", "3d", "5", "6a", "6b", "6c", "9", "4", "7", "8", "10"]
    assert drawn_chips[0, 0] == (11, "1\n×11")
    assert drawn_chips[2, 4] == (4, "10\n×4")
    assert drawn_chips[0, 4] == (1, "5")


def test_every_place_of_every_table_is_covered_by_exactly_one_chip():
    view, frame, _ = drawn(165)
    covered = {}
    for (row, column), (height, label) in chips(view).items():
        for r in range(row, row + height):
            assert (r, column) not in covered
            covered[r, column] = int(label.split("\n")[0])
    expected = {
        (row, column): int(block)
        for row, i in enumerate(view._order)
        for column, block in enumerate(frame.snapshot.requests[i].block_tables[0])
    }
    assert covered == expected


def test_samples_hang_on_a_bracket():
    view, _, _ = drawn(93)
    assert view.parents.data["label"] == ["3", "6"]
    assert len(view.forks.data["xs"]) == 4 + 3


def test_tails_count_tokens_and_own_blocks():
    view, frame, _ = drawn(93)
    row = view.tails.data["label"].index("3b")
    request = frame.snapshot.requests[view._order[row]]
    own = sum(frame.snapshot.ref_count[b] == 1 for b in request.block_tables[0])
    assert view.tails.data["text"][row] == f"{request.num_computed_tokens} tokens, {own} own"


def test_a_patched_view_holds_what_a_fresh_one_would():
    view, frame, _ = drawn(240)
    fresh = BlockTables()
    fresh.update(frame)
    assert chips(view) == chips(fresh)
    assert view.tails.data == fresh.tails.data


def test_one_change_a_source_and_little_of_it(wire):
    view, source = BlockTables(), FakeSource()
    line, sizes = wire(view), []
    for _ in range(290):
        view.update(source.frame())
        changed = line.sources_changed()
        assert len(changed) == len(set(changed))
        sizes.append(line.size())
    assert np.mean(sizes) < 1600 and np.percentile(sizes, 95) <= 4096


def test_taps_select_requests_at_the_left_and_blocks_at_the_right():
    chosen = []
    view, frame, _ = drawn(93, on_select=chosen.append)
    view._tapped(Tap(view.figure, x=-0.7, y=2.5))
    view._tapped(Tap(view.figure, x=4.5, y=3.5))
    view._tapped(Tap(view.figure, x=60.0, y=3.5))
    view._tapped(Tap(view.figure, x=4.5, y=99.0))
    assert chosen == [Selection("request", 3), Selection("block", 10, int(frame.snapshot.generation[10]))]


def test_a_selection_dims_rows_and_chips():
    view, _, source = drawn(93)
    view.update(source.frame(steps=0, selection=Selection("request", 3)))
    assert [n for n, d in zip(view.tails.data["label"], view.tails.data["dim"], strict=True) if not d] == [
        "3a",
        "3b",
        "3c",
        "3d",
    ]
    view.update(source.frame(steps=0))
    assert not any(view.tails.data["dim"]) and not any(view.source.data["dim"])


def test_more_rows_than_fit_are_counted():
    work = tuple((1, ((f"text {i}", 16),), 40, 1, "") for i in range(60))
    view, source = BlockTables(), FakeSource(FakeEngine(256, work=work, max_seqs=64, budget=2000))
    view.update(source.frame(steps=3))
    assert len(view.tails.data["label"]) == MAX_ROWS
    assert view.summary().endswith("20 more rows are not drawn.")


def test_twins_and_themes():
    view, _frame, _ = drawn(93)
    headers, rows = view.table()
    assert headers == ["Sequence", "Tokens", "Blocks in logical order"]
    assert rows[0][2].startswith("1×11 2×11") and len(rows) == 15
    view.restyle(DARK)
    assert "white chip" in view.summary() and view.figure.xaxis.major_label_text_color == DARK.muted
    empty = BlockTables()
    assert empty.table()[1] == []


def test_each_kv_group_has_its_rows_and_what_fell_out_of_a_window_is_null():
    core, slots = make_core(windows=(0, 5)), OwnerSlots()
    core.add_request([1] * 14, greedy(9))
    core.add_request([1] * 14, greedy(9))
    for _ in range(4):
        core.step()
    view, snapshot = BlockTables(), core.snapshot()
    view.update(Frame(snapshot, slots=slots))
    assert view._groups == [0, 0, 1, 1] and [snapshot.requests[i].id for i in view._order] == [1, 2, 1, 2]
    shown = chips(view)
    for row in (2, 3):
        nulls = np.count_nonzero(snapshot.requests[row - 2].block_tables[1] == 0)
        assert nulls >= 2, "the story needs a window that has moved on"
        assert [shown[row, column] for column in range(nulls)] == [(1, "null")] * nulls, "never one tall chip"
        assert view.tails.data["text"][row].endswith(", KV group 1")
    assert view.forks.data["xs"] == [], "the tables of one sequence are no samples"
    assert view.table()[1][2][0] == "1, KV group 1" and view.table()[1][2][2].startswith("null null")
