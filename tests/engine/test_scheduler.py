"""Who runs, who waits and why: short stories with exact token counts."""

import pytest
from fake_model import greedy, make_core, reference, run
from kvscope.engine import EventKind, RequestRefused, SamplingParams
from kvscope.engine.events import Cause


def events(core, *kinds):
    return [e for e in core.events.since(0)[0] if e.kind in kinds]


def why(core, request_id, child=0):
    return next(r.blocked_because for r in core.snapshot().requests if (r.id, r.child) == (request_id, child))


def outputs_are_right(core, prompts):
    for request_id, (prompt, params) in prompts.items():
        assert core.get(request_id).children[0].output_token_ids == reference(prompt, params)


# --- one budget -------------------------------------------------------------------------------------------------------


def test_prefill_and_decode_share_one_batch_and_a_long_prompt_leaves_a_token_for_each_decode():
    core = make_core(num_blocks=40, max_num_batched_tokens=8)
    core.add_request([1, 2, 3], greedy(9))
    core.add_request([4, 5], greedy(9))
    assert core.step().scheduled == {1: 3, 2: 2}
    core.add_request(list(range(20)), greedy(3))
    assert core.step().scheduled == {1: 1, 2: 1, 3: 6}
    assert core.step().scheduled == {1: 1, 2: 1, 3: 6}
    assert core.step().scheduled == {1: 1, 2: 1, 3: 6}
    output = core.step()
    assert output.scheduled == {1: 1, 2: 1, 3: 2} and [child for child, _ in output.new_tokens[3]] == [0]
    run(core)
    outputs_are_right(core, {1: ([1, 2, 3], greedy(9)), 2: ([4, 5], greedy(9)), 3: (list(range(20)), greedy(3))})


def test_a_resumed_old_prompt_does_not_stall_younger_decodes():
    core = make_core(num_blocks=40, max_num_batched_tokens=5, enable_prefix_caching=False)
    core.add_request(list(range(12)), greedy(9))
    core.add_request([1, 2], greedy(9))
    while core.get(2).children[0].num_output_tokens < 2:
        core.step()
    core.preempt(1)
    assert core.step().scheduled == {1: 4, 2: 1}
    assert core.step().scheduled == {1: 4, 2: 1}


def test_a_budget_smaller_than_the_running_list_serves_the_oldest():
    core = make_core(num_blocks=40, max_num_batched_tokens=2)
    for token in (1, 2, 3):
        core.add_request([token], greedy(2))
    assert core.step().scheduled == {1: 1, 2: 1}
    assert core.step().scheduled == {1: 1, 2: 1}
    assert core.step().scheduled == {3: 1}


def test_prefill_tokens_of_a_resumed_sample_are_prefill_although_it_has_output():
    core = make_core(enable_prefix_caching=False)
    core.add_request([1, 2, 3], greedy(9))
    for _ in range(3):
        core.step()
    core.preempt(1)
    core.step()
    step = events(core, EventKind.STEP)[-1].numbers
    assert (step["prefill_tokens"], step["decode_tokens"]) == (6, 0)
    core.step()
    step = events(core, EventKind.STEP)[-1].numbers
    assert (step["prefill_tokens"], step["decode_tokens"]) == (0, 1)


# --- preemption -------------------------------------------------------------------------------------------------------


def test_the_youngest_is_preempted_and_no_one_is_admitted_in_that_step():
    core = make_core(num_blocks=6, enable_prefix_caching=False)
    core.add_request([1] * 8, greedy(9))
    core.add_request([2] * 8, greedy(5))
    core.step()
    core.add_request([3], greedy(1))
    output = core.step()  # 1 takes the last block; 2 finds none and is the youngest: it gives its own up
    assert output.preempted == [2] and output.scheduled == {1: 1}
    preempted = events(core, EventKind.PREEMPTED)[0]
    assert preempted.cause is Cause.NO_FREE_BLOCK
    assert preempted.numbers == {"released_blocks": 2, "recompute_tokens": 8, "needed_by": 2, "needed_by_child": 0}
    assert why(core, 2) == "no one is admitted in a step that preempted"
    assert why(core, 3) == "request 2 is ahead of it"
    run(core)
    outputs_are_right(core, {1: ([1] * 8, greedy(9)), 2: ([2] * 8, greedy(5)), 3: ([3], greedy(1))})


