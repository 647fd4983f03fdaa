"""Swapping: the KV of preempted samples waits in host memory, told as short stories with exact blocks."""

import numpy as np
import pytest
import torch
from fake_model import REFERENCE, greedy, make_core, read_back, reference, run
from kvscope.engine import EngineConfig, EventKind, SamplingParams
from kvscope.engine.events import Cause
from kvscope.engine.kvcache.storage import KVStorage
from kvscope.engine.models.base import KVGroup


def swapping(num_cpu_blocks=32, **options):
    return make_core(preemption_mode="swap", num_cpu_blocks=num_cpu_blocks, **options)


def events(core, *kinds):
    return [e for e in core.events.since(0)[0] if e.kind in kinds]


def as_alone(core, *ids):
    for i in ids:
        request = core.get(i)
        for child in request.children:
            expected = reference(request.prompt_token_ids, request.params, request_id=i, child=child.child)
            assert child.output_token_ids == expected, (i, child.child)


# --- one sequence -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("generated", [0, 1, 3, 4, 5])
@pytest.mark.parametrize("caching", [False, True])
def test_what_was_swapped_out_is_not_computed_again(generated, caching):
    core = swapping(max_num_batched_tokens=3, enable_prefix_caching=caching)
    prompt = [1, 2, 3, 4, 5, 6]
    core.add_request(prompt, greedy(8))
    while core.get(1).children[0].num_output_tokens < generated or not core.scheduler.running:
        core.step()
    computed = core.get(1).children[0].num_computed_tokens
    assert core.preempt(1) and core.get(1).status == "preempted"
    core.check_integrity()
    assert core.metrics()["kvscope:num_cpu_blocks_used"] == -(-computed // 4)
    run(core)
    as_alone(core, 1)
    (resumed,) = events(core, EventKind.RESUMED)
    assert resumed.numbers["swapped_tokens"] == computed and resumed.numbers["recompute_tokens"] == 6 - min(6, computed)
    assert core.metrics()["kvscope:computed_tokens_total"] == 6 + 7, "each token once"
    assert core.metrics()["kvscope:num_cpu_blocks_used"] == 0


def test_a_block_for_the_next_token_of_one_that_came_back_is_taken_to_decode():
    core = swapping()
    core.add_request([1, 2, 3], greedy(8))
    core.step()
    core.step()  # 4 tokens computed: the next one needs a block
    core.preempt(1)
    core.step()
    causes = [e.cause for e in events(core, EventKind.ALLOCATED)]
    assert causes == [Cause.PROMPT, Cause.SWAPPED_IN, Cause.DECODE]


def test_the_moves_are_told_with_blocks_and_bytes():
    core = swapping(num_blocks=6, enable_prefix_caching=False)
    core.add_request([1] * 8, greedy(9))
    core.add_request([2] * 8, greedy(5))
    core.step()
    core.step()  # 1 takes the last block, 2 finds none
    (preempted,), (out,) = events(core, EventKind.PREEMPTED), events(core, EventKind.SWAPPED_OUT)
    size = core.runner.storage.block_bytes
    assert preempted.numbers == {"released_blocks": 2, "recompute_tokens": 0, "needed_by": 2, "needed_by_child": 0,
                                 "swapped_tokens": 8}  # fmt: skip
    assert (out.request_id, out.cause) == (2, Cause.NO_FREE_BLOCK)
    assert out.numbers == {"blocks": 2, "bytes": 2 * size, "samples": 1, "used_host_blocks": 2}
    metrics = core.metrics()
    assert metrics["vllm:num_requests_swapped"] == 1 and metrics["vllm:cpu_cache_usage_perc"] == 2 / 32
    run(core)
    (back,) = events(core, EventKind.SWAPPED_IN)
    assert back.numbers == {"blocks": 2, "bytes": 2 * size, "samples": 1, "used_host_blocks": 0}
    as_alone(core, 1, 2)


def test_a_block_that_went_out_may_be_written_by_another_in_the_same_step():
    core = swapping(num_blocks=5, enable_prefix_caching=False)
    core.add_request([1] * 8, greedy(9))
    core.add_request([2] * 7, greedy(9))
    core.step()
    lost = core.get(2).children[0].block_tables[0].tolist()
    assert core.step().preempted == [2]
    taken = set(core.get(1).children[0].block_tables[0]) & set(lost)
    assert taken, "request 1 wrote into a block that request 2 had when the step began"
    run(core)
    as_alone(core, 1, 2)


def test_host_blocks_that_are_read_in_a_step_are_not_written_in_it():
    core = swapping(num_cpu_blocks=3, num_blocks=40, scheduling_policy="priority", max_num_seqs=1)
    core.add_request([1] * 9, greedy(6), priority=5)
    core.step()
    core.preempt(1)  # 3 host blocks, all there are
    swap = core.scheduler.swap
    members = swap.swap_in(core.get(1).children[0])
    assert members == [core.get(1).children[0]] and swap.num_used == 3, "until the moves are made"
    out, back = swap.take_moves()
    assert len(out) == len(back) == 3 and swap.num_used == 0


def test_what_fell_out_of_a_window_has_no_host_block_and_stays_the_null_block():
    core = swapping(num_blocks=20, windows=(0, 5), enable_prefix_caching=False)
    core.add_request([1, 2] * 7, greedy(8))
    core.step()
    core.step()  # 15 tokens are computed; the next, token 15, sees tokens 11 to 15
    (seq,) = core.get(1).children
    assert [[block > 0 for block in table] for table in seq.block_tables] == [[True] * 4, [False, False, True, True]]
    core.preempt(1)
    core.check_integrity()
    assert events(core, EventKind.SWAPPED_OUT)[0].numbers["blocks"] == core.scheduler.swap.num_used == 4 + 2
    core.step()  # back, and one token further: it sees tokens 12 to 16
    assert [[block > 0 for block in table] for table in seq.block_tables] == [[True] * 4, [False] * 3 + [True]]
    run(core)
    assert seq.output_token_ids == reference([1, 2] * 7, core.get(1).params, request_id=1, windows=(0, 5))


# --- falling back -----------------------------------------------------------------------------------------------------


def test_a_host_pool_of_one_block_and_a_victim_of_three_means_recomputation():
    core = swapping(num_cpu_blocks=1, enable_prefix_caching=False)
    core.add_request([1] * 9, greedy(6))
    core.step()
    assert core.preempt(1) and not events(core, EventKind.SWAPPED_OUT)
    run(core)
    as_alone(core, 1)
    assert events(core, EventKind.RESUMED)[0].numbers["recompute_tokens"] == 10
    assert core.metrics()["kvscope:computed_tokens_total"] == 9 + 10 + 4


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("n", [1, 3])
def test_three_that_each_need_more_than_half_of_the_pool_all_finish(mode, n):
    core = make_core(num_blocks=8, preemption_mode=mode, num_cpu_blocks=20 if mode == "swap" else 0)
    for i in (1, 2, 3):
        core.add_request([i] * 5, SamplingParams(n=n, temperature=0.0 if n == 1 else 1.0, max_tokens=20))
    run(core, max_steps=1000)
    assert [core.get(i).error for i in (1, 2, 3)] == [None] * 3, "an exhausted pool is no exception"
    as_alone(core, 1, 2, 3)


# --- samples that share -----------------------------------------------------------------------------------------------


def test_samples_go_out_together_each_block_once_and_share_again_when_they_are_back():
    core = swapping(num_blocks=20, num_cpu_blocks=10, enable_prefix_caching=False)
    core.add_request([1] * 9, SamplingParams(n=3, max_tokens=8))
    for _ in range(3):
        core.step()
    children = core.get(1).children
    shared = [child.block_tables[0][:2].tolist() for child in children]
    assert shared[0] == shared[1] == shared[2] and len({child.block_tables[0][2] for child in children}) == 3
    core.preempt(1)
    (out,) = events(core, EventKind.SWAPPED_OUT)
    assert out.numbers["blocks"] == 2 + 3 and out.numbers["samples"] == 3
    assert core.tables.pool.num_used == 0 and [child.status for child in children] == ["preempted"] * 3
    core.step()
    (back,) = events(core, EventKind.SWAPPED_IN)
    assert back.numbers["blocks"] == 5 and core.tables.pool.num_used == 5
    tables = [child.block_tables[0].tolist() for child in children]
    assert tables[0][:2] == tables[1][:2] == tables[2][:2] and core.tables.pool.ref_count[tables[0][0]] == 3
    run(core)
    as_alone(core, 1)


def test_a_victim_takes_its_siblings_along_and_they_come_back_in_one_step():
    core = swapping(num_blocks=10, num_cpu_blocks=20, enable_prefix_caching=False)
    core.add_request([1] * 4, greedy(25))
    core.add_request([2] * 6, SamplingParams(n=3, max_tokens=6))
    run(core)
    as_alone(core, 1, 2)
    gone = events(core, EventKind.PREEMPTED)
    by_step = {step: [e.child for e in gone if e.step == step] for step in {e.step for e in gone}}
    assert by_step and all(
        sorted(children) == sorted(set(children)) and len(children) > 1 for children in by_step.values()
    )
    back = events(core, EventKind.RESUMED)
    assert {e.step for e in back} == {e.step for e in events(core, EventKind.SWAPPED_IN)}


def test_while_someone_is_swapped_out_nobody_new_is_admitted_however_small():
    core = swapping(num_blocks=8, max_skips=9, enable_prefix_caching=False)
    core.add_request([1] * 9, greedy(16))
    core.add_request([2] * 12, greedy(5))
    while core.get(2).status != "preempted":
        core.step()
    core.add_request([3], greedy(1))
    while core.get(2).status == "preempted":
        assert core.get(3).status == "waiting"
        core.step()
    run(core)
    as_alone(core, 1, 2, 3)


# --- ends -------------------------------------------------------------------------------------------------------------


def test_a_cancel_returns_the_host_blocks():
    core = swapping(enable_prefix_caching=False)
    core.add_request([1] * 9, SamplingParams(n=3, max_tokens=8))
    for _ in range(3):
        core.step()
    core.preempt(1)
    assert core.metrics()["kvscope:num_cpu_blocks_used"] == 5
    core.cancel(1)
    core.check_integrity()
    assert core.metrics()["kvscope:num_cpu_blocks_used"] == 0 and core.tables.pool.num_used == 0


def test_a_sample_that_ends_while_it_is_out_gives_back_what_only_it_had():
    core = swapping(enable_prefix_caching=False)
    core.add_request([1] * 9, SamplingParams(n=3, max_tokens=8))
    for _ in range(3):
        core.step()
    core.preempt(1)
    core.finish(1, 1, 1, Cause.STOP_STRING, "x")
    core.check_integrity()
    assert core.metrics()["kvscope:num_cpu_blocks_used"] == 4
    run(core)
    assert core.get(1).children[1].num_output_tokens == 1


def test_a_fault_in_the_step_that_moves_a_block_costs_a_recomputation_and_no_text():
    core = swapping(num_blocks=6, enable_prefix_caching=False)
    core.add_request([1] * 8, greedy(9))
    core.add_request([2] * 8, greedy(5))
    core.step()
    core.runner.model.fault = RuntimeError("the model broke")
    core.step()  # 2 is on its way out when the step of 1 fails
    assert core.get(1).status == "failed" and core.get(2).status == "preempted"
    core.check_integrity()
    assert core.metrics()["kvscope:num_cpu_blocks_used"] == 0
    run(core)
    as_alone(core, 2)


def test_a_host_block_whose_reader_ends_before_the_move_is_made_is_the_target_of_one_move():
    """Cancelled between two steps: the next to go out gets the same host blocks, and only its blocks may be put there."""
    core = swapping(num_cpu_blocks=3, num_blocks=20, enable_prefix_caching=False)
    core.add_request([1] * 9, greedy(6))
    core.add_request([2] * 9, greedy(6))
    core.step()
    core.preempt(1)
    core.check_integrity()
    core.cancel(1)
    core.check_integrity()
    core.preempt(2)
    core.check_integrity()
    out, _ = core.scheduler.swap.take_moves()
    assert sorted(host for _, host in out) == [0, 1, 2]


def test_a_sample_that_ends_before_its_move_is_made_leaves_what_its_siblings_read():
    core = swapping(enable_prefix_caching=False)
    core.add_request([1] * 9, SamplingParams(n=3, max_tokens=8))
    for _ in range(3):
        core.step()
    own = core.get(1).children[1].block_tables[0][2]
    core.preempt(1)
    core.finish(1, 1, 1, Cause.STOP_STRING, "x")
    out, _ = core.scheduler.swap.take_moves()
    assert len(out) == 4 and own not in [block for block, _ in out]


# --- the pages --------------------------------------------------------------------------------------------------------


def test_storage_moves_whole_pages_of_every_layer_out_and_back():
    groups = [KVGroup(layers=(0, 1), num_kv_heads=1, head_dim=1)]
    storage = KVStorage(
        groups, num_blocks=4, block_size=2, dtype=torch.float32, device="cpu", kernels=REFERENCE, num_cpu_blocks=3
    )
    for layer in (0, 1):
        pages, _ = storage.pages(layer)
        pages[:] = torch.arange(4, dtype=torch.uint8)[:, None] + 10 * layer
    storage.swap_out(torch.tensor([[1, 2], [3, 0]]))
    storage.clear([1, 3])
    storage.swap_in(torch.tensor([[2, 3], [0, 2]]))
    assert [storage.pages(0)[0][:, 0].tolist(), storage.pages(1)[0][:, 0].tolist()] == [[0, 0, 3, 1], [10, 0, 13, 11]]
    assert read_back(storage, 0, [3], 2).dtype == np.int64


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"preemption_mode": "swap"}, "preemption_mode='swap': blocks wait in host memory, and num_cpu_blocks=0"),
        ({"num_cpu_blocks": 4}, "num_cpu_blocks=4: preemption_mode='recompute' needs no host memory"),
        ({"preemption_mode": "swap", "num_cpu_blocks": 4, "gang_preemption": False}, "preemption_mode='swap'.*gang_preemption=False"),
        ({"preemption_mode": "swap", "num_cpu_blocks": 4, "kv_allocator": "orca-max", "enable_prefix_caching": False},
         "preemption_mode='swap'.*kv_allocator='paged', not 'orca-max'"),
        ({"resume_order": "smallest", "scheduling_policy": "priority"}, "resume_order='smallest'.*scheduling_policy='priority'"),
        ({"gang_preemption": 1}, "gang_preemption=1: must be True, False or None"),
    ],
)  # fmt: skip
def test_options_that_contradict_each_other_are_both_named(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        EngineConfig(**options)
