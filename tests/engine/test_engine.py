"""What users ask of an engine: generate, chat, submit, pause, step, look inside, and be told what is wrong."""

import dataclasses
import inspect
import time

import numpy as np
import pytest
import tiny
from kvscope.engine import (
    Cause,
    Engine,
    EngineClosed,
    EngineConfig,
    EventKind,
    RequestFailed,
    RequestRefused,
    SamplingParams,
)
from kvscope.engine.config import EngineOptions

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)


def events_of(engine, *kinds):
    return [event for event in engine.events.since(0)[0] if event.kind in kinds]


# --- generate, chat, submit


def test_generate_keeps_the_order_and_gives_the_oracles_tokens(engine, tiny_folder):
    prompts = ["Hello there", "a much longer prompt, " * 5, "x", [104, 101, 108]]
    outputs = engine.generate(prompts, GREEDY)
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = engine.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
        assert output.prompt_token_ids == ids
        assert output.outputs[0].token_ids == tiny.oracle(tiny_folder, ids, 12)
        assert output.outputs[0].text == engine.tokenizer.decode(output.outputs[0].token_ids, skip_special_tokens=True)
        assert output.outputs[0].finish_reason == "length" and output.finished
    assert outputs[0].prompt == "Hello there" and outputs[3].prompt is None


def test_the_prompts_of_one_call_are_seen_by_the_same_step_however_slowly_they_come(engine, monkeypatch):
    submit = engine._driver.submit
    monkeypatch.setattr(engine._driver, "submit", lambda *request: (submit(*request), time.sleep(0.03))[0])
    engine.generate(["one", "two", "three", "four"], GREEDY)
    assert len({event.step for event in events_of(engine, EventKind.ADMITTED)}) == 1


def test_one_prompt_is_a_batch_of_one_and_params_may_differ(engine):
    assert len(engine.generate("Hello", GREEDY)) == 1
    assert len(engine.generate([1, 2, 3], GREEDY)) == 1
    short, long = engine.generate(["Hello", "Hello"], [SHORT, GREEDY])
    assert (len(short.outputs[0].token_ids), len(long.outputs[0].token_ids)) == (3, 12)
    assert engine.generate([], GREEDY) == []


def test_chat_renders_the_template_and_adds_no_second_bos(engine):
    conversation = [{"role": "user", "content": "hello"}]
    (output,) = engine.chat(conversation, SHORT)
    assert output.prompt == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert output.prompt_token_ids == engine.tokenizer(output.prompt, add_special_tokens=False)["input_ids"]
    assert [o.prompt for o in engine.chat([conversation, conversation], SHORT)] == [output.prompt] * 2
    assert engine.submit(conversation, SHORT).result().outputs == output.outputs
    (bare,) = engine.chat(conversation, SHORT, add_generation_prompt=False)
    assert bare.prompt == engine.submit(conversation, SHORT, add_generation_prompt=False).prompt_text
    assert bare.prompt == "<|im_start|>user\nhello<|im_end|>\n"
    with pytest.raises(ValueError, match="template= is for chat messages"):
        engine.generate(["hello"], SHORT, template="x")
    for wrong in ("hello", None, ["hello"]):
        with pytest.raises(TypeError, match=r"chat\(\) got ('hello'|None): a conversation is a list of messages"):
            engine.chat(wrong, SHORT)


def test_chat_without_a_template_says_what_to_do(make_engine, tiny_folder_without_template):
    engine = make_engine(tiny_folder_without_template)
    with pytest.raises(ValueError, match=r"no chat template.*template=.*submit\(str\)"):
        engine.chat([{"role": "user", "content": "hello"}], SHORT)
    (output,) = engine.chat([{"role": "user", "content": "hello"}], SHORT, template="{{ messages[0].content }}")
    assert output.prompt == "hello"


