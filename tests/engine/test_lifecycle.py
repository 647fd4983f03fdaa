"""Engines come and go: threads end, memory returns, Ctrl-C and the end of the process harm nothing."""

import gc
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref

import pytest
from kvscope.engine import Engine, EngineClosed, SamplingParams
from kvscope.engine.undisturbed import undisturbed
from serving import OPTIONS, engine_threads

PARAMS = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0, max_tokens=500, ignore_eos=True)


def threads_end(seconds=10.0):
    deadline = time.monotonic() + seconds
    while engine_threads() and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    return engine_threads() == []


def run_python(code, folder, timeout=120):
    """Run `code` in a fresh interpreter with `folder` in its arguments; returns its output lines."""
    done = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", "-c", textwrap.dedent(code), str(folder)],
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr


def test_closing_ends_the_thread(tiny_folder):
    before = threading.active_count()
    for _ in range(3):
        with Engine(tiny_folder, **OPTIONS) as engine:
            engine.generate("hello", PARAMS)
    assert threading.active_count() == before and engine_threads() == []


def test_two_engines_at_once_share_weights_and_nothing_else(make_engine):
    first, second = make_engine(block_size=16), make_engine(block_size=3, num_blocks=256)
    weights = [engine._driver._core.runner.model.weights for engine in (first, second)]
    assert weights[0] is weights[1]
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    handles = [engine.submit("hello there", params) for engine in (first, second) for _ in range(2)]
    texts = {tuple(handle.result(60).outputs[0].token_ids) for handle in handles}
    assert len(texts) == 1
    first.close()
    assert second.generate("hello", PARAMS)[0].finished


def test_an_engine_that_nobody_holds_closes_itself(tiny_folder):
    """What re-running the cell that made one does."""
    engine = Engine(tiny_folder, **OPTIONS)
    engine.generate("hello", PARAMS)
    old = weakref.ref(engine)
    engine = Engine(tiny_folder, **OPTIONS)
    gc.collect()
    assert old() is None
    engine.close()
    assert threads_end()


def test_an_engine_forgotten_in_the_middle_of_work_closes_itself(tiny_folder):
    engine = Engine(tiny_folder, **OPTIONS)
    engine.submit("hello", ENDLESS)
    engine.pause()
    del engine
    assert threads_end()


def test_a_handle_keeps_its_engine_until_its_request_is_over(tiny_folder):
    output = Engine(tiny_folder, **OPTIONS).submit("hello", PARAMS).result(60)
    assert len(output.outputs[0].token_ids) == 5
    assert threads_end()
    handle = Engine(tiny_folder, **OPTIONS).submit("hello", PARAMS)
    assert "".join(handle) == output.outputs[0].text
    assert threads_end()  # although the handle is still held


def test_hooks_that_hold_the_engine_do_not_keep_it_open(tiny_folder):
    engine = Engine(tiny_folder, **OPTIONS)
    engine.while_waiting.append(lambda engine=engine: engine)
    engine.generate("hello", PARAMS)
    del engine
    assert threads_end()


def test_closing_from_many_threads_while_others_submit(tiny_folder):
    engine = Engine(tiny_folder, **OPTIONS)
    outcomes = []

    def use():
        try:
            while True:
                outcomes.append(len(engine.generate("hello", PARAMS)))
        except EngineClosed:
            outcomes.append("closed")

    users = [threading.Thread(target=use) for _ in range(4)]
    for user in users:
        user.start()
    time.sleep(0.2)
    closers = [threading.Thread(target=engine.close) for _ in range(3)]
    for closer in closers:
        closer.start()
    for thread in [*users, *closers]:
        thread.join(30)
        assert not thread.is_alive()
    assert outcomes.count("closed") == 4


def test_ten_engines_one_after_another_end_within_50_mb_of_the_first(tiny_folder):
    lines, _ = run_python(
        """
        import gc, sys, psutil
        from kvscope.engine import Engine, SamplingParams
        me, sizes = psutil.Process(), []
        for _ in range(10):
            with Engine(sys.argv[1], dtype="float32", kernels="reference", num_threads=1, num_blocks=16384) as engine:
                engine.generate(["hello"] * 4, SamplingParams(n=4, max_tokens=10, ignore_eos=True))
                handle = engine.submit("hello", SamplingParams(max_tokens=500, ignore_eos=True))
                pool = engine.info.pool_bytes
            gc.collect()
            sizes.append(me.memory_info().rss)
        print((sizes[-1] - sizes[0]) / 1e6, pool / 1e6)
        """,
        tiny_folder,
    )
    growth, pool = map(float, lines[0].split())
    assert pool > 100 and growth < 50


def test_a_held_closed_engine_has_given_its_pool_back(tiny_folder):
    engine = Engine(tiny_folder, **OPTIONS)
    slots = [weakref.ref(slot) for slot in engine._driver._core.runner.storage._slots]
    assert len(slots) == 2
    engine.close()
    gc.collect()
    assert [slot() for slot in slots] == [None, None]


