"""EngineCore as its callers see it: how samples end, and what a cancel or a fault costs."""

import pytest
from fake_model import greedy, make_core, reference, run
from kvscope.engine import EventKind, SamplingParams
from kvscope.engine.events import Cause


def events(core, *kinds):
    return [e for e in core.events.since(0)[0] if e.kind in kinds]


def sample(core, request_id, child=0):
    return core.get(request_id).children[child]


# --- how a sample ends ------------------------------------------------------------------------------------------------

PROMPT = [1, 2, 3]
TEXT = reference(PROMPT, greedy(9))


@pytest.mark.parametrize(
    ("params", "length", "reason", "stop_reason", "cause"),
    [
        (greedy(9), 4, "stop", None, Cause.EOS),
        (greedy(4), 4, "stop", None, Cause.EOS),  # the token that ends it is also the last one allowed
        (greedy(3), 3, "length", None, Cause.LENGTH),
        (greedy(9, stop_token_ids=[TEXT[1]]), 2, "stop", TEXT[1], Cause.STOP_TOKEN),
        (greedy(9, stop_token_ids=[TEXT[3]]), 4, "stop", None, Cause.EOS),  # both: it is the end of sequence first
        (greedy(9, ignore_eos=True), 9, "length", None, Cause.LENGTH),
        (greedy(9, ignore_eos=True, stop_token_ids=[TEXT[3]]), 4, "stop", TEXT[3], Cause.STOP_TOKEN),
    ],
)
def test_the_first_reason_by_position_ends_a_sample(params, length, reason, stop_reason, cause):
    core = make_core(eos_token_ids=[TEXT[3], 10_000])
    core.add_request(PROMPT, params)
    finished = [i for output in run(core) for i in output.finished]
    seq = sample(core, 1)
    assert (finished, seq.output_token_ids) == ([1], TEXT[:length])
    assert (seq.finish_reason, seq.stop_reason, seq.finish_cause) == (reason, stop_reason, cause)
    event = events(core, EventKind.FINISHED)[0]
    assert event.cause is cause and event.numbers["output_tokens"] == length
    assert core.get(1).status == "finished"


def test_min_tokens_masks_every_end_also_with_ignore_eos():
    for ignore_eos in (False, True):
        params = greedy(9, min_tokens=6, ignore_eos=ignore_eos, stop_token_ids=[TEXT[1]])
        core = make_core(eos_token_ids=[TEXT[3]])
        core.add_request(PROMPT, params)
        run(core)
        output = sample(core, 1).output_token_ids
        assert not {TEXT[1], TEXT[3]} & set(output[:6]) and len(output) >= 6
        assert output == reference(PROMPT, params, eos_token_ids=[TEXT[3]])


def test_a_stop_string_found_later_cuts_tokens_and_logprobs_at_the_same_place():
    core = make_core()
    core.add_request(PROMPT, greedy(9, logprobs=2))
    for _ in range(5):
        core.step()
    assert core.finish(1, 0, 3, Cause.STOP_STRING, "abc")
    seq = sample(core, 1)
    assert seq.output_token_ids == TEXT[:3] and len(seq.logprobs) == 3
    assert seq.cumulative_logprob == pytest.approx(sum(p[t] for p, t in zip(seq.logprobs, TEXT, strict=False)))
    assert (seq.finish_reason, seq.stop_reason) == ("stop", "abc")
    assert not core.has_work and events(core, EventKind.FINISHED)[0].text == "abc"
    core.check_integrity()


@pytest.mark.parametrize("found", [True, False])
def test_a_stop_string_on_the_very_last_token_is_why_it_ends(found):
    core = make_core()
    core.add_request(PROMPT, greedy(4, stop="abc"))
    while sample(core, 1).num_output_tokens < 4:
        core.step()
    core.check_integrity()
    assert core.has_work and sample(core, 1).finish_reason is None, "who has the text has not spoken yet"
    if found:
        assert core.finish(1, 0, 4, Cause.STOP_STRING, "abc") and not core.has_work
    else:
        assert core.step().finished == [1]
    assert not core.finish(1, 0, 4, Cause.LENGTH)
    reason, cause = ("stop", Cause.STOP_STRING) if found else ("length", Cause.LENGTH)
    (finished,) = events(core, EventKind.FINISHED)
    assert (sample(core, 1).finish_reason, finished.cause, finished.text) == (reason, cause, "abc" if found else "")
    metrics = core.metrics()
    ended = [metrics[f'vllm:request_success_total{{finished_reason="{r}"}}'] for r in ("stop", "length")]
    assert ended == [found, not found]
    core.check_integrity()