def test_submit_returns_at_once_while_a_step_runs(make_scripted):
    engine, model = make_scripted([65], seconds=0.3)
    first = engine.submit([1], SHORT)
    while model.steps == 0:
        time.sleep(0.005)
    started = time.monotonic()
    second = engine.submit([1], SHORT)
    assert time.monotonic() - started < 0.2
    assert [first.request_id, second.request_id] == [1, 2]


def test_a_model_without_tokenizer_serves_token_ids(make_engine, tmp_path):
    engine = make_engine(tiny.tiny_llama(tmp_path, tokenizer=False))
    (output,) = engine.generate([1, 2, 3], GREEDY)
    assert output.outputs[0].text == "" and len(output.outputs[0].token_ids) == 12
    assert engine.tokenizer is None and engine.decode_token(7) == "[7]"
    assert engine.submit([1], SHORT).prompt_text == ""
    with pytest.raises(ValueError, match="no tokenizer, so a text prompt"):
        engine.submit("hello", SHORT)
    with pytest.raises(ValueError, match=r"stop=.*no tokenizer; use stop_token_ids"):
        engine.submit([1], SamplingParams(stop="x"))


# --- bad requests


@pytest.mark.parametrize(
    ("prompt", "params", "error", "words"),
    [
        ("", None, ValueError, "must not be empty"),
        ([], None, ValueError, "at least one token id"),
        ([300], None, ValueError, "token id 300: must be from 0 to 299"),
        (None, None, TypeError, "prompt of type NoneType"),
        ([1], {"max_tokens": 3}, TypeError, r"must be SamplingParams\(...\) or None"),
        ([1] * 1025, None, RequestRefused, "1026 tokens, max_model_len is 1024"),
        ([1], SamplingParams(max_tokens=2000), RequestRefused, "2001 tokens, max_model_len is 1024"),
        ([1], SamplingParams(stop_token_ids=[300]), RequestRefused, "stop_token_ids holds 300"),
    ],
)
def test_a_bad_request_fails_alone_at_submit(make_engine, prompt, params, error, words):
    engine = make_engine(num_blocks=128)
    good = engine.submit("hello", GREEDY)
    with pytest.raises(error, match=words):
        engine.submit(prompt, params)
    assert good.result(30).outputs[0].finish_reason == "length"
    engine.check_integrity()


def test_a_request_larger_than_the_pool_is_refused_with_both_numbers_and_an_event(make_engine):
    engine = make_engine(num_blocks=5)
    with pytest.raises(RequestRefused, match=r"5 blocks of 16 tokens, the pool has 4"):
        engine.submit([1] * 60, SamplingParams(max_tokens=20))
    assert engine.generate([1] * 60, SHORT)[0].outputs[0].finish_reason == "length"
    (refused,) = events_of(engine, EventKind.REFUSED)
    assert (refused.request_id, refused.cause) == (1, Cause.POOL_TOO_SMALL)
    assert refused.numbers == {"needed": 5, "available": 4}
    assert engine.metrics()["kvscope:requests_refused_total"] == 1


def test_a_full_queue_refuses_at_once(make_engine):
    engine = make_engine(max_waiting_requests=3)
    engine.pause()
    handles = [engine.submit("hello", SHORT) for _ in range(3)]
    with pytest.raises(RequestRefused, match="3 requests are waiting, max_waiting_requests is 3: try again"):
        engine.submit("hello", SHORT)
    engine.resume()
    assert [handle.result(30).outputs[0].finish_reason for handle in handles] == ["length"] * 3
    assert engine.submit("hello", SHORT).result(30).request_id == 5


def test_what_the_caller_was_refused_is_not_served_though_the_core_has_room_when_it_hears_of_it(make_engine):
    engine = make_engine(max_waiting_requests=1)
    engine._driver._inbox = 1  # one on its way to the core, which may be counted twice, and be gone the next moment
    with pytest.raises(RequestRefused, match="1 requests are waiting"):
        engine.submit("hello", SHORT)
    engine._driver._inbox = 0
    assert engine.submit("hello", SHORT).result(30).request_id == 2
    assert engine.metrics()["kvscope:requests_refused_total"] == 1
    assert [event.request_id for event in events_of(engine, EventKind.SUBMITTED)] == [2]


