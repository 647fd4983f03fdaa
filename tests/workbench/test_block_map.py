"""The pool map through its data: what a cell says, what one tick sends, and what a tap selects."""

import time

import numpy as np
import pytest
from bokeh.events import Tap
from fake_frames import FakeEngine, FakeSource
from kvscope.engine.snapshot import BlockState
from kvscope.workbench.theme import DARK, LIGHT
from kvscope.workbench.views import glyph
from kvscope.workbench.views.base import Selection
from kvscope.workbench.views.block_cells import hatch_levels
from kvscope.workbench.views.block_map import BlockMap, svg
from kvscope.workbench.views.block_marks import marks_of
from kvscope.workbench.views.pool_inset import PoolInset


def drawn(steps, *, selection=None, num_blocks=128, **options):
    view, source = BlockMap(**options), FakeSource(FakeEngine(num_blocks))
    frame = None
    for _ in range(steps):
        frame = source.frame()
        view.update(frame)
    if selection:
        frame = source.frame(steps=0, selection=selection)
        view.update(frame)
    return view, frame, source


def face(view, block):
    return glyph.face_palette(view.theme)[view.source.data["face"][block]]


def test_cells_say_who_how_many_and_what_is_next():
    view, frame, _ = drawn(131)
    state, label = frame.snapshot.block_state, view.source.data["label"]
    for block in range(128):
        expected = {
            BlockState.EMPTY: "·",
            BlockState.CACHED: "next" if block == frame.snapshot.eviction_order[0] else "",
            BlockState.SHARED: f"×{frame.snapshot.ref_count[block]}",
            BlockState.PINNED: "null",
        }.get(state[block], frame.labels[frame.snapshot.owner[block]])
        assert label[block] == expected, block
    assert {"11b", "×10", "next", "null", "10"} <= set(label)


def test_faces_are_the_owners_hue_or_the_states_colour():
    view, frame, _ = drawn(131)
    for block in range(1, 128):
        state = frame.snapshot.block_state[block]
        if state == BlockState.ACTIVE:
            owner = frame.snapshot.requests[frame.snapshot.owner[block]].id
            assert face(view, block) == frame.slots.hue(owner)
        elif state == BlockState.SHARED:
            assert face(view, block) == LIGHT.shared
        elif state == BlockState.CACHED:
            assert face(view, block) == LIGHT.cached and view.sources["hatch"].data["alpha"][block] > 0


def test_the_foot_begins_where_the_unwritten_slots_do():
    view, frame, _ = drawn(93)
    for block in range(1, 128):
        written, state = frame.snapshot.filled[block], frame.snapshot.block_state[block]
        left = view.source.data["unwritten"][block]
        if state == BlockState.ACTIVE and 0 < written < 16:
            inside = (left - block % 16 - 0.0425) / 0.915
            assert inside == pytest.approx(written / 16, abs=0.002)
        else:
            assert np.isnan(left)


def test_a_hatch_pales_with_idle_steps():
    levels = [round(alpha, 2) for alpha in hatch_levels(LIGHT)]
    assert levels[0] == 0.0 and levels[1] == 1.0 and levels[7] == 0.35


def test_marks_of_a_step_and_the_arrow_of_a_copy():
    view, frame, _ = drawn(131)
    marks = marks_of(frame.events, 131)
    copies = {block: source for block, (kind, source) in marks.items() if kind == "copied"}
    assert copies == {83: 110, 59: 110}
    assert len(view.sources["arrows"].data["x0"]) == 2
    assert sorted(view.sources["marks"].data["kind"]) == [glyph.MARKS.index("copied")] * 2


def test_an_evicted_block_is_marked_as_evicted_then_taken():
    view, _frame, _ = drawn(107)
    kinds = [glyph.MARKS[k] for k in view.sources["marks"].data["kind"]]
    assert "evicted" in kinds


def test_marks_stay_while_paused_and_fade_while_running():
    view, source = BlockMap(), FakeSource(FakeEngine(), state="running")
    for _ in range(131):
        frame = source.frame()
        view.update(frame)
    marks = view.sources["marks"]
    assert len(marks.data["x"]) == 2
    quiet = type(frame)(frame.snapshot, (), 0, None, None, frame.now + 0.4, frame.slots)
    view.update(quiet)
    assert 0 < marks.data["alpha"][0] < 1
    view.update(type(frame)(frame.snapshot, (), 0, None, None, frame.now + 0.8, frame.slots))
    assert len(marks.data["x"]) == 0


def test_strips_show_the_readers_of_a_shared_block():
    view, frame, _ = drawn(93)
    strips = view.sources["strips"].data
    inside = (strips["y"] == 0) & (strips["x"] > 1) & (strips["x"] < 2)  # block 1
    requests = {frame.snapshot.requests[i].id for i in frame.readers(1)}
    assert strips["code"][inside].tolist() == list(dict.fromkeys(frame.slots.slot(r) % 8 for r in sorted(requests)))


