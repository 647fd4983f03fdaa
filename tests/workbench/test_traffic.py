"""Traffic: what arrives when, by a clock of the test's own; and once on a real engine."""

import itertools
import json
import statistics
import time
from types import SimpleNamespace

import pytest
from kvscope.engine import Engine
from kvscope.workbench import Workbench, traffic
from kvscope.workbench.arrivals import MIXES, SHAPES, drawn, read_trace
from kvscope.workbench.traffic import Traffic


class Clocked:
    """An engine that writes down when it was asked for what; its time is set by the test."""

    def __init__(self, monkeypatch, room=10**9):
        self.now, self.state, self.room, self.asked, self.handles = 0.0, "running", room, [], []
        self.tokenizer = SimpleNamespace(chat_template=None)
        self.info = SimpleNamespace(spec=SimpleNamespace(vocab_size=50))
        monkeypatch.setattr(traffic.time, "monotonic", lambda: self.now)

    def submit(self, prompt, params):
        if len(self.asked) >= self.room:
            raise ValueError("the queue is full: try again in 3 s")
        self.asked.append((self.now, prompt, params.max_tokens, params.seed))
        self.handles.append(SimpleNamespace(done=False))
        return self.handles[-1]

    def play(self, traffic, seconds):
        until = self.now + seconds
        while self.now < until and (wait := traffic.advance()) is not None:
            self.now += wait


@pytest.fixture
def engine(monkeypatch):
    return Clocked(monkeypatch)


def gaps(shape, burstiness=0.25, seed=0):
    dues = [
        a.due for a in itertools.islice(drawn(shape, "chats", max_tokens=8, burstiness=burstiness, seed=seed), 4000)
    ]
    return [b - a for a, b in itertools.pairwise([0.0, *dues])]


@pytest.mark.parametrize(("shape", "spread"), [("poisson", 1.0), ("bursts", 2.0), ("steady", 0.0)])
def test_gaps_have_the_mean_and_the_spread_of_their_shape(shape, spread):
    drawn_gaps = gaps(shape)
    assert statistics.mean(drawn_gaps) == pytest.approx(1.0, abs=0.08)
    assert statistics.stdev(drawn_gaps) == pytest.approx(spread, abs=0.15)
    assert drawn_gaps == gaps(shape) and (shape == "steady" or drawn_gaps != gaps(shape, seed=1))


def test_the_same_seed_asks_the_same_whatever_the_rate(engine):
    slow = Traffic(engine, rate=1, shape="poisson", seed=7)
    engine.play(slow, 40)
    first, engine.asked = [what for _, *what in engine.asked], []
    fast = Traffic(engine, rate=10, shape="poisson", seed=7)
    engine.play(fast, 4)
    second = [what for _, *what in engine.asked]
    assert len(first) > 20 and abs(len(first) - len(second)) <= 1
    assert first[:20] == second[:20]


def test_the_rate_changes_while_it_runs_and_a_pause_stops_its_time(engine):
    steady = Traffic(engine, rate=2, shape="steady")
    engine.play(steady, 10)
    assert abs(len(engine.asked) - 20) <= 1
    steady.rate = 8
    engine.play(steady, 10)
    assert abs(len(engine.asked) - 100) <= 2
    engine.state = "paused"
    engine.play(steady, 50)
    assert abs(len(engine.asked) - 100) <= 2
    engine.state = "running"
    steady.stop()
    engine.play(steady, 5)
    assert abs(len(engine.asked) - 100) <= 2 and not steady.running and steady.wait(0)


def test_a_ramp_rises_to_its_rate(engine):
    engine.play(Traffic(engine, rate=10, shape="ramp", ramp_seconds=20, seed=1), 40)
    by_half = [sum(start <= at < start + 10 for at, *_ in engine.asked) for start in (0, 10, 20, 30)]
    assert by_half[0] < by_half[1] < by_half[2] and abs(by_half[3] - 100) < 35


def test_a_thread_that_was_kept_waiting_catches_up_in_pieces(engine):
    steady = Traffic(engine, rate=1000, shape="steady")
    steady.advance()
    engine.now += 1
    steady.advance()
    assert len(engine.asked) == 100