def test_generate_checks_every_prompt_before_it_submits_any(engine):
    with pytest.raises(ValueError, match="must not be empty"):
        engine.generate(["hello", ""], SHORT)
    with pytest.raises(ValueError, match="params has 1 entries: must be one for each of the 2 prompts"):
        engine.generate(["hello", "there"], [SHORT])
    assert events_of(engine, EventKind.SUBMITTED) == []


# --- ends


def test_the_stop_set_is_the_union_of_all_sources(make_scripted):
    engine, _ = make_scripted([65, 66, 258, 67], eos_token_ids=[258])  # 257 is the tokenizer's, 258 the model's
    (output,) = engine.generate([1], SamplingParams(temperature=0, max_tokens=8))
    assert (output.outputs[0].token_ids, output.outputs[0].text) == ([65, 66, 258], "AB")
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", None)
    engine, _ = make_scripted([65, 257, 67], eos_token_ids=[258])
    assert engine.generate([1], SamplingParams(temperature=0, max_tokens=8))[0].outputs[0].token_ids == [65, 257]


def test_ignore_eos_suppresses_all_of_them_but_not_the_users_stop_ids(make_scripted):
    engine, _ = make_scripted([257, 258, 66, 67], eos_token_ids=[258])
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, stop_token_ids=[67])
    (output,) = engine.generate([1], params)
    assert output.outputs[0].token_ids == [257, 258, 66, 67]
    assert (output.outputs[0].text, output.outputs[0].stop_reason) == ("B", 67)


def test_min_tokens_masks_every_end(make_scripted):
    engine, _ = make_scripted([257, 67, 257, 67, 257], eos_token_ids=[258])
    params = SamplingParams(temperature=0, max_tokens=9, min_tokens=3, stop_token_ids=[67], ignore_eos=True)
    ids = engine.generate([1], params)[0].outputs[0].token_ids
    assert not {67, 257, 258} & set(ids[:3]) and ids[3] == 67


def test_a_stop_id_ends_the_text_before_it_unless_asked(make_scripted):
    engine, _ = make_scripted([*b"ABCD"])
    for include, text in ((False, "AB"), (True, "ABC")):
        params = SamplingParams(temperature=0, max_tokens=4, stop_token_ids=[67], include_stop_str_in_output=include)
        (output,) = engine.generate([1], params)
        assert (output.outputs[0].text, output.outputs[0].token_ids) == (text, [*b"ABC"])


def test_special_tokens_show_only_when_asked(make_scripted):
    engine, _ = make_scripted([65, 258, 66])
    for skip, text in ((True, "AB"), (False, "A<|im_start|>B")):
        params = SamplingParams(temperature=0, max_tokens=3, skip_special_tokens=skip)
        assert engine.generate([1], params)[0].outputs[0].text == text


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_over_four_tokens_cuts_everything_at_one_token(make_scripted, sentencepiece_folder, include):
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(sentencepiece_folder).convert_tokens_to_ids
    script = ids(["▁Hello", "DEF", "G", "HI", "J", "▁world"])
    engine, _ = make_scripted(script, tokenizer=sentencepiece_folder)
    params = SamplingParams(
        temperature=0, max_tokens=20, stop="DEFGHIJ", logprobs=1, include_stop_str_in_output=include
    )
    handle = engine.submit([1], params)
    pieces = list(handle)
    output = handle.result()
    sample = output.outputs[0]
    assert "".join(pieces) == sample.text == ("HelloDEFGHIJ" if include else "Hello")
    assert pieces[0] == "Hello"
    assert sample.token_ids == script[:5] and len(sample.logprobs) == 5 and output.metrics.num_output_tokens == 5
    assert (sample.finish_reason, sample.stop_reason) == ("stop", "DEFGHIJ")
    (finished,) = events_of(engine, EventKind.FINISHED)
    assert (finished.cause, finished.numbers["output_tokens"], finished.text) == (Cause.STOP_STRING, 5, "DEFGHIJ")
    assert engine.snapshot().num_used_blocks == 0
    engine.check_integrity()


