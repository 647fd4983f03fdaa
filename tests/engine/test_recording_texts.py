"""Recordings of whole engines: what every request had written at every step, who holds the tape, and how engines end."""

import gc
import weakref

import pytest
from kvscope.engine import BeamSearchParams, Engine, EngineClosed, SamplingParams
from kvscope.engine.recording.recording import Recording
from serving import OPTIONS
from snapshots import assert_same

SMALL = {"num_blocks": 24, "block_size": 4, "max_num_seqs": 6, "max_num_batched_tokens": 24}


class Steps:
    """An engine that is stepped, and all that it shows after each step."""

    def __init__(self, engine):
        self.engine, self.tape = engine, engine.record()
        self.snapshots, self.outputs, self.prompts = {}, {}, {}
        engine.pause()

    def look(self):
        snapshot, handles = self.engine.snapshot(), self.engine.handles()
        self.snapshots[snapshot.step] = snapshot
        self.outputs[snapshot.step] = {number: handle.partial() for number, handle in handles.items()}
        self.prompts |= {number: handle.prompt_text for number, handle in handles.items()}
        return snapshot

    def run(self):
        while self.look().requests:
            self.engine.step()

    def check(self, recording):
        for step, snapshot in self.snapshots.items():
            assert_same(recording.state_at(step), snapshot)
            assert recording.outputs_at(step) == self.outputs[step]
            handles = recording.at(step).handles()
            assert {number: handle.partial() for number, handle in handles.items()} == self.outputs[step]
            for number, handle in handles.items():
                assert handle.prompt_text == self.prompts[number] and handle.done == self.outputs[step][number].finished


@pytest.mark.parametrize("options", [{}, {"prefix_cache": "radix", "preemption_mode": "swap", "num_cpu_blocks": 30}])
def test_what_every_request_has_written_is_there_at_every_step(make_engine, tmp_path, options):
    steps = Steps(make_engine(**SMALL, **options))
    submit = steps.engine.submit
    for seed in range(3):
        stop = ["th", "e"] if seed == 2 else None
        submit(
            "the cat sat on the mat", SamplingParams(max_tokens=12, logprobs=2, temperature=1.0, seed=seed, stop=stop)
        )
    submit("a dog", SamplingParams(max_tokens=9, n=3, temperature=1.0, prompt_logprobs=1, logprobs=1))
    submit([7, 9, 11, 200], BeamSearchParams(beam_width=3, max_tokens=8))
    for _ in range(4):
        steps.look()
        steps.engine.step()
    steps.engine.handles()[1].cancel()
    submit("the cat sat on", SamplingParams(max_tokens=6))
    steps.run()
    steps.check(steps.tape.recording())
    loaded = Recording.load(steps.tape.recording().save(tmp_path / "run.kvscope"))
    steps.check(loaded)
    assert loaded.info == steps.engine.info.plain() and loaded.config["num_blocks"] == 24
    used = {token for output in loaded.outputs_at(loaded.last_step).values() for token in output.outputs[0].token_ids}
    assert all(loaded.decode_token(token) == steps.engine.decode_token(token) for token in used) and len(used) > 5


def test_a_file_written_while_the_engine_runs_is_whole(make_engine, tmp_path):
    engine = make_engine(num_blocks=200)
    tape = engine.record()
    handles = [engine.submit("once upon", SamplingParams(max_tokens=60, ignore_eos=True)) for _ in range(4)]
    for number in range(3):
        handles[number].result()
        saved = tape.recording()
        loaded = Recording.load(saved.save(tmp_path / "run.kvscope"))
        assert (loaded.first_step, loaded.last_step) == (saved.first_step, saved.last_step)
        for step in (saved.first_step, saved.last_step // 2, saved.last_step):
            assert_same(loaded.state_at(step), saved.state_at(step))
            assert loaded.outputs_at(step) == saved.outputs_at(step)
    assert [path.name for path in tmp_path.iterdir()] == ["run.kvscope"]


def test_all_who_ask_get_one_tape_and_nothing_is_kept_for_nobody(make_engine):
    engine = make_engine()
    first, second = engine.record(), engine.record()
    assert first is second
    ended = weakref.ref(first)
    del first, second
    gc.collect()
    assert ended() is None
    engine.generate("hello", SamplingParams(max_tokens=3, ignore_eos=True))
    late = engine.record().recording()
    assert late.first_step == late.last_step == engine.snapshot().step


def test_engines_are_recorded_apart(make_engine):
    one, two = make_engine(), make_engine()
    tapes = one.record(), two.record()
    one.generate("hello", SamplingParams(max_tokens=5, ignore_eos=True))
    two.generate("good day", SamplingParams(max_tokens=2, ignore_eos=True))
    one.snapshot(), two.snapshot()
    assert [tape.recording().last_step for tape in tapes] == [5, 2]
    assert [tape.recording().outputs_at(2)[1].prompt for tape in tapes] == ["hello", "good day"]


def test_the_last_moment_of_a_closed_engine_is_its_last_snapshot(make_engine):
    engine = make_engine()
    tape = engine.record()
    engine.pause()
    engine.submit("hello", SamplingParams(max_tokens=5, ignore_eos=True))
    engine.step()
    engine.close()
    recording = tape.recording()
    assert_same(recording.state_at(recording.last_step), engine.snapshot())
    assert recording.state_at(1).state == "stopped"
    assert recording.outputs_at(1)[1].outputs[0].finish_reason == "cancelled"
    with pytest.raises(EngineClosed):
        engine.record()


def test_a_recording_keeps_no_engine_alive(tiny_folder):
    engine = Engine(tiny_folder, **OPTIONS)
    tape = engine.record()
    engine.generate("hello", SamplingParams(max_tokens=3, ignore_eos=True))
    engine.snapshot()
    core, gone = weakref.ref(engine._driver._core), weakref.ref(engine)
    thread = engine._driver._thread
    del engine
    gc.collect()
    assert gone() is None
    thread.join(timeout=30)
    gc.collect()
    assert core() is None and tape.recording().outputs_at(3)[1].outputs[0].token_ids