def test_finish_refuses_more_tokens_than_there_are():
    core = make_core()
    core.add_request(PROMPT, greedy(4))
    core.step()
    with pytest.raises(ValueError, match="num_tokens=2: request 1 has 1 output tokens"):
        core.finish(1, 0, 2, Cause.STOP_STRING, "x")


def test_a_seed_gives_n_different_texts_that_do_not_depend_on_company():
    params = SamplingParams(n=3, max_tokens=6, seed=7)
    alone = make_core(num_blocks=60)
    alone.add_request(PROMPT, params)
    run(alone)
    busy = make_core(num_blocks=30, max_num_batched_tokens=5, block_size=2)
    for i in range(5):
        busy.add_request([9, i], greedy(7))
    request_id = busy.add_request(PROMPT, params)
    run(busy)
    texts = [c.output_token_ids for c in alone.get(1).children]
    assert len(set(map(tuple, texts))) == 3
    assert [c.output_token_ids for c in busy.get(request_id).children] == texts


# --- cancel -----------------------------------------------------------------------------------------------------------


def test_cancel_in_the_middle_of_a_chunked_prefill_returns_every_block():
    core = make_core(max_num_batched_tokens=4)
    core.add_request([1] * 12, greedy(4))
    core.step()
    assert core.cancel(1) and not core.cancel(1)
    assert core.tables.pool.num_free == 16 and not core.has_work
    core.check_integrity()
    event = events(core, EventKind.CANCELLED)[0]
    assert event.numbers == {"output_tokens": 0, "cached_blocks": 1, "freed_blocks": 0}
    assert (core.get(1).status, sample(core, 1).finish_reason) == ("cancelled", "cancelled")


def test_cancel_ends_all_samples_running_and_preempted():
    core = make_core()
    core.add_request([1] * 5, SamplingParams(n=3, max_tokens=9, seed=1))
    core.step()
    core.step()
    core.scheduler.preempt([sample(core, 1, 2)], Cause.USER)
    core.cancel(1)
    assert [c.status for c in core.get(1).children] == ["cancelled"] * 3
    assert not core.scheduler.running and not len(core.scheduler.waiting)
    core.check_integrity()


def test_cancel_of_a_waiting_request_lets_the_next_one_lead():
    core = make_core(max_num_seqs=1)
    for i in range(3):
        core.add_request([i], greedy(5))
    core.step()
    core.cancel(2)
    assert core.snapshot().requests[1].blocked_because == "no step has begun since it came to the head of the line"
    core.step()
    assert core.snapshot().requests[1].blocked_because == "it needs 1 seat and 0 of max_num_seqs are free"


def test_an_id_may_be_promised_before_and_is_never_given_again():
    core = make_core()
    assert core.add_request([1], greedy(1), request_id=7) == 7
    assert core.add_request([1], greedy(1)) == 8
    with pytest.raises(ValueError, match=r"^request_id=8: must be above 8"):
        core.add_request([1], greedy(1), request_id=8)
    run(core)
    assert core.get(7).finished and core.get(8).finished


def test_unknown_ids():
    core = make_core()
    assert not core.cancel(7) and not core.preempt(7)
    with pytest.raises(KeyError):
        core.get(7)


# --- faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        (RuntimeError("the model broke"), Cause.EXCEPTION),
        (MemoryError(), Cause.OUT_OF_MEMORY),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
            Cause.OUT_OF_MEMORY,
        ),
    ],
)
def test_a_fault_ends_the_requests_of_the_step_and_no_other(fault, cause):
    core = make_core(max_num_seqs=2)
    for i in range(3):
        core.add_request([i, i], greedy(5))
    core.step()
    core.runner.model.fault = fault
    output = core.step()
    assert output.finished == [1, 2] and output.new_tokens == {}
    assert [core.get(i).status for i in (1, 2, 3)] == ["failed", "failed", "waiting"]
    assert core.get(1).error is fault and sample(core, 1).finish_reason == "error"
    assert core.tables.pool.num_used == 0
    core.check_integrity()
    failed = events(core, EventKind.FAILED)
    assert [(e.request_id, e.cause, e.text) for e in failed] == [
        (i, cause, f"{type(fault).__name__}: {fault}") for i in (1, 2)
    ]
    run(core)
    assert sample(core, 3).output_token_ids == reference([2, 2], greedy(5))