def test_a_stop_string_on_the_last_allowed_token_is_a_stop(make_scripted):
    engine, _ = make_scripted([*b"ABCD"])
    engine.pause()
    handle = engine.submit([1], SamplingParams(temperature=0, max_tokens=3, stop="C"))
    assert [engine.step().finished for _ in range(3)] == [[], [], [handle.request_id]]
    sample = handle.result().outputs[0]
    assert (sample.text, sample.finish_reason, sample.stop_reason) == ("AB", "stop", "C")
    (finished,) = events_of(engine, EventKind.FINISHED)
    assert (finished.cause, finished.text) == (Cause.STOP_STRING, "C")
    engine.resume()
    assert engine.generate([1], SamplingParams(temperature=0, max_tokens=3, stop="D"))[0].outputs[0].text == "ABC"
    assert [e.cause for e in events_of(engine, EventKind.FINISHED)] == [Cause.STOP_STRING, Cause.LENGTH]


def test_stop_strings_count_only_behind_min_tokens(make_scripted):
    engine, _ = make_scripted([*b"ABAB"])
    (output,) = engine.generate([1], SamplingParams(temperature=0, max_tokens=8, min_tokens=2, stop="B"))
    assert output.outputs[0].text == "ABA"


def test_an_emoji_comes_whole_and_a_cut_one_ends_as_one_replacement_character(make_scripted):
    engine, _ = make_scripted([*"a🙂b".encode()])
    handle = engine.submit([1], SamplingParams(temperature=0, max_tokens=6))
    assert set(handle) <= {"a", "🙂", "b", "a🙂", "🙂b", "a🙂b"}
    assert handle.result().outputs[0].text == "a🙂b"
    assert engine.generate([1], SamplingParams(temperature=0, max_tokens=3))[0].outputs[0].text == "a\ufffd"


# --- sampling through the whole engine


def test_samples_differ_are_reproducible_and_do_not_depend_on_the_batch(engine):
    params = SamplingParams(n=3, temperature=1.0, seed=7, max_tokens=10, ignore_eos=True)
    alone = [sample.token_ids for sample in engine.generate("hello", params)[0].outputs]
    assert len({tuple(ids) for ids in alone}) == 3
    other = SamplingParams(max_tokens=10, ignore_eos=True)
    crowd = engine.generate(["one", "hello", "three", "four"], [other, params, other, other])
    assert [sample.token_ids for sample in crowd[1].outputs] == alone


def test_logprobs_hold_the_best_and_the_chosen_and_add_up(engine):
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=6, logprobs=3, ignore_eos=True)
    sample = engine.generate("hello", params)[0].outputs[0]
    assert [token in top for token, top in zip(sample.token_ids, sample.logprobs, strict=True)] == [True] * 6
    assert all(len(top) in (3, 4) for top in sample.logprobs)
    chosen = [top[token] for token, top in zip(sample.token_ids, sample.logprobs, strict=True)]
    assert sample.cumulative_logprob == pytest.approx(sum(chosen))
    assert engine.generate("hello", SHORT)[0].outputs[0].logprobs is None


# --- pause, step, resume


