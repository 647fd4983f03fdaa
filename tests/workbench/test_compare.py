"""`compare` on real tiny engines: the same work on both, in lock-step, counted from their own events; and its page's data."""

import threading
import time

import pytest
from kvscope.engine import Engine
from kvscope.engine.bench.trace import Job
from kvscope.engine.events import Event, EventKind
from kvscope.engine.snapshot import BlockState
from kvscope.workbench import compare
from kvscope.workbench.compare_presets import PRESETS
from kvscope.workbench.compare_tally import Tally
from kvscope.workbench.recorder import Recorder
from kvscope.workbench.scenarios import SCENARIOS

SMALL = {"dtype": "float32", "num_threads": 1}


@pytest.fixture
def folder(tiny_folder):
    return str(tiny_folder)


def value(table, metric, side):
    return dict(zip(table["metric"], table[side], strict=True))[metric]


def threads():
    return [t.name for t in threading.enumerate() if t.name.startswith(("kvscope-compare", "kvscope-engine"))]


def test_the_same_requests_paged_and_contiguous(folder):
    before = threads()
    with compare("paged/contiguous", model=folder, **SMALL) as cmp:
        a, b = (side.engine for side in cmp.sides)
        assert a.config.kv_allocator == "paged" and b.config.kv_allocator == "orca-max"
        table = cmp.run([Job(list(range(5, 25 + i)), 30) for i in range(6)], timeout=60)
        texts = [[h.result().outputs[0].token_ids for _, h in sorted(e.handles().items())] for e in (a, b)]
        assert texts[0] == texts[1] and len(texts[0]) == 6, "the same work, whatever the memory"
        metrics = a.metrics(), b.metrics()
        for side, numbers in zip("AB", metrics, strict=True):
            assert value(table, "Requests finished", side) == 6
            assert value(table, "Tokens computed", side) == numbers["kvscope:computed_tokens_total"]
            assert value(table, "Steps", side) == numbers["kvscope:steps_total"]
            assert value(table, "Time", side) > 0 and value(table, "First token, median", side) > 0
        assert value(table, "Steps", "B") > 1.5 * value(table, "Steps", "A"), "fewer of them fit at the same time"
        assert value(table, "Unwritten, mean", "B") > 0.3 > value(table, "Unwritten, mean", "A")
        assert value(table, "Steps", "B / A") == value(table, "Steps", "B") / value(table, "Steps", "A")
    assert threads() == before


def test_the_side_that_is_behind_catches_up_in_every_turn(folder):
    with compare("static/continuous", model=folder, **SMALL) as cmp:
        cmp.submit([Job([7, 8, 9], 4 + 9 * (i % 3)) for i in range(9)])
        most = 4  # tokens of one step, once the prompts are in: one a seat
        cmp.step(8)
        while all(side.has_work for side in cmp.sides):
            ahead = max(side.tally.computed for side in cmp.sides)
            cmp.step()
            computed = [side.tally.computed for side in cmp.sides]
            assert all(c >= ahead or not s.has_work for c, s in zip(computed, cmp.sides, strict=True))
            if all(side.has_work for side in cmp.sides):
                assert max(computed) - min(computed) <= 3 * most
        static, continuous = cmp.sides
        assert continuous.tally.finished >= static.tally.finished
        cmp.run()
        assert static.tally.steps > continuous.tally.steps and static.tally.finished == continuous.tally.finished == 9


def test_cached_text_shows_in_the_numbers(folder):
    with compare("cache/no-cache", model=folder, pace="steps", **SMALL) as cmp:
        cmp.run([Job(list(range(80)), 3)])
        table = cmp.run([Job([*range(80), 7], 3)])
        assert value(table, "Tokens from the cache", "A") == 80 and value(table, "Tokens from the cache", "B") == 0
        assert value(table, "Tokens computed", "B") - value(table, "Tokens computed", "A") == 80


def test_questions_that_wait_for_answers_are_asked_on_every_side(folder):
    with compare({}, {"block_size": 8, "num_blocks": 129}, model=folder, num_blocks=128, **SMALL) as cmp:
        cmp.run("multi-turn", timeout=60)
        assert [side.tally.finished for side in cmp.sides] == [4, 4]
        assert cmp.sides[1].name == "block_size=8, num_blocks=129"


