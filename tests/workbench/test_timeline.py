"""The timeline: phases out of snapshots and events, and rows that stay where they are."""

import itertools

import numpy as np
from bokeh.events import Tap
from fake_frames import FakeSource
from kvscope.engine.events import EventKind
from kvscope.workbench.theme import DARK
from kvscope.workbench.views.base import Selection
from kvscope.workbench.views.phases import Phases
from kvscope.workbench.views.timeline import Timeline
from kvscope.workbench.views.timeline_shapes import lane_places


def followed(steps, every=1):
    phases, source = Phases(), FakeSource()
    for _ in range(0, steps, every):
        phases.update(source.frame(steps=every))
    return phases


def told(phases, request_id):
    return [(s.phase, s.first, s.last) for s in phases.spans[request_id]]


def test_a_request_that_runs_at_once_has_prefill_and_decode():
    assert told(followed(93), 1) == [("prefill", 2, 3), ("decode", 4, 93)]


def test_a_long_prompt_is_prefilled_over_several_steps():
    phase, first, last = told(followed(93), 4)[0]
    assert (phase, first) == ("prefill", 24) and last > 26


def test_a_preempted_request_stops_and_resumes():
    phases = followed(290)
    names = [phase for phase, _, _ in told(phases, 10)]
    assert names[:5] == ["prefill", "decode", "preempted", "prefill", "decode"] and names[-1] == "finished"
    stopped = next(s for s in phases.spans[10] if s.phase == "preempted")
    assert stopped.first == 107 and "was preempted because 6b needed a block" in stopped.why


def test_a_viewer_that_comes_later_tells_the_same_phases():
    source, late = FakeSource(), Phases()
    late.update(source.frame(steps=290))
    watched = followed(290)
    for request_id in (1, 2, 4, 5):
        assert told(late, request_id) == told(watched, request_id)


def test_a_viewer_that_looks_seldom_tells_the_same_phases():
    seldom, watched = followed(290, every=29), followed(290)
    for request_id in (1, 2, 4, 5, 10):
        assert told(seldom, request_id) == told(watched, request_id)
        lanes = [[s.lanes for s in phases.spans[request_id] if s.lanes] for phases in (seldom, watched)]
        assert lanes[0] == lanes[1]


def test_a_viewer_that_comes_after_a_swap_tells_prefill_from_decode():
    frame, late = FakeSource().frame(steps=110), Phases()
    for event in frame.events:
        if event.kind is EventKind.PREEMPTED:
            event.numbers["swapped_tokens"], event.numbers["recompute_tokens"] = event.numbers["recompute_tokens"], 0
    late.update(frame)
    assert told(late, 10) == told(followed(110), 10)
    assert [phase for phase, _, _ in told(late, 10)] == ["prefill", "decode", "preempted"]


def test_phases_neither_overlap_nor_leave_gaps():
    for spans in followed(290).spans.values():
        for before, after in itertools.pairwise(spans):
            assert after.first in (before.last, before.last + 1), (before, after)
            assert not before.open
        assert spans[-1].phase == "finished" or spans[-1].open


def test_a_waiting_request_says_why():
    phases = followed(108)
    waiting = phases.spans[11][0]
    assert waiting.phase == "waiting" and waiting.first == 91 and waiting.why.startswith("Request 11 is waiting")


def test_the_cached_share_of_a_prefill():
    assert followed(60).spans[7][0].cached == 224 / 239
    assert followed(60).spans[1][0].cached == 0


def test_samples_have_a_lane_each_that_ends_when_they_do():
    span = next(s for s in followed(126).spans[3] if s.phase == "decode")
    assert set(span.lanes) == {0, 1, 2, 3} and max(span.lanes.values()) <= 125


def test_a_viewer_that_skips_steps_ends_in_the_same_phases():
    every, some = followed(160), followed(160, every=10)
    for request_id, spans in every.spans.items():
        assert [s.phase for s in spans][-1] == [s.phase for s in some.spans[request_id]][-1]
        assert spans[0].first == some.spans[request_id][0].first


def drawn(steps, **options):
    view, source = Timeline(**options), FakeSource()
    for _ in range(steps):
        frame = source.frame()
        view.update(frame)
    return view, frame, source


def test_rows_are_requests_and_open_ends_are_now():
    view, _frame, _ = drawn(131)
    assert view.rows.data["label"] == [str(i) for i in range(1, 15)]
    ends = [x1 for x1, request in zip(view.lanes.data["x1"], view.lanes.data["request"], strict=True) if request == 1]
    assert ends == [131]
    assert view.now.data["text"] == ["step 131"]


def test_one_change_a_source_and_little_of_it(wire):
    view, source = Timeline(), FakeSource()
    line, sizes = wire(view), []
    for _ in range(290):
        view.update(source.frame())
        changed = line.sources_changed()
        assert len(changed) == len(set(changed))
        sizes.append(line.size())
    assert np.mean(sizes) < 1300


def test_moving_ends_leaves_what_drawing_anew_would():
    view, frame, _ = drawn(200)
    before = {name: list(view.lanes.data[name]) for name in ("x0", "x1", "y0")}
    view._same = None
    view._draw(frame)
    for name, values in before.items():
        assert [v for v in values if v == v] == [v for v in view.lanes.data[name] if v == v]


def test_the_reason_of_the_selected_request_stands_in_its_row():
    view, _, source = drawn(120)
    view.update(source.frame(steps=0, selection=Selection("request", 11)))
    assert view.why.data["text"][0].startswith("Request 11 is waiting because")
    assert view.rows.data["band"][view.rows.data["label"].index("11")] == 1.0
    view.update(source.frame(steps=0))
    assert view.why.data["text"] == []


def test_taps_twins_and_themes():
    chosen = []
    view, _, _ = drawn(131, on_select=chosen.append)
    view._tapped(Tap(view.figure, x=100, y=5.5))
    view._tapped(Tap(view.figure, x=100, y=-1))
    assert chosen == [Selection("request", 6)]
    headers, rows = view.table()
    assert headers == ["Request", "Steps", "Phase", "Why"] and rows[0] == ["1", "2–3", "prefill", rows[0][3]]
    view.restyle(DARK)
    assert view.figure.xgrid.grid_line_color == DARK.line
    assert Timeline().summary().startswith("Nothing has run yet")


def test_lanes_share_the_height_of_a_row():
    places = lane_places(4)
    assert len(places) == 4 and places[0][0] == 0.175 and places[-1][1] < 0.8
    assert all(low < high for low, high in places)