def test_step_by_step_gives_the_same_tokens_as_running(engine, tiny_folder):
    engine.pause()
    handle = engine.submit("hello", SHORT)
    steps = [engine.step() for _ in range(3)]
    ids = engine.tokenizer("hello")["input_ids"]
    expected = tiny.oracle(tiny_folder, ids, 3)
    assert [step.new_tokens for step in steps] == [{1: [(0, token)]} for token in expected]
    assert [step.scheduled for step in steps] == [{1: len(ids)}, {1: 1}, {1: 1}]
    assert [step.finished for step in steps] == [[], [], [1]]
    assert handle.result().outputs[0].token_ids == expected
    assert engine.step().scheduled == {}
    kinds = [event.kind for event in events_of(engine, EventKind.PAUSED, EventKind.CONTINUED)]
    engine.resume()
    assert kinds == [EventKind.PAUSED] and engine.state == "running"


def test_waiting_on_a_paused_engine_raises_and_says_what_to_do(engine):
    engine.pause()
    handle = engine.submit("hello", SHORT)
    for call in (handle.result, lambda: next(iter(handle)), lambda: engine.generate("x", SHORT), engine.wait_idle):
        with pytest.raises(RuntimeError, match=r"the engine is paused; call resume\(\) or step\(\)"):
            call()
    assert handle.status == "waiting" and engine.snapshot().state == "paused"
    engine.resume()
    assert handle.result(30).finished


def test_stepping_a_running_engine_raises(engine):
    with pytest.raises(RuntimeError, match=r"this one is running; call pause\(\) first"):
        engine.step()


def test_a_loop_that_pauses_its_own_engine_is_told(make_scripted):
    engine, _ = make_scripted([*b"abc"], seconds=0.02)
    handle = engine.submit([1], SamplingParams(temperature=0, max_tokens=50))
    with pytest.raises(RuntimeError, match="iterating would wait for ever"):
        for _ in handle:
            engine.pause()


def test_pause_returns_when_nothing_moves_any_more(make_scripted):
    engine, model = make_scripted([65], seconds=0.02)
    engine.submit([1], SamplingParams(temperature=0, max_tokens=500))
    time.sleep(0.1)
    engine.pause()
    steps = model.steps
    time.sleep(0.1)
    assert model.steps == steps
    engine.pause()
    engine.resume()
    engine.resume()
    time.sleep(0.1)
    assert model.steps > steps


# --- faults


def test_a_fault_in_a_step_fails_its_requests_with_the_cause_and_no_others(make_scripted):
    engine, model = make_scripted([65])
    engine.pause()
    handles = [engine.submit([1], SHORT) for _ in range(2)]
    model.fault = ValueError("the maths went wrong")
    engine.resume()
    for handle in handles:
        with pytest.raises(RequestFailed, match="failed: ValueError: the maths went wrong") as raised:
            handle.result(30)
        assert isinstance(raised.value.__cause__, ValueError)
        assert handle.status == "failed" and handle.partial().error == "the maths went wrong"
        assert handle.partial().outputs[0].finish_reason == "error"
        with pytest.raises(RequestFailed):
            list(handle)
    assert engine.generate([1], SHORT)[0].outputs[0].text == "AAA"
    assert engine.snapshot().num_used_blocks == 0
    assert len(events_of(engine, EventKind.FAILED)) == 2
    engine.check_integrity()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_fail_the_request(make_scripted, value):
    engine, model = make_scripted([65])
    model.spoil = value
    with pytest.raises(RequestFailed, match="not finite"):
        engine.generate([1], SHORT)
    assert [event.cause for event in events_of(engine, EventKind.FAILED)] == [Cause.NAN_LOGITS]
    assert engine.generate([1], SHORT)[0].outputs[0].text == "AAA"


def test_a_fault_before_anyone_is_scheduled_is_told_to_those_who_wait(make_scripted, monkeypatch):
    engine, _ = make_scripted([65])
    engine.pause()
    handle = engine.submit([1], SHORT)
    engine.snapshot()
    with monkeypatch.context() as patch:
        patch.setattr(engine._driver._core.tables, "find_prefix", lambda seq: 1 / 0)
        engine.step()
    with pytest.raises(RequestFailed, match="ZeroDivisionError"):
        handle.result(30)
    engine.resume()
    assert engine.wait_idle(30) and engine.generate([1], SHORT)[0].outputs[0].text == "AAA"