def test_logits_that_are_not_finite_end_their_own_request_only():
    core = make_core()
    core.add_request([1, 2, 3, 4, 5], greedy(6))
    core.add_request([6, 7, 8, 9, 10], greedy(6))
    core.step()
    core.runner.model.broken_rows = [0]
    output = core.step()
    assert output.finished == [1] and list(output.new_tokens) == [2]
    assert isinstance(core.get(1).error, FloatingPointError)
    assert events(core, EventKind.FAILED)[0].cause is Cause.NAN_LOGITS
    run(core)
    assert sample(core, 2).output_token_ids == reference([6, 7, 8, 9, 10], greedy(6))


def test_text_whose_kv_may_be_broken_is_not_found_again_and_its_pages_are_zeroed():
    core = make_core()
    core.add_request([1, 2, 3, 4, 5], greedy(6))
    core.step()
    pages, _ = core.runner.storage.pages(0)
    pages[1:3] = 255  # NaN in every slot
    core.runner.model.broken_rows = [0]
    core.step()
    assert core.tables.cache.num_published == 0 and not pages[1:3].any()
    evicted = events(core, EventKind.EVICTED)
    assert [(e.block_id, e.cause) for e in evicted] == [(1, Cause.NAN_LOGITS)]
    core.add_request([1, 2, 3, 4, 5], greedy(6))
    run(core)
    assert core.get(2).num_cached_tokens == 0
    assert sample(core, 2).output_token_ids == reference([1, 2, 3, 4, 5], greedy(6))


def test_a_fault_in_a_forked_request_ends_all_its_samples():
    core = make_core()
    core.add_request([1, 2, 3], SamplingParams(n=3, max_tokens=6, seed=1))
    core.step()
    core.runner.model.broken_rows = [1]
    assert core.step().finished == [1]
    assert [c.status for c in core.get(1).children] == ["failed"] * 3
    core.check_integrity()


def test_an_interrupt_ends_the_requests_of_the_step_and_reaches_the_caller():
    core = make_core()
    core.add_request([1, 2, 3], greedy(5))
    core.runner.model.fault = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        core.step()
    assert core.get(1).status == "failed" and not core.has_work
    core.check_integrity()
    core.add_request([1, 2, 3], greedy(5))
    run(core)
    assert sample(core, 2).output_token_ids == reference([1, 2, 3], greedy(5))


def test_a_fault_before_anyone_runs_ends_the_one_who_leads_the_line(monkeypatch):
    core = make_core(scheduling_policy="priority")
    core.add_request([1] * 6, greedy(3), priority=5)
    core.step()
    core.preempt(1)
    core.add_request([2], greedy(2), priority=1)
    monkeypatch.setattr(core.tables, "find_prefix", lambda seq: 1 / 0)
    assert core.step().finished == [2]
    monkeypatch.undo()
    run(core)
    assert sample(core, 1).output_token_ids == reference([1] * 6, greedy(3))


def test_a_fault_before_the_plan_stands_ends_what_runs(monkeypatch):
    core = make_core()
    core.add_request([1] * 6, SamplingParams(n=2, max_tokens=6, seed=1))
    core.step()
    core.add_request([2], greedy(2))
    monkeypatch.setattr(core.tables, "find_prefix", lambda seq: 1 / 0)
    assert core.step().finished == [1]
    monkeypatch.undo()
    core.check_integrity()
    assert core.tables.take_copies() == ([],), "the copy listed for a dead sample is not made"
    run(core)
    assert sample(core, 2).output_token_ids == reference([2], greedy(2))


def test_a_line_that_cannot_move_loses_its_head_with_an_error_not_the_engine(monkeypatch):
    core = make_core()
    core.add_request([1], greedy(2))
    core.add_request([2], greedy(2))
    monkeypatch.setattr(core.tables, "blocks_to_admit", lambda seq, nodes: 1000)
    assert core.step().finished == [1] and "nothing could be scheduled" in str(core.get(1).error)
    monkeypatch.undo()
    run(core)
    assert core.get(2).status == "finished"
