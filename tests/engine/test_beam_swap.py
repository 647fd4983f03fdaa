"""Beams in host memory: they go out together, each block once, and share again when they are back."""

import pytest
from fake_model import greedy, make_core, reference, run
from kvscope.engine import EventKind
from kvscope.workbench.sentences import sentence
from schedules import EOS
from searching import PROMPT, alone, assert_same, found, search


def swapping(num_cpu_blocks=64, **options):
    return make_core(**{"num_blocks": 200, "preemption_mode": "swap", "num_cpu_blocks": num_cpu_blocks} | options)


def events(core, *kinds):
    return [event for event in core.events.since(0)[0] if event.kind in kinds]


def shape(tables):
    """Which places of the tables hold the same block: the tables, with each block's first place for its name."""
    names = {}
    return [[names.setdefault(block, (i, j)) for j, block in enumerate(table)] for i, table in enumerate(tables)]


def tables_of(core, request_id=1, group=0):
    return [child.block_tables[group].tolist() for child in core.get(request_id).children]


def test_beams_go_out_together_each_block_once_and_share_again_when_they_are_back():
    core, undisturbed = swapping(), swapping()
    for one in (core, undisturbed):
        one.add_request(PROMPT, search(4))
    for _ in range(6):
        core.step()
    before, children = tables_of(core), list(core.get(1).children)
    distinct = {block for table in before for block in table}
    assert len(distinct) < sum(map(len, before)), "they share"
    assert core.preempt(1) and core.tables.pool.num_used == 0 and core.get(1).children == children
    core.check_integrity()
    assert [child.status for child in children] == ["preempted"] * 4
    assert core.metrics()["kvscope:num_cpu_blocks_used"] == len(distinct)
    assert core.metrics()["vllm:num_requests_swapped"] == 1
    core.step()
    core.check_integrity()
    (out,), (back,) = events(core, EventKind.SWAPPED_OUT), events(core, EventKind.SWAPPED_IN)
    assert out.numbers["blocks"] == back.numbers["blocks"] == len(distinct)
    assert sentence(out).headline.endswith("because 4 beams of request 1 lost their place.")
    run(core)
    run(undisturbed)
    assert found(core, 1) == found(undisturbed, 1)
    computed = [one.metrics()["kvscope:computed_tokens_total"] for one in (core, undisturbed)]
    assert computed[0] == computed[1], "each token once"


def test_sharing_is_as_it_was():
    core = swapping(enable_prefix_caching=False, max_num_batched_tokens=4)
    core.add_request([1], search(4, max_tokens=30))
    for _ in range(20):
        core.step()
        before = [table[:5] for table in tables_of(core)]
        if len(before[0]) == 5:
            break
    core.preempt(1)
    swap, seq = core.scheduler.swap, core.get(1).children[0]
    assert shape([swap.slots(child)[0].tolist() for child in core.get(1).children]) == shape(before)
    core.scheduler.bring_back(seq)
    assert shape(tables_of(core)) == shape(before)


@pytest.mark.parametrize("windows", [(0,), (0, 5), (3,)])
@pytest.mark.parametrize("block_size", [1, 3, 4])
@pytest.mark.parametrize("after", [1, 2, 3, 4, 7, 12])
def test_a_search_finds_the_same_whenever_it_goes_out(after, block_size, windows):
    """Also in the middle of its prompt, which a budget of 5 computes in pieces, and as soon as it is back."""
    core = swapping(block_size=block_size, windows=windows, max_num_batched_tokens=5)
    core.add_request(PROMPT, search(4))
    core.add_request(PROMPT[:3], greedy(9))
    for _ in range(3):
        for _ in range(after):
            if core.has_work:
                core.step()
                core.check_integrity()
        core.preempt(1)
        core.check_integrity()
    run(core)
    assert_same(found(core, 1), alone(PROMPT, search(4), windows=windows))
    assert core.get(2).children[0].output_token_ids == reference(PROMPT[:3], greedy(9), windows=windows)
    assert not any(event.numbers["recompute_tokens"] for event in events(core, EventKind.PREEMPTED))