def test_an_interrupt_in_a_step_reaches_the_caller_and_ends_the_requests_of_the_step(make_scripted):
    engine, model = make_scripted([65])
    engine.pause()
    handle = engine.submit([1], SHORT)
    model.fault = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert handle.status == "failed"
    with pytest.raises(RequestFailed, match="KeyboardInterrupt"):
        handle.result(30)
    engine.resume()
    assert engine.wait_idle(30) and engine.generate([1], SHORT)[0].outputs[0].text == "AAA"


class Panic(BaseException):
    """What pyo3 makes of a panic in Rust: no Exception."""


@pytest.mark.parametrize("fault", [KeyError, Panic])
def test_a_fault_while_text_is_made_ends_that_request_alone(make_scripted, monkeypatch, fault):
    engine, _ = make_scripted([65])
    decode = engine._decoder.decode

    def broken(ids, skip_special_tokens=False):
        if not skip_special_tokens:
            raise fault("no such token")
        return decode(ids, skip_special_tokens)

    monkeypatch.setattr(engine._decoder, "decode", broken)
    engine.pause()
    bad = engine.submit([1], SamplingParams(temperature=0, max_tokens=3, skip_special_tokens=False))
    good = engine.submit([1], SHORT)
    engine.resume()
    assert good.result(30).outputs[0].text == "AAA"
    with pytest.raises(RequestFailed, match=fault.__name__):
        bad.result(30)
    engine.check_integrity()
    assert engine.snapshot().num_used_blocks == 0


@pytest.mark.parametrize("fault", [ZeroDivisionError, Panic])
def test_a_broken_core_stops_the_engine_and_everyone_is_told(make_scripted, monkeypatch, fault):
    def broken():
        raise fault("broken")

    engine, _ = make_scripted([65])
    engine.pause()
    handle = engine.submit([1], SHORT)
    engine.snapshot()
    monkeypatch.setattr(engine._driver._core, "step", broken)
    engine.resume()
    with pytest.raises(RequestFailed, match=fault.__name__):
        handle.result(30)
    engine.close()
    with pytest.raises(EngineClosed, match=f"stopped because of a fault, {fault.__name__}"):
        engine.submit([1], SHORT)


# --- looking inside


def test_snapshot_metrics_and_events_describe_the_same_engine(engine):
    engine.pause()
    engine.submit("hello hello hello hello", GREEDY)
    engine.step()
    snapshot = engine.snapshot()
    (request,) = snapshot.requests
    assert (request.id, request.status, request.label) == (1, "running", "hello hello hello hello")
    assert snapshot.num_used_blocks == len(request.block_tables[0])
    assert isinstance(snapshot.block_state, np.ndarray) and len(snapshot.block_state) == 64
    assert engine.metrics()["vllm:num_requests_running"] == 1
    assert "vllm:num_requests_running" in engine.metrics_text()
    events, next_index, lost = engine.events.since(0)
    assert len(events) == next_index and lost == 0
    engine.resume()
    assert engine.wait_idle(30) and engine.metrics()["vllm:num_requests_running"] == 0
    assert engine.events.since(next_index)[0][0].index == next_index


def test_a_slow_viewer_learns_how_much_it_missed(make_engine):
    engine = make_engine(event_capacity=8)
    engine.generate("hello", GREEDY)
    events, next_index, lost = engine.events.since(0)
    assert len(events) == 8 and lost == next_index - 8 > 0


def test_wait_idle_times_out_with_a_sentence_and_changes_nothing(make_scripted):
    engine, _ = make_scripted([65], seconds=0.02)
    handle = engine.submit([1], SamplingParams(temperature=0, max_tokens=20))
    with pytest.raises(TimeoutError, match=r"1 requests are not finished after 0.05 s"):
        engine.wait_idle(0.05)
    assert engine.wait_idle() is True and handle.status == "finished"


