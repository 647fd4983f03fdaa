"""Recordings of cores: every moment equals the snapshot that was taken live, in memory, within a bound, and from a file."""

import random
import time

import numpy as np
import pytest
from fake_model import VOCAB, greedy, make_core
from kvscope.engine import BeamSearchParams, EventKind, RequestRefused, SamplingParams
from kvscope.engine.recording.recording import Recording
from kvscope.engine.recording.tape import SPAN, Tape
from snapshots import assert_same

CROWDED = {"block_size": 4, "num_blocks": 48, "max_num_batched_tokens": 32, "max_num_seqs": 8, "max_model_len": 200}


class Run:
    """Random traffic over a small pool: shared starts, samples, beams, cancelled and preempted requests. `live` has the snapshot
    of every moment, `tape` recorded them."""

    def __init__(self, steps, *, seed=0, max_bytes=None, **options):
        self.random = random.Random(seed)
        self.core = make_core(**(CROWDED | options))
        self.tape = Tape(self.core, **({} if max_bytes is None else {"max_bytes": max_bytes}))
        self.live, self.largest = {}, 0
        self.starts = [self.tokens(24) for _ in range(3)]
        while self.core.journal.step < steps:
            self.talk()
            self.look()
            self.core.step()
        self.look()
        assert self.tape.fault is None
        self.recording = self.tape.recording()

    def tokens(self, count):
        return [self.random.randrange(VOCAB - 10) for _ in range(count)]

    def talk(self):
        """What users say between two steps: it belongs to the moment before."""
        chance, ids = self.random.random, list(self.core._live)
        while chance() < 0.12 or not self.core.has_work:
            prompt = self.random.choice(self.starts)[: self.random.randrange(1, 24)] + self.tokens(
                self.random.randrange(12)
            )
            length = {"max_tokens": self.random.randrange(1, 40), "ignore_eos": True}
            params = SamplingParams(temperature=1.0, n=self.random.choice([1, 1, 1, 2, 4]), **length)
            if self.core.config.kv_allocator == "paged" and chance() < 0.1:
                params = BeamSearchParams(beam_width=self.random.choice([2, 3]), **length)
            try:
                priority = self.random.randrange(3) if self.core.config.heeds_priority else 0
                self.core.add_request(prompt, params, label=str(prompt[:2]), priority=priority)
            except RequestRefused:
                pass
        if ids and chance() < 0.03:
            self.core.cancel(self.random.choice(ids))
        if ids and chance() < 0.03:
            self.core.preempt(self.random.choice(ids))
        if chance() < 0.005:
            self.core.reset_prefix_cache()

    def look(self):
        if self.random.random() < 0.3:  # somebody looks in between: the last look before the next step counts
            self.tape.mark("running")
            self.core.journal.time = time.monotonic()
        self.tape.mark("running")
        self.live[self.core.journal.step] = self.core.snapshot()
        self.largest = max(self.largest, sum(self.tape._bytes))

    def check(self, recording, count):
        steps = [step for step in self.live if recording.first_step <= step <= recording.last_step]
        for step in self.random.sample(steps, min(count, len(steps))):
            assert_same(recording.state_at(step), self.live[step])


def test_any_moment_of_a_long_run_equals_the_live_snapshot_also_from_a_file(tmp_path):
    """300 random moments of 2,000 steps with forks, preemption and eviction; under 3 MB, opened in under 2 s."""
    run = Run(2000)
    run.check(run.recording, 300)
    events = run.recording.events_until(2000)
    assert {e.kind for e in events} >= {EventKind.FORKED, EventKind.PREEMPTED, EventKind.EVICTED, EventKind.COPIED}
    assert events == run.core.events.since(0)[0]
    path = run.recording.save(tmp_path / "run.kvscope")
    begun = time.process_time()
    loaded = Recording.load(path)
    assert time.process_time() - begun < 2.0 and path.stat().st_size < 3e6
    run.check(loaded, 100)
    assert loaded.events_until(2000) == events


@pytest.mark.parametrize(
    "options",
    [
        {"prefix_cache": "radix"},
        {"preemption_mode": "swap", "num_cpu_blocks": 40},
        {"preemption_mode": "swap", "num_cpu_blocks": 40, "prefix_cache": "radix", "eviction_policy": "lfu"},
        {"windows": (0, 5), "eviction_policy": "slru"},
        {"windows": (0, 5), "block_size": {"full": 4, "sliding": 2}},
        {
            "windows": (0, 5),
            "block_size": {"full": 3, "sliding": 2},
            "prefix_cache": "radix",
            "preemption_mode": "swap",
            "num_cpu_blocks": 40,
        },
        {"windows": (3,), "prefix_cache": "radix", "eviction_policy": "fifo"},
        {"scheduling_policy": "priority", "eviction_policy": "priority"},
        {"scheduling_policy": "lpm", "eviction_policy": "mru", "max_skips": 2},
        {"scheduling_policy": "static"},
        {"kv_allocator": "orca-max", "enable_prefix_caching": False, "num_blocks": 200, "max_model_len": 60},
        {"enable_prefix_caching": False, "watermark": 0.1},
        {"event_capacity": 8},  # more events in a step than the log holds: the states are exact all the same
    ],
    ids=str,
)
def test_so_it_is_with_every_kind_of_memory_and_order(options, tmp_path):
    run = Run(150, seed=1, **options)
    run.check(run.recording, 100)
    run.check(Recording.load(run.recording.save(tmp_path / "run.kvscope")), 40)