def test_an_older_one_in_need_takes_the_blocks_of_a_younger_one():
    core = make_core(num_blocks=5, enable_prefix_caching=False)
    core.add_request([1] * 8, greedy(9))
    core.add_request([2] * 6, greedy(3))
    core.step()
    assert core.step().preempted == [2]
    assert core.tables.pool.num_free == 1


@pytest.mark.parametrize("generated", [0, 1, 3, 4, 5])
@pytest.mark.parametrize("caching", [False, True])
def test_recomputation_covers_prompt_and_output_and_repeats_no_token(generated, caching):
    core = make_core(max_num_batched_tokens=3, enable_prefix_caching=caching)
    prompt = [1, 2, 3, 4, 5, 6]
    core.add_request(prompt, greedy(8))
    while core.get(1).children[0].num_output_tokens < generated or not core.scheduler.running:
        core.step()
    assert core.preempt(1) and not core.preempt(1)
    core.check_integrity()
    run(core)
    assert core.get(1).children[0].output_token_ids == reference(prompt, greedy(8))
    metrics = core.metrics()
    assert metrics["vllm:generation_tokens_total"] == 8 and metrics["vllm:prompt_tokens_total"] == 6


def test_a_preempted_one_resumes_only_when_its_whole_prefill_fits():
    core = make_core(num_blocks=8, max_num_batched_tokens=4, enable_prefix_caching=False)
    core.add_request([1] * 9, greedy(16))  # 3 blocks now, 6 in the end
    core.add_request([2] * 12, greedy(5))  # 3 blocks, 4 in the end
    while core.get(2).children[0].status != "preempted":
        core.step()
    prefill = core.tables.blocks_for(core.get(2).children[0].num_tokens)
    while not events(core, EventKind.RESUMED):
        before = core.tables.pool.num_free
        core.step()
    assert before >= prefill
    run(core)
    assert len(events(core, EventKind.PREEMPTED)) == len(events(core, EventKind.RESUMED)) <= 2


def test_three_that_each_need_more_than_half_of_the_pool_all_finish():
    core = make_core(num_blocks=8, enable_prefix_caching=False)
    prompts = {i: ([i] * 5, greedy(20)) for i in (1, 2, 3)}
    for prompt, params in prompts.values():
        core.add_request(prompt, params)
    order = [i for output in run(core, max_steps=200) for i in output.finished]
    assert order == [1, 2, 3], "the oldest always finishes first"
    outputs_are_right(core, prompts)
    for i in prompts:
        assert core.get(i).children[0].num_preemptions <= 4


def test_the_oldest_is_never_preempted_for_another():
    core = make_core(num_blocks=9, enable_prefix_caching=False)
    for i in range(1, 6):
        core.add_request([i] * 4, greedy(20))
    run(core)
    assert not [e for e in events(core, EventKind.PREEMPTED) if e.request_id == 1]


def test_samples_are_preempted_one_by_one_and_recomputed_with_hits_on_what_they_share():
    core = make_core(num_blocks=9)
    params = SamplingParams(n=4, max_tokens=12, seed=5)
    core.add_request([1] * 9, params)
    run(core)
    victims = {e.child for e in events(core, EventKind.PREEMPTED)}
    assert victims and 0 not in victims
    resumed = events(core, EventKind.RESUMED)
    assert all(e.numbers["cached_tokens"] >= 8 for e in resumed), "the prompt's full blocks were still cached or in use"
    for child in core.get(1).children:
        assert child.output_token_ids == reference([1] * 9, params, request_id=1, child=child.child)


@pytest.mark.parametrize("cache", ["hash", "radix"])
def test_text_that_fell_out_of_every_window_before_it_was_swapped_out_is_not_published_again(cache):
    core = make_core(
        windows=(3,),
        prefix_cache=cache,
        preemption_mode="swap",
        num_cpu_blocks=9,
        max_num_batched_tokens=8,
        num_blocks=20,
    )
    prompt = [1, 2] * 8 + [3]
    core.add_request(prompt, greedy(9))
    while core.get(1).children[0].num_computed_tokens < 18:
        core.step()
    core.preempt(1)
    core.reset_prefix_cache()
    run(core)
    assert core.get(1).children[0].output_token_ids == reference(prompt, greedy(9), windows=(3,))