def test_the_prefix_cache_can_be_reset(engine):
    prompt = [7] * 40
    engine.generate(prompt, SHORT)
    assert engine.generate(prompt, SHORT)[0].num_cached_tokens == 32
    assert engine.reset_prefix_cache() is True
    assert engine.generate(prompt, SHORT)[0].num_cached_tokens == 0


def test_times_are_in_order(engine):
    metrics = engine.generate("hello", GREEDY)[0].metrics
    assert metrics.arrival <= metrics.first_token <= metrics.finished
    assert 0 < metrics.ttft <= metrics.e2e and metrics.tpot > 0 and metrics.num_output_tokens == 12


def test_every_token_has_its_time_in_every_sample(engine):
    output = engine.generate("hello", SamplingParams(n=2, temperature=1.0, max_tokens=9, ignore_eos=True))[0]
    for sample in output.outputs:
        assert len(sample.token_times) == 9 and sample.token_times == sorted(sample.token_times)
        assert sample.token_times[0] >= output.metrics.first_token


def test_a_waiting_call_pumps_the_hooks_and_drops_one_that_fails(make_scripted):
    engine, _ = make_scripted([65], seconds=0.02)
    calls = []
    engine.while_waiting += [lambda: calls.append(time.monotonic()), lambda: 1 / 0]
    with pytest.warns(UserWarning, match="ZeroDivisionError"):
        began = time.monotonic()
        engine.generate([1], SamplingParams(temperature=0, max_tokens=30))
    assert 2 <= len(calls) <= 2 + (time.monotonic() - began) / 0.1 and len(engine.while_waiting) == 1


def test_a_token_reads_as_text_and_an_unknown_one_is_refused(engine):
    assert engine.decode_token(65) == "A"
    for token_id in (-1, 300, 2**40):
        with pytest.raises(ValueError, match=rf"^token_id={token_id}: must be from 0 to 299"):
            engine.decode_token(token_id)


def test_one_line_says_what_an_engine_is(engine):
    assert repr(engine).startswith("<Engine ") and "running, float32 on cpu, 64 blocks of 16>" in repr(engine)
    assert "\n" not in repr(engine)


def test_every_option_is_in_the_signature_and_in_the_documentation():
    names = {f.name for f in dataclasses.fields(EngineConfig)} - {"model", "weights_source"}
    assert set(EngineOptions.__annotations__) == names
    parameters = inspect.signature(Engine).parameters
    assert set(parameters) == names | {"model"} and parameters["block_size"].default == 16
    assert all(name in EngineConfig.__doc__ for name in names)


# --- the end


def test_closing_releases_everyone_and_says_so_afterwards(make_scripted):
    engine, _ = make_scripted([65], seconds=0.02)
    handle = engine.submit([1], SamplingParams(temperature=0, max_tokens=500))
    next(iter(handle))
    engine.close()
    engine.close()
    with pytest.raises(EngineClosed, match="closed before request 1 was finished"):
        handle.result(30)
    assert handle.status == "cancelled" and handle.partial().outputs[0].text.startswith("A")
    calls = [
        lambda: engine.submit([1]),
        lambda: engine.generate([1]),
        engine.pause,
        engine.resume,
        engine.wait_idle,
        engine.check_integrity,
        engine.reset_prefix_cache,
    ]
    for call in calls:
        with pytest.raises(EngineClosed, match=r"this engine is closed; make a new one"):
            call()
    handle.cancel()
    assert engine.snapshot().state == "stopped" and engine.metrics() and engine.metrics_text()
    assert events_of(engine, EventKind.CANCELLED)[0].cause == Cause.CLOSED
    assert "stopped" in repr(engine)


def test_a_with_block_closes(make_engine):
    with make_engine() as engine:
        engine.generate("hello", SHORT)
    assert engine.state == "stopped"