def test_refusals_are_counted_and_told(monkeypatch):
    engine = Clocked(monkeypatch, room=5)
    steady = Traffic(engine, rate=10, shape="steady", limit=8)
    engine.play(steady, 5)
    assert (steady.asked, steady.refused, steady.running) == (5, 3, False)
    engine.handles[0].done = True
    assert steady.summary() == (
        "Traffic, ended: 10 requests a second, steady; 5 requests, 1 of them over, 3 refused "
        "(the queue is full: try again in 3 s)."
    )


@pytest.mark.parametrize("mix", MIXES)
def test_every_mix_asks_different_things(mix):
    prompts = {a.prompt for a in itertools.islice(drawn("steady", mix, max_tokens=16, burstiness=1, seed=0), 50)}
    assert len(prompts) > 20
    if mix == "one system prompt":
        assert len({prompt[:100] for prompt in prompts}) == 1


def test_a_trace_is_replayed_by_its_times(engine, tmp_path):
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"arrival": 2.0, "prompt": "later", "max_tokens": 4}, {"arrival": 0.5, "prompt_tokens": 6, "max_tokens": 9}
    ]  # fmt: skip
    trace.write_text("\n\n".join(map(json.dumps, lines)) + "\n")
    replay = Traffic(engine, trace=trace)
    engine.play(replay, 10)
    (first_at, ids, nine, _), (second_at, text, four, _) = engine.asked
    assert (nine, text, four) == (9, "later", 4) and len(ids) == 6 and all(0 <= i < 50 for i in ids)
    assert first_at == pytest.approx(0.5, abs=0.15) and second_at == pytest.approx(2.0, abs=0.15)
    assert not replay.running and replay.shape == "replay"
    engine.asked, start = [], engine.now
    engine.play(Traffic(engine, trace=trace, rate=4), 10)
    assert engine.asked[1][0] - start == pytest.approx(0.5, abs=0.15), "four times as fast"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line 2: is no JSON"),
        ("[1]", "line 2: must be a JSON object"),
        ('{"arrival": -1, "prompt": "x", "max_tokens": 1}', "line 2: arrival=-1: must be seconds"),
        ('{"arrival": true, "prompt": "x", "max_tokens": 1}', "arrival=True"),
        ('{"arrival": 1, "max_tokens": 1}', "prompt or prompt_tokens"),
        ('{"arrival": 1, "prompt": "x", "prompt_tokens": 3, "max_tokens": 1}', "one of them"),
        ('{"arrival": 1, "prompt": " ", "max_tokens": 1}', "prompt=' ': must be text"),
        ('{"arrival": 1, "prompt_tokens": 0, "max_tokens": 1}', "prompt_tokens=0: must be a whole number"),
        ('{"arrival": 1, "prompt": "x"}', "max_tokens=None"),
    ],
)
def test_a_bad_line_is_named_by_its_number(tmp_path, line, says):
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"arrival": 0, "prompt": "fine", "max_tokens": 1}\n' + line)
    with pytest.raises(ValueError, match=says):
        read_trace(trace)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"rate": 0}, "rate=0: must be requests a second"),
        ({"rate": float("nan")}, "rate=nan"),
        ({"shape": "waves"}, "shape='waves': must be one of poisson, bursts"),
        ({"mix": "x"}, "mix='x'"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"burstiness": 0}, "burstiness=0"),
        ({"limit": 0}, "limit=0"),
    ],
)
def test_bad_options_say_what_is_wrong(engine, options, says):
    with pytest.raises(ValueError, match=says):
        Traffic(engine, **options)


def test_on_a_real_engine_it_ends_with_the_workbench(tiny_folder):
    assert set(SHAPES) == {"poisson", "bursts", "steady", "ramp"}
    with Engine(str(tiny_folder), num_blocks=64, dtype="float32", num_threads=1, max_waiting_requests=3) as engine:
        with Workbench(engine) as wb:
            first = wb.traffic(rate=200, shape="poisson", mix="chats", max_tokens=4, limit=12)
            assert first.wait(30) and first.asked + first.refused == 12
            second = wb.traffic(rate=50, shape="steady", mix="chats", max_tokens=4)
            until = time.monotonic() + 30
            while second.asked < 3:
                assert time.monotonic() < until
                time.sleep(0.01)
            assert second.running and wb._status().traffic[1]
            feeder = wb._feeders[-1].thread
        assert not second.running and not feeder.is_alive()
        engine.wait_idle(30)
        assert second.asked >= 3 and not second.advance()