# --- admission --------------------------------------------------------------------------------------------------------


def test_admission_is_strictly_in_order_and_the_head_says_what_it_lacks():
    core = make_core(num_blocks=9, watermark=0.1)
    core.add_request([1] * 16, greedy(4))
    core.step()
    core.add_request([2] * 14, greedy(2))
    core.add_request([3], greedy(2))
    core.step()
    assert why(core, 2) == "it needs 4 blocks; 2 are available and 1 is kept in reserve"
    assert why(core, 3) == "request 2 is ahead of it"
    blocked = events(core, EventKind.BLOCKED)
    assert [(e.request_id, e.cause) for e in blocked] == [(2, Cause.NO_FREE_BLOCK), (3, Cause.BEHIND)]
    assert blocked[0].numbers == {"needed": 4, "available": 2, "reserved": 1, "behind": -1}
    assert blocked[1].numbers["behind"] == 2
    core.step()
    assert len(events(core, EventKind.BLOCKED)) == 2, "an event only when the kind of reason changes"


def test_what_a_running_prefill_still_needs_is_kept_in_reserve():
    core = make_core(num_blocks=9, max_num_batched_tokens=6)
    core.add_request([1] * 20, greedy(1))  # 5 blocks, taken over 4 steps
    core.step()
    core.add_request([2] * 14, greedy(1))  # 4 blocks: 6 are free, 3 of them are spoken for
    for _ in range(2):
        core.step()
    assert core.get(2).status == "waiting"
    run(core)
    assert not events(core, EventKind.PREEMPTED)


def test_seats_are_kept_for_samples_that_are_still_to_fork():
    core = make_core(num_blocks=60, max_num_seqs=4, max_num_batched_tokens=4)
    core.add_request([1] * 8, SamplingParams(n=3, max_tokens=3, seed=1))
    core.add_request([2], greedy(6))
    core.add_request([3], greedy(6))
    core.step()
    core.step()
    core.step()
    assert len(core.scheduler.running) == 4
    assert why(core, 3) == "it needs 1 seat and 0 of max_num_seqs are free"
    run(core)


def test_a_spent_budget_is_a_reason():
    core = make_core(max_num_batched_tokens=4)
    core.add_request([1] * 9, greedy(1))
    core.add_request([2] * 3, greedy(1))
    assert why(core, 2) == "request 1 is ahead of it"
    core.step()
    assert why(core, 2) == "it needs 3 tokens and the budget of the step is spent"


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("options", [{"max_num_seqs": 1}, {"max_num_batched_tokens": 1}])
def test_the_cache_is_asked_only_when_a_seat_and_a_token_are_there(policy, options, monkeypatch):
    core, asked = make_core(scheduling_policy=policy, **options), []
    find_prefix = core.tables.find_prefix
    monkeypatch.setattr(core.tables, "find_prefix", lambda seq: asked.append(seq.request.id) or find_prefix(seq))
    core.add_request([1], greedy(5))
    core.add_request([2] * 3, greedy(1))
    for _ in range(5):
        assert core.get(2).status == "waiting"
        core.step()
    assert asked == [1] and core.get(1).finished
    run(core)
    assert asked == [1, 2]


def test_a_hit_on_a_free_block_counts_as_a_block_that_is_used_up():
    core = make_core(num_blocks=8)
    core.add_request([1] * 9, greedy(1))
    run(core)  # 2 cached blocks in the free queue
    core.add_request([2] * 16, greedy(9))
    core.step()  # 4 of 7 blocks
    core.add_request([1] * 13, greedy(1))  # 2 hits + 2 new = 4, and 3 are free
    core.step()
    assert core.get(3).status == "waiting"


def test_the_queue_position_of_a_preempted_one_is_its_age():
    core = make_core(num_blocks=60)
    for i in range(1, 5):
        core.add_request([i] * 4, greedy(9))
    core.step()
    for i in (2, 4, 3):
        core.preempt(i)
    core.add_request([9], greedy(1))
    assert [s.request.id for s in core.scheduler.waiting] == [2, 3, 4, 5]
    core.step()
    assert [s.request.id for s in core.scheduler.running] == [1, 2, 3, 4]
    core.preempt(1)
    core.step()
    assert [s.request.id for s in core.scheduler.running] == [1, 2, 3, 4], "and so is its place when it runs again"