@pytest.mark.parametrize("block_size", [1, 3, 4])
@pytest.mark.parametrize("windows", [(0,), (0, 5), (3,)])
def test_beams_come_back_into_the_smallest_pool_that_takes_them(windows, block_size):
    params = search(3, max_tokens=9)
    needed = swapping(windows=windows, block_size=block_size).tables.blocks_for_beams(10, 18, 3)
    core = swapping(windows=windows, block_size=block_size, num_blocks=1 + needed, enable_prefix_caching=False)
    core.add_request(PROMPT, params)
    while core.has_work:
        core.step()
        core.preempt(1)
        core.check_integrity()
    assert_same(found(core, 1), alone(PROMPT, params, windows=windows))


def test_searches_that_take_each_others_blocks_lose_no_computation():
    core = swapping(num_blocks=16, enable_prefix_caching=False)
    for _ in range(3):
        core.add_request(PROMPT, search(3, max_tokens=9))
    run(core)
    for request_id in (1, 2, 3):
        assert_same(found(core, request_id), alone(PROMPT, search(3, max_tokens=9)))
    gone = events(core, EventKind.SWAPPED_OUT)
    assert any(event.numbers["samples"] == 3 for event in gone)
    by_step = {(e.step, e.request_id): e.numbers["samples"] for e in gone}
    for event in events(core, EventKind.PREEMPTED):
        assert (event.step, event.request_id) in by_step and event.numbers["recompute_tokens"] == 0


def test_beams_wait_until_the_budget_of_a_step_holds_a_token_for_each():
    core = swapping(max_num_batched_tokens=4)
    core.add_request(PROMPT, search(4))
    core.add_request([1, 2], greedy(6))
    while not core.get(1).has_forked:
        core.step()
    core.preempt(1)
    core.step()
    assert core.get(2).status == "running" and core.get(1).status == "preempted"
    assert core.get(1).children[0].blocked.cause == "token_budget"
    run(core)
    assert_same(found(core, 1), alone(PROMPT, search(4)))


# --- falling back


def test_a_host_pool_that_is_too_small_means_recomputation():
    core = swapping(num_cpu_blocks=3)
    core.add_request(PROMPT, search(4))
    for _ in range(5):
        core.step()
    core.preempt(1)
    core.check_integrity()
    assert not events(core, EventKind.SWAPPED_OUT) and len(core.get(1).children) == 1
    run(core)
    assert_same(found(core, 1), alone(PROMPT, search(4)))


def test_a_fault_in_the_step_that_moves_beams_costs_a_recomputation_and_no_text():
    core = swapping(max_num_batched_tokens=5)
    for prompt, params in (([2], greedy(20)), (PROMPT, search(4)), ([3, 3], greedy(20))):
        core.add_request(prompt, params)
    while not core.get(2).has_forked:
        core.step()
    core.runner.model.fault = RuntimeError("the model broke")
    core.preempt(2)
    core.step()  # 1 and 3 leave no budget for four beams, which are on their way out
    assert [core.get(i).status for i in (1, 2, 3)] == ["failed", "preempted", "failed"]
    core.check_integrity()
    assert core.metrics()["kvscope:num_cpu_blocks_used"] == 0 and len(core.get(2).children) == 1
    run(core)
    assert_same(found(core, 2), alone(PROMPT, search(4)))


def test_a_fault_in_the_step_that_brings_beams_back_fails_them():
    core = swapping()
    core.add_request(PROMPT, search(4))
    for _ in range(4):
        core.step()
    core.preempt(1)
    core.runner.model.fault = RuntimeError("the model broke")
    core.step()
    core.check_integrity()
    assert core.get(1).status == "failed" and core.tables.pool.num_used == 0


def test_a_cancel_returns_the_host_blocks_of_all_beams():
    core = swapping(eos_token_ids=[EOS])
    core.add_request(PROMPT, search(4))
    for _ in range(4):
        core.step()
    core.preempt(1)
    assert core.cancel(1)
    core.check_integrity()
    assert core.metrics()["kvscope:num_cpu_blocks_used"] == 0 == core.tables.pool.num_used
