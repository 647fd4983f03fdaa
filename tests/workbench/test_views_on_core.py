"""The views on the engine core itself: what they draw and say agrees with the books that the engine keeps."""

import itertools
import zlib

import numpy as np
import pytest
from fake_frames import WORK
from fake_model import VOCAB, make_core
from kvscope.engine.events import EventKind, EventLog
from kvscope.engine.sampling.params import SamplingParams
from kvscope.engine.snapshot import BlockState
from kvscope.workbench.sentences import Context, lines, sentence
from kvscope.workbench.theme import OwnerSlots
from kvscope.workbench.views.base import Frame
from kvscope.workbench.views.block_card import BlockEvents, block_card
from kvscope.workbench.views.block_map import BlockMap
from kvscope.workbench.views.block_marks import marks_of
from kvscope.workbench.views.block_tables import BlockTables
from kvscope.workbench.views.memory import KVUse
from kvscope.workbench.views.phases import Phases

STEPS = 150


def prompt(pieces):
    """The same name is the same text."""
    parts = [np.random.default_rng(zlib.crc32(name.encode())).integers(0, VOCAB - 10, n) for name, n in pieces]
    return np.concatenate(parts).tolist()


@pytest.fixture(scope="module")
def frames():
    """One frame a step: shared prompts, samples, copies, evictions and preemptions on 127 blocks."""
    log, slots, index, taken = EventLog(), OwnerSlots(), 0, []
    core = make_core(
        block_size=16, num_blocks=128, max_num_batched_tokens=64, max_num_seqs=16, events=log, watermark=0.02
    )  # fmt: skip
    for step in range(1, STEPS + 1):
        for arrival, pieces, max_tokens, n, label in WORK:
            if arrival == step:
                params = SamplingParams(temperature=1.0, n=n, max_tokens=max_tokens, ignore_eos=True)
                core.add_request(prompt(pieces), params, label=label)
        core.step()
        events, index, lost = log.since(index)
        taken.append(Frame(core.snapshot(), events, lost, None, None, float(step), slots))
    return taken


def test_the_run_has_what_the_views_are_for(frames):
    kinds = {event.kind for frame in frames for event in frame.events}
    assert kinds >= {EventKind.COPIED, EventKind.EVICTED, EventKind.PREEMPTED, EventKind.FORKED, EventKind.CACHE_HIT}


def test_every_mark_is_on_a_block_that_was_taken_in_that_step(frames):
    marked = 0
    for frame in frames:
        for block, (kind, source) in marks_of(frame.events, frame.snapshot.step).items():
            assert 0 < block < 128 and (kind == "copied") == (source >= 0)
            marked += frame.snapshot.block_state[block] >= BlockState.ACTIVE
    assert marked > 100


def test_map_and_tables_agree_with_the_block_tables_of_the_engine(frames):
    block_map, tables = BlockMap(), BlockTables()
    for frame in frames:
        block_map.update(frame)
        tables.update(frame)
        readers = np.zeros(128, int)
        for request in frame.snapshot.requests:
            np.add.at(readers, request.block_tables[0], 1)
        for block in range(1, 128):
            label = block_map.source.data["label"][block]
            if readers[block] > 1:
                assert label == f"×{readers[block]}"
            elif readers[block] == 1:
                assert label == frame.labels[frame.readers(block)[0]]
            else:
                assert label in ("·", "", "next")
        drawn = [x for x in tables.source.data["x"] if x == x]
        distinct = {(b, c) for r in frame.snapshot.requests for c, b in enumerate(r.block_tables[0])}
        assert len(drawn) >= len(distinct)


def test_kv_use_agrees_with_the_snapshot(frames):
    view = KVUse()
    for frame in frames:
        view.update(frame)
        used = int((frame.snapshot.ref_count[1:] > 0).sum())
        if not any(event.kind is EventKind.STEP for event in frame.events):
            continue
        assert view.line.data["blocks"][-1] == pytest.approx(100 * used / 127, abs=0.06)


def test_sentences_of_a_real_run_are_short(frames):
    context, told = Context(), []
    for frame in frames:
        context.learn(frame.events, frame.snapshot)
        told += lines(frame.events, context)
    assert len(told) > 60
    for line in told:
        assert len(line.headline.split()) <= 20 and line.headline.endswith("."), line
        assert len(line.consequence.split()) <= 20 and line.consequence.endswith("."), line
    assert any("copied block" in line.headline and "still reads block" in line.headline for line in told)


def test_phases_of_a_real_run_are_whole(frames):
    phases = Phases()
    for frame in frames:
        phases.update(frame)
    for spans in phases.spans.values():
        for before, after in itertools.pairwise(spans):
            assert after.first in (before.last, before.last + 1), (before, after)
    assert [s.phase for s in phases.spans[3]] == ["prefill", "decode", "finished"]


def test_blocks_of_two_sizes_are_drawn_each_as_far_as_it_is_written():
    """Groups of 8 and 2 tokens a block: a full block of either is drawn full, and counts with its own slots."""
    log, slots = EventLog(), OwnerSlots()
    core = make_core(windows=(0, 5), block_size={"full": 8, "sliding": 2}, num_blocks=24, events=log)
    core.add_request(prompt([("a", 11)]), SamplingParams(max_tokens=4, ignore_eos=True))
    core.step()
    events = log.since(0)[0]
    frame = Frame(core.snapshot(), events, 0, None, None, 1.0, slots)
    block_map, tables = BlockMap(), BlockTables()
    block_map.update(frame)
    tables.update(frame)
    full, sliding = (table.tolist() for table in frame.snapshot.requests[0].block_tables)
    assert block_map.table()[1][0] == ["1", " ".join(map(str, [*full, *filter(None, sliding)])), "16", "6"]
    partly = [block for block, edge in enumerate(block_map.source.data["unwritten"]) if edge == edge]
    assert partly == sorted([full[1], sliding[5]])
    assert [row[0] for row in tables.table()[1]] == ["1, KV group 0, blocks of 8", "1, KV group 1, blocks of 2"]
    assert block_card(frame, sliding[4], lambda _: None, str, BlockEvents()).count('title="slot ') == 2
    context = Context()
    context.learn(events, frame.snapshot)
    published = [event for event in events if event.kind is EventKind.PUBLISHED]
    told = [sentence(event, context)[1].removesuffix(" of request 1.") for event in published]
    assert told == [f"It holds tokens {part}" for part in ("1 to 8", "1 to 2", "3 to 4", "5 to 6", "7 to 8")]