# --- the door ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "params", "cause", "sentence"),
    [
        ([], greedy(1), Cause.INVALID, "prompt_token_ids is empty: at least 1 token is needed"),
        ([1, 97], greedy(1), Cause.INVALID, "prompt_token_ids holds 97: the model's token ids go from 0 to 96"),
        ([-1], greedy(1), Cause.INVALID, "prompt_token_ids holds -1: the model's token ids go from 0 to 96"),
        ([1], greedy(1, stop_token_ids=[97]), Cause.INVALID, "stop_token_ids holds 97: the model's token ids"),
        ([1], SamplingParams(n=9), Cause.INVALID, "n=9: all samples run together, and max_num_seqs allows 8"),
        ([1] * 17, greedy(1), Cause.POOL_TOO_SMALL, "a prompt of 17 tokens and max_tokens=1 need 5 blocks of 4 tokens, the pool has 4"),
        ([1] * 8, greedy(10), Cause.POOL_TOO_SMALL, "a prompt of 8 tokens and max_tokens=10 need 5 blocks of 4 tokens, the pool has 4"),
        ([1] * 17, greedy(None), Cause.POOL_TOO_SMALL, "a prompt of 17 tokens and one more to generate need 5 blocks"),
        ([1] * 30, greedy(1), Cause.CONTEXT_TOO_LONG, "a prompt of 30 tokens and max_tokens=1 need 31 tokens, max_model_len is 30"),
        ([1] * 8, greedy(None, min_tokens=10), Cause.CONTEXT_TOO_LONG, "min_tokens=10: the prompt of 8 tokens leaves room for 9"),
    ],
)  # fmt: skip
def test_what_can_never_be_served_is_refused_alone_with_both_numbers(prompt, params, cause, sentence):
    core = make_core(num_blocks=5, max_model_len=30, max_num_seqs=8)
    core.add_request([1, 2], greedy(3))
    with pytest.raises(RequestRefused) as refusal:
        core.add_request(prompt, params)
    assert sentence in str(refusal.value) and isinstance(refusal.value, ValueError)
    event = events(core, EventKind.REFUSED)[0]
    assert (event.request_id, event.cause, event.text) == (2, cause, str(refusal.value))
    assert core.add_request([1, 2], greedy(3)) == 3, "a refused id is spent"
    run(core)
    outputs_are_right(core, {1: ([1, 2], greedy(3)), 3: ([1, 2], greedy(3))})


def test_the_last_token_needs_no_slot():
    core = make_core(num_blocks=5)
    core.add_request([1] * 8, greedy(9))  # 16 of 16 slots, and a token that is never written
    run(core)
    assert core.get(1).children[0].output_token_ids == reference([1] * 8, greedy(9))


@pytest.mark.parametrize(("max_model_len", "room"), [(1000, 12), (10, 5)])
def test_no_max_tokens_means_the_room_that_is_left(max_model_len, room):
    core = make_core(num_blocks=5, max_model_len=max_model_len)
    core.add_request([1] * 5, greedy(None))
    run(core)
    assert core.get(1).children[0].num_output_tokens == room
    assert events(core, EventKind.FINISHED)[0].numbers["limit"] == room


def test_a_full_queue_refuses_at_once_with_a_hint_when_to_come_back():
    core = make_core(max_waiting_requests=3, max_num_seqs=1)
    for i in range(3):
        core.add_request([i], greedy(2))
    with pytest.raises(
        RequestRefused, match="3 requests are waiting, max_waiting_requests is 3: try again in 1 s"
    ) as full:
        core.add_request([9], greedy(2))
    assert full.value.cause is Cause.QUEUE_FULL and full.value.retry_after == 1.0
    core.step()
    core.add_request([9], greedy(2))
    run(core)


def test_the_queue_is_bounded_by_prompt_tokens_too():
    core = make_core(max_waiting_tokens=20)
    core.add_request([1] * 15, greedy(1))
    with pytest.raises(
        RequestRefused, match="15 prompt tokens are waiting and this request adds 6, max_waiting_tokens is 20"
    ):
        core.add_request([1] * 6, greedy(1))
    core.add_request([1] * 5, greedy(1))
    core.cancel(1)
    core.add_request([1] * 15, greedy(1))
    core.check_integrity()
