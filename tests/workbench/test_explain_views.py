"""The prefix tree, the order of eviction and the host strip through their data, on the engine's own caches."""

import numpy as np
import pytest
from fake_frames import FakeSource, frame_of, read_twice, seconds_of
from fake_model import greedy, make_core, run
from kvscope.engine.outputs import RequestMetrics, RequestOutput
from kvscope.engine.snapshot import ALONE, ROOT, BlockState
from kvscope.workbench.theme import OwnerSlots
from kvscope.workbench.views.base import Frame, Selection
from kvscope.workbench.views.block_map import BlockMap
from kvscope.workbench.views.eviction_queue import EvictionQueue
from kvscope.workbench.views.forest import lay_out
from kvscope.workbench.views.prefix_tree import PrefixTree
from kvscope.workbench.views.requests import Requests

A, B = [1] * 8, [2] * 4


def served(*prompts, **options):
    core = make_core(**options)
    for prompt in prompts:
        core.add_request(prompt, greedy(1))
        run(core)
    return core


def labels(view):
    """{(row, column): what the chip says}"""
    data = view.source.data
    return {(int(y), int(x)): label for x, y, label in zip(data["x"], data["y"], data["label"], strict=True) if x == x}


# --- rows -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix_cache", ["hash", "radix"])
def test_texts_that_begin_alike_share_their_start(prefix_cache):
    core = served([*A, *B, 9], [*A, 3, 3, 3, 3, 9], [*A, *B, 5, 5, 5, 5, 9], [7] * 9, prefix_cache=prefix_cache)
    snapshot = core.snapshot()
    forest = lay_out(snapshot, most_rows=32, most_columns=48)
    shapes = [(b.row, b.column, len(b.blocks), b.parent_row) for b in forest.branches]
    if prefix_cache == "hash":
        assert shapes == [(1, 0, 4, -1), (2, 2, 1, 1), (4, 0, 2, -1)]
    else:  # the partly filled last blocks are found too
        assert shapes == [(1, 0, 4, -1), (2, 3, 2, 1), (3, 2, 2, 1), (5, 0, 3, -1)]
    assert forest.num_left_out == 0 and len(forest.headings) == 2
    for branch in forest.branches:
        for before, block in zip(branch.blocks, branch.blocks[1:], strict=False):
            assert snapshot.parent[block] == before
        at_left = snapshot.parent[branch.blocks[0]]
        if branch.parent_row < 0:
            assert at_left == ROOT
        else:
            parent = next(p for p in forest.branches if p.row == branch.parent_row)
            assert at_left in parent.blocks and parent.column + parent.blocks.index(at_left) + 1 == branch.column


def test_every_cached_block_is_drawn_once_or_counted():
    source = FakeSource()
    for _ in range(0, 240, 20):
        snapshot = source.frame(steps=20).snapshot
        forest = lay_out(snapshot, most_rows=200, most_columns=48)
        blocks = [block for branch in forest.branches for block in branch.blocks]
        assert sorted(blocks) == np.flatnonzero(snapshot.parent >= ROOT).tolist()
        small = lay_out(snapshot, most_rows=6, most_columns=5)
        drawn = [branch for branch in small.branches for _ in branch.blocks]
        assert small.num_rows <= 6 and small.num_left_out == len(blocks) - len(drawn)
        assert all(branch.column + len(branch.blocks) <= 5 for branch in small.branches)


# --- the tree ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix_cache", ["hash", "radix"])
@pytest.mark.parametrize("eviction_policy", ["lru", "lfu"])
def test_chips_carry_readers_and_their_place_in_the_order_of_eviction(prefix_cache, eviction_policy):
    core = served([*A, *B, 9], [*A, 3, 3, 3, 3, 9], prefix_cache=prefix_cache, eviction_policy=eviction_policy)
    for _ in range(2):
        core.add_request([*A, 8], greedy(6))
    core.step()
    core.step()
    view, frame = PrefixTree(), frame_of(core)
    view.update(frame)
    said, order = labels(view), frame.snapshot.eviction_order.tolist()
    assert said[1, 0] == said[1, 1] == "×2", "read by both"
    for (row, column), label in said.items():
        block = view._grid[row, column]
        if frame.snapshot.block_state[block] == BlockState.CACHED:
            assert label == f"{order.index(block) + 1}."
    assert [row[0] for row in sorted((r for r in view.table()[1] if r[5] != "–"), key=lambda r: int(r[5][:-1]))] == [
        str(block) for block in order
    ]
    data = view.source.data
    hatched = {view._grid[int(y), int(x)] for x, y, h in zip(data["x"], data["y"], data["hatch"], strict=True) if h}
    assert hatched == set(order)