def test_a_selected_request_keeps_its_strength_and_the_rest_is_dimmed():
    view, frame, _ = drawn(93, selection=Selection("request", 6))
    own = {int(b) for r in frame.snapshot.requests if r.id == 6 for b in r.block_tables[0]}
    dim = np.array(view.source.data["dim"])
    assert set(np.flatnonzero(dim == 0)) == own
    assert len(view.sources["chosen"].data["x"]) == len(own)


def test_a_selected_block_rings_one_cell_and_lights_its_readers():
    view, frame, _ = drawn(93, selection=Selection("block", 10))
    assert view.sources["chosen"].data["x"].tolist() == [10.0]
    readers = {frame.snapshot.requests[i].id for i in frame.readers(10)}
    assert readers == {3}
    lit = set(np.flatnonzero(np.array(view.source.data["dim"]) == 0))
    assert lit == {int(b) for r in frame.snapshot.requests if r.id in readers for b in r.block_tables[0]}


def test_the_label_menu_changes_text_and_no_colour():
    view, frame, _ = drawn(131)
    faces = list(view.source.data["face"])
    view.label = "id"
    assert view.source.data["label"] == [str(b) for b in range(128)]
    view.label = "generation"
    assert view.source.data["label"][5] == f"g{frame.snapshot.generation[5]}"
    view.label = "age"
    cached = int(frame.snapshot.eviction_order[0])
    assert view.source.data["label"][cached] == str(131 - frame.snapshot.last_used_step[cached])
    assert view.source.data["face"] == faces
    with pytest.raises(ValueError, match="owner, id, generation, age"):
        view.label = "hue"


def test_a_tap_selects_a_block_and_a_second_tap_clears():
    chosen = []
    view, frame, source = drawn(93, on_select=chosen.append)
    view._tapped(Tap(view.figure, x=5.4, y=2.2))
    assert chosen == [Selection("block", 37, int(frame.snapshot.generation[37]))]
    view.update(source.frame(steps=0, selection=chosen[0]))
    view._tapped(Tap(view.figure, x=5.4, y=2.2))
    assert chosen[1] is None
    view._tapped(Tap(view.figure, x=-0.5, y=2.2))
    view._tapped(Tap(view.figure, x=5.4, y=40.0))
    assert len(chosen) == 2


def test_a_patched_view_holds_what_a_fresh_one_would():
    """Row by row patches over 290 steps end where drawing only the last frame does."""
    view, frame, _ = drawn(240)
    fresh = BlockMap()
    fresh.update(frame)
    for name in view.source.data:
        patched, once = (np.asarray(v.source.data[name], object) for v in (view, fresh))
        same = (patched == once) | ((patched != patched) & (once != once))
        assert same.all(), name


def test_one_change_a_source_and_little_of_it(wire):
    view, source = BlockMap(), FakeSource(FakeEngine(), state="running")
    line, sizes = wire(view), []
    for _ in range(290):
        view.update(source.frame())
        changed = line.sources_changed()
        assert len(changed) == len(set(changed))
        sizes.append(line.size())
    ticks = np.array(sizes[2:])
    assert ticks.mean() < 1500 and np.percentile(ticks, 95) <= 3072 and ticks.max() < 6000, ticks.max()


def test_a_tick_without_news_sends_nothing(wire):
    view, _frame, source = drawn(93)
    line = wire(view)
    view.update(source.frame(steps=0))
    assert line.size() == 0


def test_a_tick_costs_little_thread_time():
    """Generous: the figure of the documentation is measured alone; this only catches a change of kind."""
    view, source = BlockMap(), FakeSource()
    frames = [source.frame() for _ in range(200)]
    start = time.thread_time()
    for frame in frames:
        view.update(frame)
    assert (time.thread_time() - start) / len(frames) < 5e-3


def test_no_fill_pattern_is_used_for_cells():
    for num_blocks in (128, 512, 1024):
        view, _, _ = drawn(3, num_blocks=num_blocks)
        for renderer in view.figure.renderers:
            assert getattr(renderer.glyph, "hatch_pattern", None) in (None, " ", "blank"), renderer.glyph


@pytest.mark.parametrize("num_blocks, columns", [(64, 16), (512, 16), (513, 64), (4096, 64), (4097, 256)])
def test_pools_of_every_size(num_blocks, columns):
    view, _, source = drawn(30, num_blocks=num_blocks)
    assert view._grid.columns == columns
    view.update(source.frame(selection=Selection("request", 1)))
    assert view.summary().endswith("are empty.")
    assert ("label" in view.source.data) == (num_blocks <= 512)


def test_a_large_pool_is_an_image_of_state_codes():
    view, frame, _ = drawn(30, num_blocks=16_384)
    image = view.sources["image"].data["image"][0]
    assert image.dtype == np.uint8 and image.shape == (64, 256)
    assert (image.ravel() == frame.snapshot.block_state).all()


def test_a_pool_of_another_size_is_drawn_anew():
    view, _, _ = drawn(10)
    view.update(FakeSource(FakeEngine(64)).frame(steps=5))
    assert len(view.source.data["x"]) == 64 and len(view.root.children) == 3  # legend, pool, host strip


