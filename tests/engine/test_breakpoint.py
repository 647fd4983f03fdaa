"""Run until: the engine pauses after the very step that was asked for, and the wait for it always ends."""

import threading
import time

import numpy as np
import pytest
from kvscope.engine import Engine, EngineClosed, EventKind, SamplingParams
from kvscope.engine.breakpoint import NAMES, breakpoint_at

LONG = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


@pytest.fixture
def engine(tiny_folder):
    with Engine(str(tiny_folder), num_blocks=13, dtype="float32", num_threads=1) as engine:
        engine.pause()
        yield engine


def first_step_of(engine, kind):
    return next(e.step for e in engine.events.since(0)[0] if e.kind is kind)


def newest_step(engine):
    return max(e.step for e in engine.events.since(0)[0])


@pytest.mark.parametrize(
    ("name", "kind"),
    [("eviction", EventKind.EVICTED), ("preemption", EventKind.PREEMPTED), ("finish", EventKind.FINISHED),
     ("fork", EventKind.FORKED), ("copy", EventKind.COPIED), ("cache hit", EventKind.CACHE_HIT),
     ("published", EventKind.PUBLISHED)],
)  # fmt: skip
def test_it_pauses_after_the_very_step_of_an_event(engine, name, kind):
    engine.submit("a b c d e f g h i j k l m n o p q r s t", SHORT)
    engine.submit("a b c d e f g h i j k l m n o p q r s t", LONG)
    engine.submit([7] * 21, SamplingParams(n=2, temperature=1.0, seed=3, max_tokens=70, ignore_eos=True))
    event = engine.run_until(name)
    assert engine.state == "paused" and event.kind is kind
    assert event.step == first_step_of(engine, kind) == newest_step(engine) == engine.snapshot().step
    (paused,) = [e for e in engine.events.since(event.index)[0] if e.kind is EventKind.PAUSED]
    assert paused.cause == "breakpoint" and paused.text
    if name in NAMES:
        assert paused.text == NAMES[name][0]


def test_a_step_a_request_and_its_end(engine):
    first, second = engine.submit("hello", LONG), engine.submit("hello", LONG)
    assert engine.run_until(request=second.request_id).kind is EventKind.ADMITTED
    event = engine.run_until(step=np.int32(20))  # as a recording's series has them
    assert (event.kind, event.step, engine.snapshot().step) == (EventKind.STEP, 20, 20)
    event = engine.run_until("finish", request=first.request_id)
    assert event.request_id == first.request_id and first.status == "finished"
    assert newest_step(engine) == event.step


def test_the_end_of_a_request_is_the_end_of_all_its_samples(engine):
    two = engine.submit(
        "hello", SamplingParams(n=2, temperature=1.0, seed=1, max_tokens=30, stop_token_ids=list(range(40, 90)))
    )
    engine.run_until("finish", request=two.request_id)
    assert two.status == "finished" and all(o.finish_reason for o in two.partial().outputs)


def test_a_cancel_ends_the_wait_for_an_end(engine):
    handle, other = engine.submit("hello", LONG), engine.submit("hello", LONG)
    engine.steps_per_second = 20
    threading.Timer(0.2, handle.cancel).start()
    event = engine.run_until("finish", request=handle.request_id)
    assert event.kind is EventKind.CANCELLED and engine.state == "paused" and not other.done


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({}, "run until what"),
        ({"kind": "explosion"}, "kind='explosion': must be one of admission, .*eviction.*, or an EventKind"),
        ({"step": 0}, "step=0: must be the number of a step"),
        ({"step": 5, "kind": "copy"}, "name a step or an event, not both"),
        ({"request": "x"}, "request='x': must be the number of a request"),
        ({"request": 77}, "request=77: no such request lives"),
        ({"step": 1}, "step=1: the engine is at step 2 already"),
        ({"step": 99, "max_steps": 0}, "max_steps=0: must be at least 1"),
        ({"step": 99, "max_steps": "7"}, "max_steps='7': must be at least 1, and an integer"),
    ],
)
def test_what_is_no_breakpoint_is_refused(engine, options, sentence):
    engine.submit("hello", SHORT)
    engine.step(), engine.step()
    with pytest.raises(ValueError, match=sentence):
        engine.run_until(**options)
    assert engine.state == "paused" and engine.snapshot().step == 2


def test_what_cannot_be_reached_is_told_and_leaves_the_engine_paused(engine):
    with pytest.raises(RuntimeError, match="nothing runs or waits"):
        engine.run_until("eviction")
    done = engine.submit("hello", SHORT)
    with pytest.raises(RuntimeError, match="no request is left, before a block was evicted"):
        engine.run_until("eviction")
    assert done.status == "finished" and engine.state == "paused"
    with pytest.raises(ValueError, match="this request is over"):
        engine.run_until(request=done.request_id)
    engine.submit("hello", LONG)
    with pytest.raises(RuntimeError, match="7 steps have passed, before a request was preempted"):
        engine.run_until("preemption", max_steps=7)
    assert engine.snapshot().step == 12 and engine.state == "paused"


def test_pause_a_second_breakpoint_and_close_end_the_wait(engine):
    engine.steps_per_second = 50
    engine.submit("hello", LONG)
    ends = []

    def wait(**options):
        try:
            ends.append(engine.run_until(**options))
        except Exception as error:
            ends.append(error)

    def background(**options):
        thread = threading.Thread(target=wait, kwargs=options)
        thread.start()
        while engine._driver._armed is None or engine.state != "running":
            time.sleep(0.001)
        return thread

    thread = background(kind="eviction")
    engine.pause()
    thread.join(10)
    first = background(kind="eviction")
    second = threading.Thread(target=wait, kwargs={"step": engine.snapshot().step + 8})
    second.start()
    first.join(10), second.join(10)
    third = background(kind="eviction")
    engine.close()
    third.join(10)
    paused, replaced, reached, closed = ends
    assert "was paused at step" in str(paused) and "took the place" in str(replaced)
    assert reached.kind is EventKind.STEP and isinstance(closed, EngineClosed)


def test_a_pace_is_kept_and_commands_do_not_wait_for_it(engine):
    engine.steps_per_second = 4
    engine.submit("hello", LONG)
    begun = time.monotonic()
    engine.run_until(step=3)
    assert time.monotonic() - begun > 0.5
    engine.resume()
    begun = time.monotonic()
    engine.pause()
    assert time.monotonic() - begun < 0.25
    for limit in (0, -1, 1001):
        with pytest.raises(ValueError, match="steps_per_second"):
            engine.steps_per_second = limit


def test_a_name_is_words():
    assert breakpoint_at("copy").words == "a block was copied on write"
    assert breakpoint_at(EventKind.SHARED).words == "the event “shared” came"
