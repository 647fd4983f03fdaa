"""Scheduling policies: who goes first, who waits and why, who loses its blocks, told as short stories."""

import time

import pytest
from fake_model import greedy, make_core, reference, run
from kvscope.engine import EngineConfig, EventKind, RequestRefused, SamplingParams
from kvscope.engine.config import _CHOICES
from kvscope.engine.events import Cause

POLICIES = _CHOICES["scheduling_policy"]


def events(core, *kinds):
    return [e for e in core.events.since(0)[0] if e.kind in kinds]


def admitted(core):
    return [e.request_id for e in events(core, EventKind.ADMITTED)]


def why(core, request_id):
    return core.scheduler.reasons.words(core.get(request_id).children[0])


def as_alone(core, *ids):
    for i in ids:
        request = core.get(i)
        for child in request.children:
            expected = reference(request.prompt_token_ids, request.params, request_id=i, child=child.child)
            assert child.output_token_ids == expected, i


# --- priority ---------------------------------------------------------------------------------------------------------


def test_the_lowest_priority_number_goes_first_and_equal_ones_by_arrival():
    core = make_core(scheduling_policy="priority", max_num_seqs=1, num_blocks=40)
    for priority in (5, 1, 3, 1):
        core.add_request([priority] * 3, greedy(3), priority=priority)
    run(core)
    assert admitted(core) == [2, 4, 3, 1]
    as_alone(core, 1, 2, 3, 4)


def test_a_better_priority_takes_the_seat_of_the_worst_that_runs():
    core = make_core(scheduling_policy="priority", max_num_seqs=2, num_blocks=40)
    for priority in (5, 7):
        core.add_request([priority] * 3, greedy(9), priority=priority)
    core.step()
    core.add_request([1] * 3, greedy(4), priority=1)
    core.step()
    (preempted,) = events(core, EventKind.PREEMPTED)
    assert (preempted.request_id, preempted.cause, preempted.numbers["needed_by"]) == (2, Cause.PRIORITY, 3)
    assert core.get(3).status == "running" and why(core, 2) == "it needs 1 seat and 0 of max_num_seqs are free"
    run(core)
    as_alone(core, 1, 2, 3)


def test_a_better_priority_takes_as_many_blocks_as_it_needs_and_no_more():
    core = make_core(scheduling_policy="priority", num_blocks=10, enable_prefix_caching=False)  # 9 blocks of 4
    for priority in (5, 6, 7):
        core.add_request([priority] * 11, greedy(2), priority=priority)  # 3 blocks each
    core.step()
    core.add_request([1] * 10, greedy(2), priority=1)
    core.step()
    assert [e.request_id for e in events(core, EventKind.PREEMPTED)] == [3]
    run(core)
    as_alone(core, 1, 2, 3, 4)


def test_an_equal_priority_takes_nothing():
    core = make_core(scheduling_policy="priority", max_num_seqs=1, num_blocks=40)
    core.add_request([1] * 3, greedy(5), priority=1)
    core.step()
    core.add_request([2] * 3, greedy(5), priority=1)
    run(core)
    assert not events(core, EventKind.PREEMPTED)


def test_nobody_is_robbed_in_vain():
    core = make_core(scheduling_policy="priority", num_blocks=9, enable_prefix_caching=False)  # 8 blocks
    core.add_request([1] * 15, greedy(6), priority=0)
    core.add_request([2] * 9, greedy(4), priority=9)
    core.step()
    core.add_request([3] * 18, greedy(2), priority=5)  # 5 blocks: 1 free and the 3 of request 2 are not enough
    core.step()
    assert core.get(2).status == "running" and not events(core, EventKind.PREEMPTED)
    run(core)
    as_alone(core, 1, 2, 3)


# --- by length, by cache ----------------------------------------------------------------------------------------------


def test_the_shortest_prompt_goes_first():
    core = make_core(scheduling_policy="sjf", max_num_seqs=1, num_blocks=40)
    for length in (9, 3, 6):
        core.add_request([length] * length, greedy(2))
    run(core)
    assert admitted(core) == [2, 3, 1]