def test_a_text_is_headed_by_its_first_words_and_who_computed_it():
    def texts(request_id):
        return RequestOutput(request_id, None, [*A, *B, 9], [], True, 0, RequestMetrics(0.0))

    core = served([*A, *B, 9], [7] * 9)
    view = PrefixTree(texts=texts, decode=lambda token: f"<|im_start|>system word{token}<|im_end|> ")
    view.update(frame_of(core))
    assert view.heads.data["text"][0] == f"“{' '.join(['word1'] * 7)} …” first computed for request 1"
    assert "request 2" in view.heads.data["text"][1]
    without = PrefixTree()
    without.update(frame_of(core))
    assert without.heads.data["text"][0] == "A text first computed for request 1"


def test_what_requests_found_and_why_no_more():
    core = served([*A, *B, 9], [*A, 3, 3, 3, 3, 9], [7] * 9)
    view = PrefixTree()
    view.update(frame_of(core))
    html = view.found.text
    assert "<b>62 %</b>: 8 of 13 tokens.<em> No more because its text differs from token 9 on." in html
    assert html.count('data-r="2"') == 1, "a hit and the miss after it are one line"
    assert "<b>0 %</b>: 0 of 9 tokens.<em> Because no earlier prompt starts with" in html
    view.update(Frame(core.snapshot(), (), 0, Selection("request", 2), None, 2.0, OwnerSlots()))
    assert view.found.text.count("row dim") == 2


def test_blocks_of_windows_are_counted_and_not_drawn():
    core = served([1] * 14, windows=(0, 5))
    view, frame = PrefixTree(), frame_of(core)
    view.update(frame)
    alone = int((frame.snapshot.parent == ALONE).sum())
    assert alone and f"{alone} of layers with a window stand for themselves" in view.summary()
    assert not set(view._grid[view._grid >= 0]) & set(np.flatnonzero(frame.snapshot.parent == ALONE))


# --- the queue --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("eviction_policy", ["lru", "mru"])
def test_the_next_to_be_evicted_stand_in_the_engine_s_order(eviction_policy):
    core = served(*([i] * 5 for i in range(1, 8)), eviction_policy=eviction_policy, num_blocks=33)
    view, frame = EvictionQueue(), frame_of(core)
    view.update(frame)
    order = frame.snapshot.eviction_order.tolist()
    ids = [int(label) for _, label in sorted(labels(view).items())]
    assert ids == order == core.tables.pool.eviction_order().tolist() and len(ids) == 7
    assert view.words.data["place"] == [f"{i}." for i in range(1, 8)]
    idle = [f"idle {frame.snapshot.step - core.tables.pool.last_used_step[b]}" for b in order]
    assert view.words.data["idle"] == idle and len(set(idle)) == 7
    assert view.table()[1][0][:2] == ["1.", str(order[0])]


# --- host memory ------------------------------------------------------------------------------------------------------


def test_swapped_blocks_stand_in_the_host_strip_under_the_pool():
    core = make_core(preemption_mode="swap", num_cpu_blocks=8)
    core.add_request([1] * 6, greedy(8))
    core.add_request([2] * 6, greedy(8))
    core.step()
    view = BlockMap()
    view.update(frame_of(core))
    assert view.host.root.visible and len(view.host.free.data["x"]) == 8 and not len(view.host.cells.data["x"])
    core.preempt(2)
    view.update(frame_of(core, Selection("request", 1)))
    assert view.host.cells.data["x"].tolist() == [0.5, 1.5] and view.host.cells.data["dim"].tolist() == [1, 1]
    assert view.host.words.text == "Host memory for swapped blocks: <b>2</b> of 8 in use."
    assert ["2, swapped out", "2 host blocks", "–", "–"] in view.table()[1]
    requests = Requests()
    requests.update(frame_of(core))
    assert requests.table()[1][1][:2] == ["2", "swapped out"] and "1 swapped out" in requests.summary()
    assert "on the host" in requests.root.text
    run(core)
    view.update(frame_of(core))
    assert not len(view.host.cells.data["x"])
    plain = BlockMap()
    plain.update(frame_of(make_core()))
    assert not plain.host.root.visible


def test_a_large_host_pool_shows_several_blocks_in_a_square():
    core = make_core(preemption_mode="swap", num_cpu_blocks=1000)
    core.add_request([1] * 6, greedy(8))
    core.step()
    core.preempt(1)
    view = BlockMap()
    view.update(frame_of(core))
    assert view.host.words.text.endswith("<b>2</b> of 1,000 in use. Each square is 6 blocks.")
    assert len(view.host.free.data["x"]) + len(view.host.cells.data["x"]) == 167


# --- all of them ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [PrefixTree, EvictionQueue])
def test_a_second_costs_little_and_time_may_go_back(kind, wire):
    view = kind()
    line = wire(view)

    def once_a_source():
        changed = line.sources_changed()
        assert len(changed) == len(set(changed)), "at most one change a source and tick"

    seconds, frame, source = seconds_of(view, line, once_a_source)
    assert np.mean(seconds) < 6000, seconds
    said, again = read_twice(view, frame, source, lambda: (view.table(), labels(view)))
    assert again == said
    assert kind().empty and kind().summary() and kind().table()[1] == []