def test_memory_is_bounded_and_what_is_left_stays_exact(tmp_path):
    bound = 400_000
    run = Run(700, max_bytes=bound)
    recording = run.recording
    assert run.largest <= bound and 0 < recording.first_step < recording.last_step == 700
    run.check(recording, 150)
    with pytest.raises(ValueError, match=rf"step=3: recorded are steps {recording.first_step} to 700"):
        recording.state_at(3)
    loaded = Recording.load(recording.save(tmp_path / "late.kvscope"))
    assert (loaded.first_step, loaded.last_step) == (recording.first_step, 700)
    run.check(loaded, 150)
    assert loaded.events_until(700) == recording.events_until(700)
    for name in ("steps", "used_blocks", "evictions", "preemptions", "swaps", "copies"):
        np.testing.assert_array_equal(getattr(loaded.series, name), getattr(recording.series, name))


def test_a_recording_that_was_taken_before_never_changes():
    run = Run(100, max_bytes=100_000)
    before, live = run.recording, dict(run.live)
    for _ in range(300):
        run.talk()
        run.look()
        run.core.step()
    assert before.last_step == 100 and run.tape.recording().first_step > before.first_step
    for step in range(before.first_step, 101, 4):
        assert_same(before.state_at(step), live[step])


def test_series_count_what_the_events_tell():
    run = Run(300)
    series, events = run.recording.series, run.recording.events_until(300)
    assert series.steps.tolist() == list(range(301))
    for name, kind in (("preemptions", EventKind.PREEMPTED), ("copies", EventKind.COPIED)):
        counts = np.bincount([e.step for e in events if e.kind is kind], minlength=301)
        np.testing.assert_array_equal(getattr(series, name), counts)
        assert run.recording.steps_with(kind).tolist() == np.flatnonzero(counts).tolist()
    assert series.used_blocks.tolist() == [run.live[step].num_used_blocks for step in range(301)]
    assert series.evictions.sum() == run.live[300].counters["kvscope:blocks_evicted_total"] > 0
    assert (np.diff(series.time) > 0).all()


def test_at_any_step_the_log_ends_there():
    run = Run(150)
    log = run.core.events.since(0)[0]
    for step in (0, 1, 63, 64, 65, 150):
        moment = run.recording.at(step)
        expected = [event for event in log if event.step <= step]
        assert moment.events.next_index == len(expected)
        for index in (0, len(expected) // 2, max(0, len(expected) - 3)):
            assert moment.events.since(index) == (expected[index:], len(expected), 0)
        assert moment.events.since(len(expected) + 9) == ([], len(expected), 0)
        assert moment.snapshot().state == moment.state == "paused" and moment.snapshot().step == step


def test_recording_begins_in_mid_course():
    core = make_core(num_blocks=40)
    for n in (1, 3):
        core.add_request([1] * 9, SamplingParams(n=n, temperature=1.0, max_tokens=9))
    for _ in range(4):
        core.step()
    tape = Tape(core)
    assert_same(tape.recording().state_at(4), core.snapshot())
    core.step()
    tape.mark("running")
    recording = tape.recording()
    assert (recording.first_step, recording.last_step) == (4, 5)
    assert_same(recording.state_at(5), core.snapshot())


def test_what_users_say_between_two_steps_belongs_to_the_moment_before():
    core = make_core()
    tape = Tape(core, state="paused")
    core.add_request([1] * 9, greedy(4), label="hello")
    tape.mark("paused")
    core.step()
    tape.mark("paused")
    core.cancel(1)
    tape.mark("running")
    recording = tape.recording()
    assert [r.label for r in recording.state_at(0).requests] == ["hello"] and recording.state_at(0).state == "paused"
    assert recording.state_at(1).requests == () and recording.state_at(1).state == "running"
    assert recording.series.steps.tolist() == [0, 1]


def test_a_mark_costs_what_has_changed_and_not_what_there_is():
    """A pool of 16,384 blocks: a step of decoding writes one row a sequence, and nothing when nothing has happened."""
    core = make_core(block_size=16, num_blocks=16_384, max_num_seqs=16)
    for seed in range(16):
        core.add_request([seed] * 20, greedy(40, ignore_eos=True))
    core.step()
    tape = Tape(core)
    core.step()
    tape.mark("running")
    delta, moments = tape._deltas[-1], tape.recording().num_moments
    assert not delta.blocks and len(delta.fills) == 2 * 16 and len(delta.progress) == 3 * 16 and not delta.standing
    tape.mark("running")
    assert tape.recording().num_moments == moments


def test_a_long_line_is_cut_as_a_snapshot_cuts_it():
    core = make_core(max_num_seqs=2, num_blocks=200)
    tape = Tape(core)
    for seed in range(140):
        core.add_request([seed % 90] * 9, greedy(6, ignore_eos=True))
    live = {}
    for _ in range(60):
        tape.mark("running")
        live[core.journal.step] = core.snapshot()
        core.step()
    assert len(live[5].requests) > 100 and len(live[59].requests) > 100
    for step, snapshot in live.items():
        assert_same(tape.recording().state_at(step), snapshot)


def test_a_fault_in_recording_ends_the_recording_only(monkeypatch):
    core = make_core()
    tape = Tape(core)
    core.add_request([1] * 9, greedy(4))
    monkeypatch.setattr(core, "metrics", lambda: 1 / 0)
    tape.mark("running")
    monkeypatch.undo()
    core.step()
    tape.mark("running")
    assert isinstance(tape.fault, ZeroDivisionError) and tape.recording().last_step == 0


def test_moments_before_a_border_and_behind_it_are_found():
    run = Run(3 * SPAN)
    for border in (SPAN, 2 * SPAN):
        for step in range(border - 2, border + 3):
            assert_same(run.recording.state_at(step), run.live[step])
    for step in ("3", 2.0, True):
        with pytest.raises(ValueError, match="number of a step"):
            run.recording.state_at(step)