@pytest.mark.skipif(sys.platform == "win32", reason="os.kill sends no SIGINT there")
def test_ctrl_c_leaves_the_engine_usable_and_the_process_may_end_in_the_middle_of_a_step(tiny_folder):
    lines, stderr = run_python(
        """
        import os, signal, sys, threading, time
        from kvscope.engine import Engine, SamplingParams
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell hands down one that is ignored
        engine = Engine(sys.argv[1], dtype="float32", kernels="reference", num_threads=1, num_blocks=64)
        endless = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True)
        short = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)

        def interrupted(call):
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
            started = time.monotonic()
            try:
                call()
            except KeyboardInterrupt:
                return time.monotonic() - started < 5

        print(interrupted(lambda: engine.generate(["hello"] * 3, endless)))
        engine.wait_idle(10)
        print(sorted(handle.status for handle in engine.handles().values()))
        print(len(engine.generate("hello", short)[0].outputs[0].token_ids))
        handle = engine.submit("hello", endless)
        print(interrupted(handle.result), handle.status)
        handle.cancel()
        engine.wait_idle(10)
        engine.check_integrity()
        print(engine.snapshot().num_used_blocks)
        next(iter(engine.submit("hello", endless)))
        """,
        tiny_folder,
    )
    assert lines == ["True", "['cancelled', 'cancelled', 'cancelled']", "5", "True running", "0"]
    assert "Traceback" not in stderr


def test_ctrl_c_cancels_what_generate_had_submitted(make_scripted):
    engine, _ = make_scripted([65], seconds=0.01)

    def interrupt():
        raise KeyboardInterrupt

    engine.while_waiting.append(interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.generate([[1]] * 3, ENDLESS)
    engine.while_waiting.clear()
    engine.wait_idle(10)
    assert [handle.status for handle in engine.handles().values()] == ["cancelled"] * 3
    assert engine.generate([1], PARAMS)[0].outputs[0].text == "AAAAA"


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timer signals on this system")
def test_ctrl_c_at_any_instant_leaves_every_lock_free(make_scripted):
    engine, _ = make_scripted([65])
    chance, armed, interrupts = random.Random(0), False, 0

    def interrupt(*_):
        nonlocal armed, interrupts
        if armed:
            armed, interrupts = False, interrupts + 1
            raise KeyboardInterrupt

    def step_by_hand():
        engine.pause()
        engine.step()
        engine.resume()

    calls = [
        engine.snapshot,
        engine.metrics,
        step_by_hand,
        lambda: engine.submit([1], PARAMS).result(),
        lambda: list(engine.submit([1], PARAMS)),
        lambda: engine.generate([[1], [2]], PARAMS),
        engine.wait_idle,
    ]
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(300):
            try:
                armed = True
                signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-5, 3e-3))
                chance.choice(calls)()
            except KeyboardInterrupt:
                pass
            finally:
                armed = False
            engine.resume()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert interrupts > 30
    assert engine.wait_idle(30) and engine.generate([1], PARAMS)[0].outputs[0].text == "AAAAA"
    engine.check_integrity()
    assert engine.snapshot().num_used_blocks == 0


def test_an_idle_engine_uses_no_cpu(engine):
    engine.generate("hello", PARAMS)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.05


def test_a_busy_main_thread_does_not_starve_the_engine(make_scripted):
    """The model sleeps 20 times a step, and each time has to get the interpreter back from this thread."""
    engine, model = make_scripted([65])
    forward = model.forward

    def many_calls(batch, storage):
        for _ in range(20):
            time.sleep(0)
        return forward(batch, storage)

    model.forward = many_calls
    interval = sys.getswitchinterval()
    handle = engine.submit([1], SamplingParams(temperature=0, max_tokens=40))
    started = time.monotonic()
    while not handle.done:
        sum(range(2000))
    seconds = time.monotonic() - started
    assert seconds < 40 * 20 * interval / 2  # with the interpreter's own interval it takes 40 · 20 of these
    engine.wait_idle(10)
    time.sleep(0.05)
    assert sys.getswitchinterval() == interval


def test_full_collections_are_rare_while_steps_run_and_the_users_thresholds_come_back(make_scripted):
    engine, model = make_scripted([65])
    seen = []
    forward = model.forward
    model.forward = lambda batch, storage: (seen.append(gc.get_threshold()), forward(batch, storage))[1]
    young, middle, old = before = gc.get_threshold()
    engine.generate([[1]], SamplingParams(temperature=0, max_tokens=3))
    engine.snapshot()  # behind the last step
    until_idle = time.monotonic() + 10
    while gc.get_threshold() != before and time.monotonic() < until_idle:
        time.sleep(0.002)
    assert set(seen) == {(young, middle, 10 * old)} and gc.get_threshold() == before


def test_what_a_user_sets_while_steps_run_stays(make_scripted):
    before = gc.get_threshold(), sys.getswitchinterval()
    with undisturbed():
        with undisturbed():
            gc.set_threshold(500, 5, 5)
        sys.setswitchinterval(0.001)
    try:
        assert gc.get_threshold() == (500, 5, 5) and sys.getswitchinterval() == pytest.approx(0.001)
    finally:
        gc.set_threshold(*before[0])
        sys.setswitchinterval(before[1])


def test_ten_thousand_requests_leave_queues_events_and_memory_bounded(make_scripted):
    engine, _ = make_scripted([65], max_num_seqs=256, max_num_batched_tokens=512, event_capacity=1000)
    engine.generate([[1]] * 10_000, SamplingParams(temperature=0, max_tokens=1))
    core = engine._driver._core
    assert len(engine.events) == 1000 and len(engine.handles()) == 256
    assert len(core._finished) <= 512 and len(core.scheduler.waiting) == 0
    assert engine._driver._commands.qsize() == 0 and engine._driver.registry.live == {}
    engine.check_integrity()