@pytest.mark.parametrize("cache", ["hash", "radix"])
def test_the_longest_cached_prefix_goes_first(cache):
    core = make_core(scheduling_policy="lpm", max_num_seqs=1, num_blocks=60, prefix_cache=cache)
    core.add_request(list(range(20)), greedy(1))
    run(core)
    core.add_request([90] * 20, greedy(2))
    core.add_request([*range(8), 80, 81], greedy(2))
    core.add_request([*range(16), 82], greedy(2))
    run(core)
    assert admitted(core) == [1, 4, 3, 2]
    as_alone(core, 2, 3, 4)


@pytest.mark.parametrize("policy", ["lpm", "dfs-weight"])
def test_of_those_that_start_alike_one_goes_first_and_warms_the_cache(policy):
    core = make_core(
        scheduling_policy=policy, num_blocks=99, max_num_batched_tokens=30, long_prefill_token_threshold=20
    )
    shared = [i % 7 + i % 11 for i in range(100)]
    for tail in (90, 91):
        core.add_request([*shared, tail], greedy(2))
    core.add_request([7, 8, 9], greedy(20))
    core.step()
    assert admitted(core) == [1, 3], "there is room, but 2 waits while 1 computes what both begin with"
    assert why(core, 2) == "request 1 is about to compute 32 tokens that both begin with"
    run(core)
    assert core.get(2).num_cached_tokens == 80, "less than 32 tokens were left to share: not worth waiting for"
    as_alone(core, 1, 2, 3)


def test_the_fuller_branch_of_the_tree_is_walked_first():
    core = make_core(scheduling_policy="dfs-weight", num_blocks=99)
    for start in (1, 2):
        core.add_request([start] * 9, greedy(1))
        run(core)
    for tokens in ([1] * 8 + [50], [2] * 8 + [51], [3] * 9, [2] * 8 + [52]):
        core.add_request(tokens, greedy(1))
    run(core)
    assert admitted(core)[2:] == [4, 6, 3, 5], "two wait under 2, one under 1, one finds nothing"


def test_a_long_line_is_served_in_order_of_arrival():
    core = make_core(scheduling_policy="lpm", max_num_seqs=1, num_blocks=99)
    core.add_request(list(range(20)), greedy(1))
    run(core)
    for _ in range(130):
        core.add_request([90, 91], greedy(1))
    core.add_request([*range(16), 82], greedy(1))
    for _ in range(4):
        core.step()
    assert admitted(core)[1:3] == [2, 3] and 132 in admitted(core)[3:6], "129 and more: by arrival; 128: by the cache"
    run(core)
    core.check_integrity()


def test_policies_that_go_by_the_cache_need_one():
    with pytest.raises(ValueError, match=r"scheduling_policy='lpm'.*enable_prefix_caching=True"):
        EngineConfig(scheduling_policy="lpm", enable_prefix_caching=False)


# --- steps of their own -----------------------------------------------------------------------------------------------


def test_prefill_first_never_mixes_prompts_with_single_tokens():
    core = make_core(scheduling_policy="prefill-first", num_blocks=60, max_num_batched_tokens=8)
    core.add_request([1] * 5, greedy(6))
    core.step()
    core.step()
    core.add_request([2] * 12, greedy(4))
    run(core)
    steps = [(e.numbers["prefill_tokens"], e.numbers["decode_tokens"]) for e in events(core, EventKind.STEP)]
    assert steps[:6] == [(5, 0), (0, 1), (8, 0), (4, 0), (0, 2), (0, 2)], "request 1 stands still while 2 is computed"
    as_alone(core, 1, 2)


def test_nobody_joins_a_static_batch_before_all_have_ended():
    core = make_core(scheduling_policy="static", max_num_seqs=2, num_blocks=60)
    for new in (2, 6, 3, 3):
        core.add_request([new] * 3, greedy(new))
    core.step()
    core.step()
    assert (
        core.get(1).status == "finished" and why(core, 3) == "nobody joins a static batch before all of it have ended"
    )
    run(core)
    entered = {e.request_id: e.step for e in events(core, EventKind.ADMITTED)}
    assert entered == {1: 1, 2: 1, 3: 7, 4: 7}
    as_alone(core, 1, 2, 3, 4)


def rows_of_calls(core):
    """What the model is given from now on: for each call the tokens of its rows, and the logits that are asked for."""
    calls, forward = [], core.runner.model.forward

    def look(batch, storage):
        calls.append((batch.query_start_loc.diff().tolist(), len(batch.logits_indices)))
        return forward(batch, storage)

    core.runner.model.forward = look
    return calls