def test_one_looks_back_and_goes_on_from_the_newest_turn(folder):
    with compare("hash/radix", model=folder, **SMALL) as cmp:
        cmp.submit([Job([3, 4, 5], 12)])
        cmp.step(6)
        steps = cmp.steps_at(6)
        for wrong in (0, -1, 1.5, True):
            with pytest.raises(ValueError, match=f"n={wrong}: must be a number of turns, at least 1"):
                cmp.back(wrong)
        assert cmp.back(2) == 4 and cmp.looking_at == 4
        tick = cmp._tick_now()
        assert [t.snapshot.step for t in tick.sides] == list(cmp.steps_at(4)) != list(steps)
        cmp.goto(99)
        assert cmp.looking_at is None and [t.snapshot.step for t in cmp._tick_now().sides] == list(steps)
        cmp.back()
        cmp.step()
        assert cmp.turn == 7 and cmp.looking_at is None


def test_it_runs_in_the_background_and_a_pause_stops_it(folder):
    with compare("hash/radix", model=folder, **SMALL) as cmp:
        cmp.speed = 20.0
        cmp.submit([Job([3, 4, 5], 200)])
        cmp.resume()
        until = time.monotonic() + 20
        while cmp.turn < 3:
            assert time.monotonic() < until
            time.sleep(0.01)
        assert cmp.state == "running"
        with pytest.raises(RuntimeError, match="pause"):
            cmp.step()
        cmp.pause()
        turn = cmp.turn
        assert cmp.state == "paused" and cmp.step() == turn + 1
        with pytest.raises(TimeoutError, match="not finished"):
            cmp.run(timeout=0.2)
        assert cmp.state == "paused"


def test_engines_that_existed_go_on_afterwards(folder):
    with Engine(folder, num_blocks=64, **SMALL) as a, Engine(folder, num_blocks=64, max_num_seqs=2, **SMALL) as b:
        b.pause()
        with compare(a, b, names=("wide", "narrow")) as cmp:
            assert (a.state, b.state) == ("paused", "paused") and cmp.sides[0].name == "wide"
            cmp.run([[5, 6, 7]] * 4, max_tokens=5, ignore_eos=True)
        assert (a.state, b.state) == ("running", "paused")
        with pytest.raises(ValueError, match="the same engine twice"):
            compare(a, a)
        with pytest.raises(TypeError, match="num_blocks: options are for engines"):
            compare(a, b, num_blocks=3)


def test_recordings_are_compared_as_they_were(folder, tmp_path):
    recordings = []
    for seats in (1, 4):
        with Engine(folder, num_blocks=64, max_num_seqs=seats, **SMALL) as engine:
            recorder = Recorder(engine)
            engine.generate([[5, 6, 7]] * 4)
            recordings.append(recorder.catch_up())
            recorder.stop()
    file = recordings[1].save(tmp_path / "four.kvscope")
    with compare(recordings[0], file, pace="steps") as cmp:
        with pytest.raises(RuntimeError, match="recording"):
            cmp.submit([[1, 2]])
        table = cmp.run()
        assert [side.step for side in cmp.sides] == [recording.last_step for recording in recordings]
        assert value(table, "Requests finished", "A") == value(table, "Requests finished", "B") == 4
        assert value(table, "Steps", "A") > value(table, "Steps", "B")


@pytest.mark.parametrize(
    ("sides", "options", "error", "says"),
    [
        (("paged",), {}, ValueError, "paged/contiguous"),
        (({},), {}, ValueError, "2 to 4"),
        (({},) * 5, {}, ValueError, "got 5 sides"),
        (({}, {}), {"pace": "hours"}, ValueError, "pace='hours'"),
        (({}, {}), {"names": ["x"]}, ValueError, "names has 1"),
        (({}, 3), {}, TypeError, "side B=3: must be an Engine"),
        (({}, {"blocks": 3}), {}, TypeError, "unknown option 'blocks'"),
    ],
)
def test_bad_calls_say_what_is_wrong_and_leave_no_engine(folder, sides, options, error, says):
    before = threads()
    with pytest.raises(error, match=says):
        compare(*sides, model=folder, num_blocks=32, **SMALL, **options)
    assert threads() == before


def test_bad_work_is_refused_by_name(folder):
    cmp = compare("hash/radix", model=folder, **SMALL)
    with pytest.raises(ValueError, match="shared-prefix"):
        cmp.run("nothing")
    with pytest.raises(TypeError, match="workload=3"):
        cmp.submit(3)
    with pytest.raises(ValueError, match="engine A: "):
        cmp.submit([Job([1, 2], 4), Job([1], 5000)])
    assert not any(side.has_work for side in cmp.sides)
    cmp.close()
    with pytest.raises(RuntimeError, match="closed"):
        cmp.run("one-chat")


