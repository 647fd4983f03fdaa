"""Inside of a step: the events of each part, done to the state before it, lead to the state after it."""

import numpy as np
import pytest
from fake_frames import FakeEngine
from fake_recording import FakeRecording
from kvscope.engine.events import EventKind
from kvscope.engine.snapshot import BlockState
from kvscope.workbench import Workbench
from kvscope.workbench.player import Player
from kvscope.workbench.recorder import Recording
from kvscope.workbench.sub_step import PARTS, SubStep, state_of
from kvscope.workbench.time_commands import TimeCommands
from kvscope.workbench.views.header import Status
from kvscope.workbench.views.player_html import buttons


@pytest.fixture(scope="module")
def demo():
    return Recording.load("demo")


def tables_of(snapshot):
    return {(r.id, r.child): [t.tolist() for t in r.block_tables] for r in snapshot.requests if len(r.block_tables[0])}


def test_the_events_of_every_step_of_a_run_lead_to_its_end(demo):
    """Samples, beams, evictions and preemptions are in it."""
    for step in range(demo.first_step + 1, demo.last_step + 1):
        whole, before, after = SubStep(demo, step, len(PARTS)), demo.state_at(step - 1), demo.state_at(step)
        got = state_of(before, after, whole.done, len(PARTS) - 1)
        for name in ("block_state", "ref_count", "generation", "filled"):
            assert np.array_equal(getattr(got, name), getattr(after, name)), f"step {step}, {name}"
        assert tables_of(got) == tables_of(after), f"step {step}"
        assert whole.snapshot() is whole._after.snapshot()


def parts_of(demo, step):
    return [SubStep(demo, step, part).snapshot() for part in range(1, len(PARTS) + 1)]


def test_a_copy_on_write_in_its_parts(demo):
    step = int(demo.steps_with(EventKind.COPIED)[0])
    copied = next(e for e in SubStep(demo, step, 3).done if e.kind is EventKind.COPIED)
    scheduled, allocated, copy, forward, *_ = parts_of(demo, step)
    source, tokens = int(copied.numbers["source"]), copied.numbers["tokens"]
    assert allocated.block_state[copied.block_id] == scheduled.block_state[copied.block_id] <= BlockState.CACHED
    assert copy.block_state[copied.block_id] == BlockState.ACTIVE and copy.filled[copied.block_id] == tokens
    assert copy.ref_count[source] < allocated.ref_count[source]
    assert forward.filled[copied.block_id] > tokens, "and then it is written"


def test_who_ends_is_there_until_the_last_part(demo):
    step = int(demo.steps_with(EventKind.FINISHED)[0])
    who = next((e.request_id, e.child) for e in SubStep(demo, step, 6).done if e.kind is EventKind.FINISHED)
    *inside, end = parts_of(demo, step)
    running = [{(r.id, r.child) for r in state.requests if r.status == "running"} for state in (*inside, end)]
    assert all(who in there for there in running[:-1]) and who not in running[-1]
    assert inside[-1].num_used_blocks > end.num_used_blocks


def test_events_come_part_by_part_and_none_is_lost(demo):
    step = int(demo.steps_with(EventKind.EVICTED)[0])
    everything, _, _ = demo.at(step).events.since(0)
    seen = [len(SubStep(demo, step, part).since(0)[0]) for part in range(1, len(PARTS) + 1)]
    assert seen == sorted(seen) and seen[-1] == len(everything)
    evicted = [[e.kind for e in SubStep(demo, step, part).done].count(EventKind.EVICTED) for part in (1, 2)]
    assert evicted[0] == 0 < evicted[1]


def test_a_player_walks_the_parts(demo):
    player = Player(None, lambda: None, shown=demo)
    player.goto(10)
    walked = []
    for _ in range(8):
        assert player.sub_step(1)
        walked.append((player.at, player.part))
    assert walked == [(11, 1), (11, 2), (11, 3), (11, 4), (11, 5), (11, 6), (12, 1), (12, 2)]
    assert player.source().part == 2
    assert player.sub_step(-1) and player.sub_step(-1) and (player.at, player.part) == (11, 6)
    player.sub_step(-1)
    player.forward()
    assert (player.at, player.part) == (12, 6), "a step goes on to the end of the next one"
    player.sub_step(-1)
    assert player.back() == 11 and player.part == 6
    player.first()
    assert not player.sub_step(-1) and (player.at, player.part) == (demo.first_step, 6)
    player.now()
    assert not player.sub_step(1)


class Bench:
    """As much of a workbench as the player's commands ask for; each step is recorded."""

    def __init__(self):
        self.engine = FakeEngine()
        self.recording = FakeRecording(self.engine)
        self.player = Player(self.engine, lambda: self.recording)
        self.pause = self.play_demo = lambda: None
        for _ in range(30):
            self.step()

    def step(self):
        self.engine.step()
        self.recording.record()


def test_where_the_next_step_is_not_there_the_engine_makes_it():
    bench = Bench()
    act = TimeCommands(bench).acts
    act["sub_step"]()
    assert (bench.engine.step_number, bench.player.at, bench.player.part) == (31, 31, 1)
    for _ in range(5):
        act["sub_step"]()
    assert bench.player.at is None and bench.engine.step_number == 31, "its end is live again"
    act["sub_back"]()
    assert (bench.player.at, bench.player.part) == (31, 5)


def test_the_page_says_where_it_is():
    wb = Workbench.replay("demo")
    wb.goto(93)
    wb.player.sub_step(1)
    wb.player.sub_step(1)
    status = wb._status()
    screen = wb._make_screen(lambda *message: None)
    screen.update(wb._tick_now(), status, everything=True)
    assert "step <b>94</b>, 2 of 6: allocate" in screen.header.position.text
    assert "You look into step 94, 2 of 6: allocate." in screen.header.banner.text
    taken = screen.view("block_map").sources["marks"].data["kind"]
    wb.player.sub_step(-1)
    screen.update(wb._tick_now(), wb._status(), everything=True)
    assert "1 of 6: schedule" in screen.header.position.text
    assert len(screen.view("block_map").sources["marks"].data["kind"]) <= len(taken)
    wb.now()
    screen.update(wb._tick_now(), wb._status(), everything=True)
    assert " of 6:" not in screen.header.position.text + screen.header.banner.text


def test_buttons_say_that_a_step_has_parts_where_one_can_go_into_it():
    live = buttons(Status(newest=9), "paused")
    assert (
        "with Shift, or S, one part of it" in live and "data-shift=sub_step" in live and "data-shift=sub_back" in live
    )
    turns = buttons(Status(newest=9, unit="turn", has_parts=False), "paused")
    assert "Shift" not in turns and "data-shift" not in turns
    assert "→ one turn" in turns and "Turn</button>" in turns and "5 turns/s" in turns and "1 turn/s" in turns