@pytest.mark.parametrize("windows", [(0,), (0, 5)])
def test_a_static_batch_computes_rectangles(windows):
    core = make_core(scheduling_policy="static", max_num_seqs=3, num_blocks=60, windows=windows)
    calls = rows_of_calls(core)
    for length, new in ((3, 2), (7, 5), (4, 1)):
        core.add_request([length] * length, greedy(new))
    run(core)
    padding = [e.numbers["padding_tokens"] for e in events(core, EventKind.STEP)]
    assert padding == [3 * 7 - 14, 1, 2, 2, 2], "prompts filled up to 7; then those that have ended go on"
    assert core.metrics()["kvscope:padding_tokens_total"] == 14
    assert calls == [([3, 7, 4, 4, 3], 3), *[([1, 1, 1], 3)] * 4]
    assert [core.get(i).children[0].output_token_ids for i in (1, 2, 3)] == [
        reference([length] * length, greedy(new), windows=windows) for length, new in ((3, 2), (7, 5), (4, 1))
    ]


def test_padding_beyond_the_budget_is_computed_in_calls_within_it():
    core = make_core(scheduling_policy="static", max_num_seqs=4, num_blocks=60, max_num_batched_tokens=16)
    calls = rows_of_calls(core)
    for length in (1, 2, 12, 1):
        core.add_request([length] * length, greedy(2))
    run(core)
    assert calls == [([11, 5], 0), ([5, 11], 0), ([1, 2, 12, 1], 4), ([1] * 4, 4)]
    as_alone(core, 1, 2, 3, 4)


def test_a_static_batch_may_need_several_steps_to_fill():
    core = make_core(scheduling_policy="static", max_num_seqs=3, num_blocks=60, max_num_batched_tokens=4)
    for i in range(4):
        core.add_request([i] * 5, greedy(3))
    run(core)
    steps = [(e.numbers["prefill_tokens"], e.numbers["decode_tokens"]) for e in events(core, EventKind.STEP)]
    assert steps[:6] == [(4, 0), (4, 0), (4, 0), (3, 0), (0, 3), (0, 3)]
    as_alone(core, 1, 2, 3, 4)


# --- passing, bounds --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("max_skips", "order"), [(0, [1, 2, 3, 4, 5]), (1, [1, 3, 2, 4, 5]), (9, [1, 3, 4, 5, 2])])
def test_a_head_that_does_not_fit_is_passed_so_often_and_not_more(max_skips, order):
    core = make_core(num_blocks=9, max_skips=max_skips, enable_prefix_caching=False)  # 8 blocks
    core.add_request([1] * 15, greedy(9))
    core.step()
    core.add_request([2] * 21, greedy(2))  # 6 blocks: not while request 1 runs
    for i in (3, 4, 5):
        core.add_request([i] * 3, greedy(1))
    core.step()
    if max_skips:
        assert core.get(2).children[0].num_times_passed == min(max_skips, 3)
    run(core)
    assert admitted(core) == order
    as_alone(core, 1, 2, 3, 4, 5)


def test_a_long_prompt_takes_no_more_than_its_share_of_a_step():
    core = make_core(num_blocks=60, max_num_batched_tokens=20, long_prefill_token_threshold=6)
    core.add_request([1] * 15, greedy(2))
    core.add_request([2] * 4, greedy(2))
    output = core.step()
    assert output.scheduled == {1: 6, 2: 4}
    run(core)
    as_alone(core, 1, 2)


@pytest.mark.parametrize(("choice", "victim"), [("youngest", 4), ("most-blocks", 2), ("least-progress", 3)])
def test_who_loses_its_blocks_is_a_choice_among_the_younger(choice, victim):
    core = make_core(num_blocks=9, preemption_victim=choice, enable_prefix_caching=False)
    for length in (8, 9, 2, 5):  # 2, 3, 1 and 2 blocks are all that there are, and the first needs a third
        core.add_request([length] * length, greedy(12))
    core.step()
    core.step()
    assert events(core, EventKind.PREEMPTED)[0].request_id == victim
    run(core)
    as_alone(core, 1, 2, 3, 4)