def test_what_one_engine_refuses_none_is_given(folder):
    with compare({}, {"num_blocks": 8}, model=folder, num_blocks=64, **SMALL) as cmp:
        with pytest.raises(ValueError, match="engine B: a prompt of"):
            cmp.submit([Job([1, 2], 4), Job([1] * 150, 4)])
        assert not any(side.has_work for side in cmp.sides) and cmp.step() == 0
        cmp.run([Job([1, 2], 4)])
        assert [side.tally.written for side in cmp.sides] == [4, 4]


def test_every_preset_names_options_that_exist():
    from kvscope.engine.config import EngineConfig

    for preset in PRESETS.values():
        for title, sentence, options in preset.sides:
            EngineConfig.from_options("default", {**preset.shared, **options})
            assert title and sentence.endswith(".")


def test_time_is_the_engines_own(folder):
    """Two steps of 1 s each, whatever the clock on the wall says in between."""
    with Engine(folder, num_blocks=32, **SMALL) as engine:
        engine.pause()
        tally = Tally(engine.snapshot())
        engine.submit([5, 6, 7])
        index = 0
        for _ in range(2):
            engine.step()
            events, index, _ = engine.events.since(index)
            tally.add(engine.snapshot(), [_slow(event) for event in events])
            time.sleep(0.01)
        assert tally.seconds == 2.0 and tally.ttft == [1.0] and tally.written == 2 and tally.rate == 1.0
        engine.handles()[1].cancel()


def _slow(event: Event) -> Event:
    return event._replace(numbers={**event.numbers, "seconds": 1.0}) if event.kind is EventKind.STEP else event


def test_the_page_shows_reserved_memory_and_names_the_engine(folder):
    with compare("paged/contiguous", model=folder, **SMALL) as cmp:
        screen = cmp._make_screen(lambda *message: None)
        cmp.submit([Job(list(range(9, 30)), 40) for _ in range(8)])
        cmp.step(3)
        screen.update(cmp._tick_now(), cmp._status(), everything=True)
        paged, contiguous = (panel.view for panel in screen.panels if panel.name == "block_map")
        assert paged.title == "A. Paged blocks" and len(paged.reserved.data["x"]) == len(paged.gaps.data["x"]) == 0
        snapshot = cmp.sides[1].tally.snapshot
        taken = (snapshot.ref_count > 0) & (snapshot.filled == 0)
        rounded = len(contiguous.gaps.data["x"]) - int((snapshot.block_state[1:] == BlockState.EMPTY).sum())
        assert len(contiguous.reserved.data["x"]) + rounded == int(taken[1:].sum()) > 60
        assert len(contiguous.gaps.data["xs"]) == len(contiguous.gaps.data["x"]) > 0, "nobody fits into what is left"
        assert "Engine A:" in screen.header.say.text or "Engine B:" in screen.header.say.text
        assert "A runs 8 sequences, B runs" in screen.view("numbers").summary()
        copy = screen.saved_copy(cmp._tick_now())
        assert "A. Paged blocks" in copy and "B. Contiguous reservation" in copy and copy.count("<svg") >= 2
        same = cmp.sides[0].slots.slot(8) == cmp.sides[1].slots.slot(8)
        assert same, "a request has one hue"


def test_the_page_obeys(folder):
    with compare("hash/radix", model=folder, **SMALL) as cmp:
        obey = cmp._commands.run
        obey("submit", {"scenario": "one-chat"})
        cmp._wait(time.monotonic() + 60)
        assert cmp.sides[0].tally.finished == 1 and SCENARIOS["one-chat"].title in cmp.choices.note[1]
        obey("submit", {"scenario": "x"})
        assert cmp.choices.note[0] == "warn" and "one-chat" in cmp.choices.note[1]
        obey("do", "back")
        assert cmp.looking_at == cmp.turn - 1
        obey("do", "now")
        obey("pace", "time")
        obey("pace", "hours")
        obey("select", "block", 5.0)
        obey("do", "room")
        obey("unheard", 1)
        assert cmp.looking_at is None and cmp.pace == "time" and cmp.choices.selection.id == 5 and cmp.choices.room
        cmp.submit([[3, 4]] * 2, max_tokens=8, ignore_eos=True)
        obey("until", "finish")
        cmp._wait(time.monotonic() + 60)
        assert max(side.tally.finished for side in cmp.sides) == 3
        with pytest.raises(ValueError, match=r"^show\('timeline'\): the views of a comparison are one page"):
            cmp._make_screen(print, only="timeline")
