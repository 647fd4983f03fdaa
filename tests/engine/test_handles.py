"""A handle: text as it comes to any number of readers, the result, and cancel at any time."""

import asyncio
import threading
import time

import pytest
from kvscope.engine import EventKind, SamplingParams

LONG = SamplingParams(temperature=0, max_tokens=500)
ALPHABET = [*b"abcdefghijklmnopqrstuvwxyz"]


def letters(count):
    return SamplingParams(temperature=0, max_tokens=count)


def text(count):
    return "".join(chr(ALPHABET[i % 26]) for i in range(count))


def until(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.002)


# --- reading


def test_pieces_come_one_by_one_and_add_up(make_scripted):
    engine, _ = make_scripted(ALPHABET, seconds=0.01)
    handle = engine.submit([1], letters(10))
    seen = []
    for piece in handle:
        seen.append((piece, handle.status))
    assert "".join(piece for piece, _ in seen) == text(10) == handle.result().outputs[0].text
    assert len(seen) >= 5 and seen[0] == ("a", "running")


def test_every_reader_starts_at_the_beginning(make_scripted):
    engine, _ = make_scripted(ALPHABET, seconds=0.005)
    handle = engine.submit([1], letters(20))
    results = {}
    readers = [threading.Thread(target=lambda i=i: results.update({i: "".join(handle)})) for i in range(4)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(30)
    assert results == {i: text(20) for i in range(4)}
    assert list(handle) == [text(20)]


def test_each_of_n_samples_streams_on_its_own_while_the_others_run(engine):
    engine.pause()
    params = SamplingParams(n=3, temperature=1.0, seed=3, max_tokens=12, ignore_eos=True)
    handle = engine.submit("hello", params)
    for _ in range(6):
        engine.step()
    partial = handle.partial()
    assert [len(sample.token_ids) for sample in partial.outputs] == [6, 6, 6] and not partial.finished
    assert all(sample.finish_reason is None for sample in partial.outputs)
    engine.resume()
    streamed = ["".join(handle.sample(i)) for i in range(3)]
    assert streamed == [sample.text for sample in handle.result().outputs] and len(set(streamed)) == 3
    assert "".join(handle) == streamed[0]
    with pytest.raises(IndexError, match="samples 0 to 2"):
        handle.sample(3)


def test_a_sample_that_ends_early_ends_its_stream_while_the_others_go_on(engine):
    """With stop strings on, samples end at different tokens; each stream and each output agree."""
    params = SamplingParams(n=4, temperature=1.5, seed=5, max_tokens=60, ignore_eos=True, stop=["a", "e", "t"])
    handle = engine.submit("hello", params)
    streamed = ["".join(handle.sample(i)) for i in range(4)]
    outputs = handle.result().outputs
    assert streamed == [sample.text for sample in outputs]
    assert len({len(sample.token_ids) for sample in outputs}) > 1
    assert not any(letter in sample.text for sample in outputs for letter in "aet")
    engine.check_integrity()


def test_partial_is_a_copy(make_scripted):
    engine, _ = make_scripted(ALPHABET)
    handle = engine.submit([1], letters(5))
    handle.result()
    handle.partial().outputs[0].token_ids.clear()
    assert handle.partial().outputs[0].token_ids == ALPHABET[:5]


def test_a_handle_knows_its_prompt(engine):
    params = letters(1)
    assert engine.submit("hello", params).prompt_text == "hello"
    assert engine.submit([*b"ok"], params).prompt_text == "ok"
    handle = engine.submit([{"role": "user", "content": "hello"}], params)
    assert handle.prompt_text.startswith("<|im_start|>user") and handle.params is params
    assert handle.prompt_token_ids == handle.result().prompt_token_ids


def test_one_line_says_what_a_handle_is(make_scripted):
    engine, _ = make_scripted(ALPHABET)
    handle = engine.submit([1], letters(100))
    handle.result()
    assert repr(handle) == f"<RequestHandle 1: finished, 100 tokens, '{text(47)}…'>"


def test_result_times_out_with_a_sentence_and_the_request_goes_on(make_scripted):
    engine, _ = make_scripted(ALPHABET, seconds=0.02)
    handle = engine.submit([1], letters(10))
    with pytest.raises(TimeoutError, match=r"request 1 is still running after 0.05 s, with \d+ tokens; it goes on"):
        handle.result(timeout=0.05)
    with pytest.raises(TimeoutError):
        handle.result(timeout=0)
    assert handle.result(timeout=30).outputs[0].text == text(10)


# --- cancelling


def test_cancelling_a_running_request_keeps_what_it_had(make_scripted):
    engine, _ = make_scripted(ALPHABET, seconds=0.005)
    handle = engine.submit([1], LONG)
    pieces = []
    for piece in handle:
        pieces.append(piece)
        if len(pieces) == 5:
            handle.cancel()
    output = handle.result(30)
    assert handle.status == "cancelled" and output.outputs[0].finish_reason == "cancelled"
    assert output.outputs[0].text == "".join(pieces) and 5 <= len(output.outputs[0].token_ids) < 500
    handle.cancel()
    assert engine.snapshot().num_used_blocks == 0
    engine.check_integrity()


def test_a_deadline_ends_a_request_that_runs_and_one_that_waits_and_keeps_their_text(make_scripted):
    engine, _ = make_scripted([65] * 500, seconds=0.01, max_num_seqs=1)
    running = engine.submit([1, 2], SamplingParams(temperature=0, max_tokens=400), deadline=0.3)
    waiting = engine.submit([1, 2], SamplingParams(temperature=0, max_tokens=400), deadline=0.2)
    late = engine.submit([1, 2], SamplingParams(temperature=0, max_tokens=2), deadline=1e-9)
    for handle in (running, waiting, late):
        assert handle.result(20).outputs[0].finish_reason == "cancelled"
        assert (handle.status, handle.partial().outputs[0].stop_reason) == ("cancelled", "deadline")
    written = running.partial().outputs[0]
    assert 0 < len(written.token_ids) < 400 and written.text == "A" * len(written.token_ids)
    assert waiting.partial().outputs[0].text == ""
    with pytest.raises(ValueError, match="deadline=-1: must be more than 0 seconds from arrival"):
        engine.submit([1], deadline=-1)
    with pytest.raises(ValueError, match="priority='high': must be an integer"):
        engine.submit([1], priority="high")
    engine.check_integrity()


def test_cancelling_a_waiting_request_never_runs_it(make_scripted):
    engine, model = make_scripted(ALPHABET)
    engine.pause()
    handle = engine.submit([1], LONG)
    handle.cancel()
    handle.cancel()
    until(lambda: handle.done)  # works while paused
    engine.resume()
    assert handle.result(30).outputs[0].token_ids == [] and model.steps == 0


def test_cancelling_in_the_middle_of_a_chunked_prefill_gives_every_block_back(make_engine):
    engine = make_engine(max_num_batched_tokens=16)
    engine.pause()
    handle = engine.submit([7] * 60, LONG)
    engine.step()
    assert engine.snapshot().num_used_blocks > 0
    handle.cancel()
    until(lambda: handle.done)
    assert engine.snapshot().num_used_blocks == 0 and handle.status == "cancelled"
    engine.check_integrity()
    engine.resume()
    assert engine.generate([7] * 60, letters(2))[0].outputs[0].finish_reason == "length"


def test_cancelling_a_finished_request_changes_nothing(make_scripted):
    engine, _ = make_scripted(ALPHABET)
    handle = engine.submit([1], letters(3))
    handle.result()
    handle.cancel()
    assert handle.status == "finished" and handle.result().outputs[0].finish_reason == "length"


def test_cancelling_one_of_n_samples_requests_ends_all_of_them(engine):
    engine.pause()
    handle = engine.submit("hello", SamplingParams(n=3, seed=1, max_tokens=100, ignore_eos=True))
    for _ in range(3):
        engine.step()
    handle.cancel()
    until(lambda: handle.done)
    assert [sample.finish_reason for sample in handle.partial().outputs] == ["cancelled"] * 3
    assert engine.snapshot().num_used_blocks == 0
    engine.check_integrity()


def test_a_cancelled_prompt_stays_cached(make_engine):
    engine = make_engine()
    engine.pause()
    handle = engine.submit([7] * 40, LONG)
    engine.step()
    handle.cancel()
    engine.resume()
    assert engine.generate([7] * 40, letters(1))[0].num_cached_tokens == 32


def test_preemption_shows_in_the_status_and_not_in_the_text(make_engine):
    prompts, params = [[7, i] * 8 for i in range(3)], SamplingParams(temperature=0, max_tokens=36, ignore_eos=True)
    expected = [o.outputs[0].token_ids for o in make_engine(num_blocks=64).generate(prompts, params)]
    engine = make_engine(num_blocks=8)
    engine.pause()
    handles = [engine.submit(prompt, params) for prompt in prompts]
    statuses = set()
    while not all(handle.done for handle in handles):
        engine.step()
        statuses |= {handle.status for handle in handles}
    assert {"running", "preempted", "finished"} <= statuses
    assert [handle.result().outputs[0].token_ids for handle in handles] == expected


# --- asyncio


def test_await_and_async_for_under_a_running_loop(make_scripted):
    engine, _ = make_scripted(ALPHABET, seconds=0.002)

    async def main():
        first, second = engine.submit([1], letters(10)), engine.submit([1], letters(20))
        pieces = [piece async for piece in first]
        outputs = await asyncio.gather(_await(first), _await(second), _await(second))
        async_pieces = [piece async for piece in second.sample(0)]
        return pieces, outputs, async_pieces

    pieces, outputs, again = asyncio.run(main())
    assert "".join(pieces) == text(10) and len(pieces) >= 3
    assert [output.outputs[0].text for output in outputs] == [text(10), text(20), text(20)]
    assert again == [text(20)]


async def _await(handle):
    return await handle


def test_blocking_calls_work_inside_a_running_loop(make_scripted):
    """What a notebook cell does: the kernel's loop is running in this very thread."""
    engine, _ = make_scripted(ALPHABET)

    async def cell():
        return engine.generate([1], letters(3)), "".join(engine.submit([1], letters(4)))

    outputs, streamed = asyncio.run(cell())
    assert (outputs[0].outputs[0].text, streamed) == (text(3), text(4))


def test_the_loop_stays_free_while_a_request_runs(make_scripted):
    engine, _ = make_scripted(ALPHABET, seconds=0.01)

    async def main():
        task = asyncio.ensure_future(_await(engine.submit([1], letters(20))))
        ticks = 0
        while not task.done():
            await asyncio.sleep(0.005)
            ticks += 1
        return ticks

    assert asyncio.run(main()) >= 15


def test_a_cancelled_task_leaves_the_request_alone_and_no_waiter_behind(make_scripted):
    engine, _ = make_scripted(ALPHABET, seconds=0.01)
    handle = engine.submit([1], letters(20))

    async def main():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(_await(handle), 0.03)
        return await handle

    assert asyncio.run(main()).outputs[0].text == text(20)
    assert handle._record._end_wakers == handle._record._text_wakers == []


def test_a_loop_that_was_closed_does_not_disturb_the_engine(make_scripted):
    engine, _ = make_scripted(ALPHABET, seconds=0.02)
    handle = engine.submit([1], letters(10))
    loop = asyncio.new_event_loop()
    handle._record._end_wakers.append((loop, loop.create_future()))
    loop.close()
    assert handle.result(30).outputs[0].text == text(10)


# --- bounds


def test_only_the_latest_finished_requests_are_listed(make_scripted):
    engine, _ = make_scripted(ALPHABET)
    engine.generate([[1]] * 300, letters(1))
    handles = engine.handles()
    assert list(handles) == list(range(45, 301))
    assert handles[300].result().outputs[0].text == "a"


def test_many_threads_submit_at_once_and_every_request_has_its_own_id(make_scripted):
    engine, _ = make_scripted(ALPHABET)
    ids, lock = [], threading.Lock()

    def submit():
        handles = [engine.submit([1], letters(2)) for _ in range(50)]
        results = [handle.result(60) for handle in handles]
        with lock:
            ids.extend(result.request_id for result in results)

    threads = [threading.Thread(target=submit) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(ids) == list(range(1, 401))
    submitted = [e.request_id for e in engine.events.since(0)[0] if e.kind is EventKind.SUBMITTED]
    assert submitted == list(range(1, 401))
    engine.check_integrity()