def test_whoever_lost_its_blocks_so_often_is_spared_while_there_is_another():
    counts = {}
    for bound in (0, 1):
        core = make_core(num_blocks=13, max_preemptions=bound, enable_prefix_caching=False)
        for i in range(4):
            core.add_request([i] * 7, greedy(30))
        run(core)
        as_alone(core, 1, 2, 3, 4)
        counts[bound] = max(core.get(i).children[0].num_preemptions for i in (1, 2, 3, 4))
    assert counts[1] <= counts[0]


def test_three_that_each_need_more_than_half_of_the_pool_all_finish():
    for policy in POLICIES:
        core = make_core(num_blocks=9, scheduling_policy=policy)
        for i in range(3):
            core.add_request([i] * 5, greedy(20))
        run(core, max_steps=300)
        assert [core.get(i).error for i in (1, 2, 3)] == [None] * 3, policy
        as_alone(core, 1, 2, 3)


# --- deadlines --------------------------------------------------------------------------------------------------------


def test_a_request_that_is_not_over_by_its_deadline_ends_and_keeps_its_text():
    core = make_core(num_blocks=60, max_num_seqs=1)
    core.add_request([1] * 3, greedy(50), deadline=100.0)
    core.add_request([2] * 3, greedy(50), deadline=100.0)
    core.add_request([3] * 3, greedy(4))
    core.step()
    core.step()
    core._deadlines = [(0.0, request_id) for _, request_id in core._deadlines]  # their time has come
    output = core.step()
    assert set(output.finished) == {1, 2} and output.scheduled == {3: 3}
    assert [core.get(i).status for i in (1, 2)] == ["cancelled", "cancelled"]
    assert core.get(1).children[0].num_output_tokens == 2
    assert {e.cause for e in events(core, EventKind.CANCELLED)} == {Cause.DEADLINE}
    run(core)
    as_alone(core, 3)


def test_when_all_are_overdue_the_step_computes_nothing():
    core = make_core()
    core.add_request([1] * 3, greedy(50), deadline=1e-9)
    output = core.step()
    assert output.finished == [1] and not output.scheduled and not core.has_work
    core.check_integrity()


@pytest.mark.parametrize("deadline", [0, -1.5, float("nan"), float("inf"), "soon", True])
def test_a_deadline_that_is_no_time_to_come_is_refused(deadline):
    with pytest.raises(RequestRefused, match=r"deadline=.*: must be more than 0 seconds"):
        make_core().add_request([1], greedy(1), deadline=deadline)


def test_a_deadline_that_has_passed_when_the_request_comes_is_refused():
    with pytest.raises(RequestRefused, match=r"deadline=5: [789]\.?\d* seconds have passed since") as refusal:
        make_core().add_request([1], greedy(1), deadline=5, arrival=time.monotonic() - 7)
    assert refusal.value.cause is Cause.DEADLINE


def test_deadlines_of_requests_that_are_over_are_forgotten():
    core = make_core(num_blocks=40)
    for i in range(200):
        core.add_request([i % 97], greedy(1), deadline=1e6)
        core.step()
    assert len(core._deadlines) <= 2


def test_a_priority_that_nothing_looks_at_is_refused():
    with pytest.raises(
        RequestRefused, match=r"priority=3: nothing looks at it; the engine needs scheduling_policy='priority'"
    ):
        make_core().add_request([1], greedy(1), priority=3)
    for option in ({"eviction_policy": "priority"}, {"preemption_victim": "lowest-priority"}):
        make_core(**option).add_request([1], greedy(1), priority=3)


@pytest.mark.parametrize("priority", ["high", 1.5, None, True])
def test_a_priority_that_is_no_integer_is_refused(priority):
    core = make_core(scheduling_policy="priority")
    with pytest.raises(RequestRefused, match=r"priority=.*: must be an integer, and the lowest goes first"):
        core.add_request([1], greedy(1), priority=priority)
    core.check_integrity()


# --- every policy -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("n", [1, 3])
def test_no_policy_changes_a_text(policy, n):
    core = make_core(num_blocks=24, scheduling_policy=policy, max_num_seqs=6, max_num_batched_tokens=11, max_skips=2)
    params = SamplingParams(n=n, temperature=1.0, max_tokens=9)
    prompts = [[1, 2, 3] * 3 + [i] * (i % 5) for i in range(9)]
    for i, prompt in enumerate(prompts):
        core.add_request(prompt, params, priority=i % 3 if policy == "priority" else 0)
        core.step()
        core.check_integrity()
    run(core)
    as_alone(core, *range(1, 10))
