"""Throughput and KV use: values per step, the mean of ten, and a bounded stream."""

from dataclasses import replace

import numpy as np
import pytest
from fake_frames import FakeSource
from kvscope.engine.events import Event, EventKind
from kvscope.workbench.theme import DARK
from kvscope.workbench.views.base import Frame
from kvscope.workbench.views.charts import STEPS, spread_apart
from kvscope.workbench.views.memory import KVUse
from kvscope.workbench.views.throughput import Throughput


def step(number, **numbers):
    return Event(number, number, 0.0, EventKind.STEP, numbers=numbers)


def test_throughput_is_the_mean_of_ten_steps():
    view = Throughput()
    events = [step(i, decode_tokens=i, prefill_tokens=0, seconds=0.5) for i in range(1, 21)]
    rows = view.values(events)
    assert rows[0] == (1, 2.0, 0.0)
    assert rows[-1] == (20, sum(range(11, 21)) / 5.0, 0.0)


def test_a_step_without_time_is_no_division_by_zero():
    assert Throughput().values([step(1, decode_tokens=3)]) == [(1, 0.0, 0.0)]


def test_kv_use_counts_blocks_and_slots():
    view, source = KVUse(), FakeSource()
    frame = source.frame(steps=93)
    view.update(frame)
    snapshot = frame.snapshot
    used = snapshot.ref_count[1:] > 0
    blocks, tokens = view.line.data["blocks"][-1], view.line.data["tokens"][-1]
    assert blocks == pytest.approx(100 * used.sum() / 127, abs=0.05)
    assert tokens == pytest.approx(100 * snapshot.filled[1:][used].sum() / (127 * 16), abs=0.05)
    assert (
        view.summary()
        == f"Blocks in use: {blocks:.0f} %. Tokens stored: {tokens:.0f} %. The dotted gap is unwritten slots."
    )


@pytest.mark.parametrize("chart", [Throughput, KVUse])
def test_the_stream_is_small_and_bounded(chart, wire):
    view, source = chart(), FakeSource()
    line, sizes = wire(view), []
    for _ in range(200):
        view.update(source.frame())
        assert len(set(line.sources_changed())) == len(line.sources_changed())
        sizes.append(line.size())
    assert np.mean(sizes[1:]) < 700
    last = source.frame()
    snapshot = replace(last.snapshot, step=5000, state="running")
    view.update(Frame(snapshot, [step(i, decode_tokens=1, seconds=0.1) for i in range(300, 5000)], slots=last.slots))
    assert len(view._history) <= STEPS and len(view.line.data["step"]) <= STEPS
    assert len(view.line.data["step"]) < 300  # of very many steps in one tick only some are drawn


def test_end_labels_stay_apart_and_inside():
    low, high = spread_apart([50.0, 52.0], 20.0, 100.0)
    assert high - low >= 20
    assert spread_apart([0.0, 100.0], 20.0, 100.0) == [13.0, 90.0]


def test_axis_tops_are_round_and_restyling_repaints():
    view, source = Throughput(), FakeSource()
    assert [view.top(v) for v in (0, 3, 62, 260, 1001)] == [1.0, 3, 75, 300, 1500]
    view.update(source.frame(steps=60))
    view.restyle(DARK)
    assert view.ends.data["colour"] == [DARK.decode, DARK.prefill]
    assert view.figure.ygrid.grid_line_color == DARK.line
    assert view._names.glyph.background_fill_color == view._numbers.glyph.background_fill_color == DARK.panel


def test_twins_show_the_last_eight_steps():
    view, source = Throughput(), FakeSource()
    assert view.summary().startswith("Nothing has run yet")
    view.update(source.frame(steps=60))
    headers, rows = view.table()
    assert headers == ["Step", "decode", "prefill"] and len(rows) == 8 and rows[-1][0] == "60"