def test_restyling_keeps_the_figure_and_sends_dark_colours():
    view, _frame, _ = drawn(93)
    figure = view.figure
    view.restyle(DARK.scaled(1.25))
    assert view.figure is figure and view._row_text.glyph.text_color == DARK.muted
    assert view._grid._face["transform"].palette == glyph.face_palette(DARK)
    assert view.source.data["size"][5] == DARK.scaled(1.25).font(15.5)


def test_the_sentence_and_the_table_are_twins_of_the_picture():
    view, frame, _ = drawn(131)
    count = glyph.count_states(frame)
    assert count["empty"] + count["cached"] + count["active"] + count["shared"] == 127
    assert (
        view.summary()
        == "114 of 127 blocks are in use, 19 of them shared. 13 hold cached text that may be evicted, 0 are empty."
    )
    headers, rows = view.table()
    assert headers[0] == "Owner" and rows[0][0] == "1" and rows[-1][0].startswith("cached")
    assert rows[0][1].split() == [str(b) for b in frame.snapshot.requests[0].block_tables[0]]


def test_the_svg_shows_the_same_cells():
    _, frame, _ = drawn(131)
    text = svg(frame, DARK)
    assert text.startswith("<svg") and text.count(">×10</text>") == 4 and ">next</text>" in text
    assert "<title>114 of 127 blocks are in use" in text and len(text) < 40_000
    assert drawn(131)[0].svg(DARK) == text and BlockMap().svg() == ""
    large = svg(FakeSource(FakeEngine(16_384)).frame(steps=30))
    assert len(large) < 60_000


def test_an_empty_pool_is_outlines():
    view, _frame, _ = drawn(1)
    assert set(view.source.data["label"]) == {"·", "null"}
    assert view.summary() == "0 of 127 blocks are in use. 0 hold cached text that may be evicted, 127 are empty."


def test_the_inset_shows_the_same_blocks_without_words():
    frame = FakeSource().frame(steps=93)
    view, inset, chosen = BlockMap(), PoolInset(on_select=lambda selection: chosen.append(selection)), []
    for each in (view, inset):
        each.update(frame)
    assert inset.source.data["face"] == view.source.data["face"] and "label" not in inset.source.data
    assert inset.root.children == [inset.figure] and inset.svg() == "" and inset.table() == view.table()
    inset._tapped(Tap(inset.figure, x=3.5, y=2.5))
    assert (chosen[0].kind, chosen[0].id) == ("block", 2 * 16 + 3)


@pytest.mark.parametrize(("num_blocks", "columns"), [(1024, 64), (1030, 64), (16_384, 256)])
def test_a_lens_shows_a_part_of_a_large_pool_as_labelled_cells(num_blocks, columns):
    view, frame, _ = drawn(93, num_blocks=num_blocks)
    cells, place = view.sources["lens_cells"].data, view.sources["lens_place"].data
    assert list(cells["block"]) == [row * columns + x for row in range(4) for x in range(15)]
    assert [place[side][0] for side in ("left", "right", "top", "bottom")] == [0, 15, 0, 4]
    labels, faces = glyph.label_codes(frame, "owner"), glyph.face_codes(frame, by_state=view._by_state(frame))
    for cell, block in enumerate(cells["block"]):
        assert cells["face"][cell] == faces[block]
        assert cells["label"][cell] == glyph.label_text(
            labels[block], "owner", dict(zip(glyph.sequence_codes(frame).tolist(), frame.labels, strict=True))
        )
    view.look_at(num_blocks - 1)
    view.update(frame)
    shown = [(x, block) for x, block in zip(cells["x"], cells["block"], strict=True)]
    assert num_blocks - 1 in [block for _, block in shown]
    assert all(np.isnan(x) == (block < 0) for x, block in shown), "behind the last block nothing is drawn"
    view.look_at(num_blocks)
    assert list(view.sources["lens_cells"].data["block"]) == [block for _, block in shown], "there is no such block"


def test_the_lens_follows_the_selection_and_a_tap_in_it_selects():
    chosen = []
    view, frame, source = drawn(93, num_blocks=1024, on_select=chosen.append)
    assert view.sources["lens_rows"].data["text"][0] == "0"
    frame = source.frame(steps=0, selection=Selection("block", 900))
    view.update(frame)
    cells, ring = view.sources["lens_cells"].data, view.sources["lens_chosen"].data
    cell = list(cells["block"]).index(900)
    assert (ring["x"][0], ring["y"][0]) == (cell % 15, cell // 15)
    view._lens._tapped(Tap(None, x=cell % 15 + 0.5, y=cell // 15 + 0.5))
    view._lens._tapped(Tap(None, x=16.0, y=0.5))
    assert [(c.kind, c.id) for c in chosen] == [("block", 900)]
    assert not BlockMap().sources.keys() & {"lens_cells"}, "a small pool needs none"
