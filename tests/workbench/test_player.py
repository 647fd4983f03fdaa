"""The player without a page: moving through what was recorded, playing it, and what each button and key comes down to."""

import pytest
from fake_frames import FakeEngine
from fake_recording import FakeRecording
from kvscope.engine.events import EventKind
from kvscope.workbench.player import PLAYED, Player
from kvscope.workbench.time_commands import TimeCommands


class Steered(FakeEngine):
    """Remembers what it was told."""

    def __init__(self):
        super().__init__()
        self.told, self.steps_per_second, self.state = [], None, "paused"

    def run_until(self, kind, *, wait):
        self.told.append((kind, wait))


def recorded(steps=170, **options):
    engine = Steered()
    recording = FakeRecording(engine)
    for _ in range(steps):
        engine.step()
        recording.record()
    return engine, recording, Player(engine, lambda: recording, **options)


def test_back_and_forward_stay_within_what_was_recorded():
    engine, _, player = recorded(50)
    assert player.at is None and player.source() is engine
    assert player.back() == 49 and player.source().snapshot().step == 49
    assert player.back(20) == 29 and player.back(1000) == 1
    player.forward()
    assert player.at == 2
    player.forward(47)
    assert player.at == 49
    player.forward()
    assert player.at is None, "behind the newest recorded step it is live"
    assert player.first() == 1
    player.now()
    assert player.source() is engine
    for n in (0, True, 1.5):
        with pytest.raises(ValueError, match="n="):
            player.back(n)
    with pytest.raises(ValueError, match="recorded are steps 1 to 50"):
        player.goto(51)
    assert player.at is None


def test_events_are_found_in_both_directions():
    _, recording, player = recorded()
    steps = recording.steps_with(EventKind.EVICTED).tolist()
    seen = []
    player.first()
    while player.seek(1, frozenset({EventKind.EVICTED})):
        seen.append(player.at)
    assert seen == steps and len(steps) > 5
    while player.seek(-1, frozenset({EventKind.EVICTED})):
        seen.pop()
    assert player.at == steps[0] and len(seen) == 1
    player.now()
    assert player.seek(-1) and player.at < 170


def test_an_old_step_that_was_dropped_becomes_the_first_that_is_left():
    _, recording, player = recorded(60)
    player.goto(5)
    recording.forget(20)
    assert player.source().snapshot().step == 20 and player.at == 20


def test_playing_follows_the_clock_and_ends_live():
    _, _, player = recorded(60)
    player.goto(10)
    player.play(100.0)
    player.advance(100.0)
    assert player.at == 10
    player.advance(100.26)
    assert player.at == 10 + int(0.26 * PLAYED)
    player.speed = 5.0
    player.advance(100.3)
    player.advance(100.66)
    assert player.at == 17
    player.advance(200.0)
    assert player.at == 19, "a late tick does not make it leap"
    player.goto(58)
    assert not player.playing
    player.play(300.0)
    player.advance(300.45)
    assert player.at is None and not player.playing


def test_a_recording_in_the_engines_place():
    engine, own, player = recorded(30)
    _, other, _ = recorded(80)
    origin = player.origin
    player.show(other, 10.0)
    assert player.at == 1 and player.playing and player.shows_file and player.origin != origin
    assert player.recording is other and player.source().snapshot().step == 1
    player.now()
    assert player.at == 80, "its last step, not the engine"
    player.forward(5)
    assert player.at == 80
    player.play(20.0)
    assert player.at == 1, "played again from the start"
    player.leave()
    assert player.at is None and player.recording is own and player.source() is engine
    alone = Player(None, lambda: None, shown=other)
    assert alone.at == 80 and not alone.can_leave
    with pytest.raises(RuntimeError, match="no engine to go back to"):
        alone.leave()


def test_nothing_recorded_yet_is_said():
    player = Player(FakeEngine(), lambda: None)
    for move in (player.back, player.forward, player.first, lambda: player.seek(1)):
        with pytest.raises(ValueError, match="nothing has been recorded yet"):
            move()


class Bench:
    """As much of a workbench as the player's commands ask for."""

    def __init__(self):
        self.engine, self.recording, self.player = recorded()
        self.done = []
        self.commands = TimeCommands(self)

    def __getattr__(self, name):
        return lambda *_: self.done.append(name)


def test_the_same_buttons_walk_the_past_and_move_the_engine():
    bench = Bench()
    act, player = bench.commands.acts, bench.player
    act["step"]()
    act["toggle"]()
    bench.engine.state = "running"
    act["toggle"]()
    assert bench.done == ["pause", "step", "resume", "pause"]
    act["next_event"]()
    assert bench.engine.told == [("event", False)]
    act["back"]()
    act["step"]()
    assert player.at is None and bench.done[4:] == []
    act["first"]()
    act["toggle"]()
    assert player.playing
    act["toggle"]()
    assert not player.playing and player.at == 1
    bench.commands.until("preemption")
    assert player.at == int(bench.recording.steps_with(EventKind.PREEMPTED)[0])
    player.goto(169)
    with pytest.raises(RuntimeError, match="the recording ends before a request was preempted again"):
        bench.commands.until("preemption")
    assert bench.engine.told == [("event", False)], "the engine was left alone"
    act["now"]()
    assert player.at is None


def test_the_scrubber_and_the_menu():
    bench = Bench()
    bench.commands.goto(92.6)
    assert bench.player.at == 93
    bench.commands.goto(-40.0)
    assert bench.player.at == 1
    bench.commands.goto(400)
    assert bench.player.at is None
    bench.commands.visit(93)
    assert bench.player.at == 93
    with pytest.raises(ValueError, match="step=0: "):
        bench.commands.visit(0)
    bench.commands.visit(170)
    assert bench.player.at is None
    bench.commands.speed("5")
    assert bench.engine.steps_per_second == bench.player.speed == 5.0
    bench.commands.speed("")
    assert bench.engine.steps_per_second is bench.player.speed is None
    bench.commands.require_live()
    bench.player.back()
    with pytest.raises(RuntimeError, match="you look at step 169 of a recording; press End"):
        bench.commands.require_live()
