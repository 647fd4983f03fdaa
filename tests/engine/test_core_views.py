"""What the core tells others: cached text and its counters, snapshots, steps, gauges."""

import pytest
from fake_model import greedy, make_core, run
from kvscope.engine import EventKind, SamplingParams
from kvscope.engine.events import Cause
from kvscope.engine.snapshot import ALONE, NOT_CACHED, ROOT, BlockState


def events(core, *kinds):
    return [e for e in core.events.since(0)[0] if e.kind in kinds]


# --- the cache --------------------------------------------------------------------------------------------------------


def test_reset_empties_the_cache_and_says_when_running_text_stays():
    core = make_core()
    core.add_request([1] * 9, greedy(1))
    run(core)
    core.add_request([2] * 9, greedy(4))
    core.step()
    assert not core.reset_prefix_cache()
    assert core.tables.cache.num_published == 2 and core.tables.pool.num_free_cached == 0
    run(core)
    assert core.reset_prefix_cache()
    assert core.tables.cache.num_published == 0
    assert [e.numbers["blocks"] for e in events(core, EventKind.CACHE_RESET)] == [2, 3]
    core.add_request([1] * 9, greedy(1))
    core.step()
    miss = events(core, EventKind.CACHE_MISS)[-1]
    assert miss.cause is Cause.EVICTED


def test_salts_of_the_engine_and_of_a_request_keep_text_apart():
    core = make_core(cache_salt="engine")
    for salt in (None, "tenant", "engine", "tenant"):
        core.add_request([1] * 9, greedy(1), cache_salt=salt)
        run(core)
    assert [core.get(i).num_cached_tokens for i in range(1, 5)] == [0, 0, 8, 8]
    assert [e.cause for e in events(core, EventKind.CACHE_MISS)] == [Cause.NEVER_SEEN, Cause.SALT_DIFFERS]


def test_hits_are_counted_in_tokens_once_and_those_of_preempted_samples_apart():
    core = make_core()
    core.add_request([1] * 9, greedy(3))
    run(core)
    core.add_request([1] * 9, greedy(3))
    core.step()
    core.preempt(2)
    run(core)
    metrics = core.metrics()
    assert metrics["vllm:prefix_cache_queries_total"] == 18 and metrics["vllm:prefix_cache_hits_total"] == 8
    assert metrics["kvscope:preempted_prefix_cache_queries_total"] == 10
    assert metrics["kvscope:preempted_prefix_cache_hits_total"] == 8
    assert core.get(2).num_cached_tokens == 8


def test_a_match_that_is_not_admitted_counts_nothing():
    core = make_core(num_blocks=6)
    core.add_request([1] * 9, greedy(1))
    run(core)
    core.add_request([2] * 12, greedy(8))
    core.step()
    core.add_request([1] * 9, greedy(1))
    for _ in range(3):
        core.step()
    assert core.get(3).status == "waiting"
    assert core.metrics()["vllm:prefix_cache_hits_total"] == 0
    assert not events(core, EventKind.CACHE_HIT)


# --- what viewers see -------------------------------------------------------------------------------------------------


def test_a_snapshot_tells_every_block_and_request_and_never_changes():
    core = make_core(num_blocks=12, max_num_seqs=3)
    core.add_request([9] * 5, greedy(1))
    run(core)
    core.add_request([1, 2, 3, 4, 5, 6], SamplingParams(n=2, max_tokens=9, seed=1), label="one two")
    core.add_request([7, 7], greedy(9))
    core.add_request([8, 8], greedy(9))
    core.step()
    snapshot = core.snapshot("paused")
    S = BlockState
    assert [(r.id, r.child, r.status) for r in snapshot.requests] == [
        (2, 0, "running"),
        (2, 1, "running"),
        (3, 0, "running"),
        (4, 0, "waiting"),
    ]
    tables = [r.block_tables[0].tolist() for r in snapshot.requests]
    assert tables == [[2, 3], [2, 3], [4], []]
    assert snapshot.block_state.tolist() == [S.PINNED, S.CACHED, S.SHARED, S.SHARED, S.ACTIVE] + [S.EMPTY] * 7
    assert snapshot.owner[:6].tolist() == [-1, -1, 0, 0, 2, -1]
    assert snapshot.filled[:6].tolist() == [0, 4, 4, 2, 2, 0]
    assert snapshot.eviction_order.tolist() == [1] and snapshot.last_used_step[:3].tolist() == [2, 1, 2]
    assert snapshot.num_used_blocks == 3 and snapshot.counters == core.metrics()
    assert (snapshot.requests[0].label, snapshot.requests[0].num_samples, snapshot.state) == ("one two", 2, "paused")
    assert snapshot.requests[3].blocked_because == "it needs 1 seat and 0 of max_num_seqs are free"
    before = [snapshot.ref_count.copy(), snapshot.generation.copy(), tables]
    run(core)
    assert (snapshot.ref_count == before[0]).all() and (snapshot.generation == before[1]).all()
    assert [r.block_tables[0].tolist() for r in snapshot.requests] == before[2]


@pytest.mark.parametrize("prefix_cache", ["hash", "radix"])
def test_a_snapshot_tells_the_tree_of_cached_text(prefix_cache):
    core = make_core(prefix_cache=prefix_cache)
    for prompt in ([1] * 9, [1] * 8 + [2] * 5, [3] * 9):
        core.add_request(prompt, greedy(1))
        run(core)
    snapshot = core.snapshot()
    full = {b: snapshot.parent[b] for b in range(1, 17) if snapshot.filled[b] == 4}
    assert full == (
        {1: ROOT, 2: 1, 3: 2, 4: ROOT, 5: 4} if prefix_cache == "hash" else {1: ROOT, 2: 1, 4: 2, 6: ROOT, 7: 6}
    )
    assert snapshot.num_hits[[1, 2]].tolist() == [1, 1] and snapshot.num_hits.sum() == 2
    assert snapshot.computed_for[[1, 2]].tolist() == [1, 1] and set(snapshot.computed_for[list(full)]) == {
        1,
        2,
        3,
    }
    cached = snapshot.block_state == BlockState.CACHED
    assert ((snapshot.parent != NOT_CACHED) == cached).all() and ((snapshot.computed_for >= 0) == cached).all()
    core.reset_prefix_cache()
    after = core.snapshot()
    assert set(after.parent) == {NOT_CACHED} and set(after.computed_for) == {-1} and not after.num_hits.any()
    assert snapshot.num_hits.sum() == 2, "a snapshot stays as it was taken"


def test_blocks_of_a_window_stand_alone():
    core = make_core(windows=(0, 5))
    core.add_request([1] * 9, greedy(1))
    run(core)
    snapshot = core.snapshot()
    parents = sorted(snapshot.parent[snapshot.parent != NOT_CACHED].tolist())
    assert parents[:2] == [ALONE, ALONE] and ROOT in parents and parents[-1] > 0


def test_a_snapshot_tells_the_line_and_who_waits_in_host_memory():
    core = make_core(num_blocks=8, max_num_seqs=2, preemption_mode="swap", num_cpu_blocks=6)
    for prompt in ([1] * 6, [2] * 6, [3] * 6, [4] * 6):
        core.add_request(prompt, greedy(4), priority=0, deadline=None if prompt[0] < 4 else 1000.0)
    core.step()
    core.preempt(2)
    snapshot = core.snapshot()
    places = {r.id: r.queue_place for r in snapshot.requests}
    assert places == {1: -1, 2: 0, 3: 1, 4: 2} and snapshot.num_host_blocks == 6
    swapped = snapshot.requests[1]
    assert [t.tolist() for t in swapped.host_tables] == [[0, 1]] and snapshot.requests[0].host_tables == ()
    assert (swapped.waiting_since_step, snapshot.requests[2].waiting_since_step) == (1, 0)
    assert snapshot.requests[3].deadline == core.get(4).deadline and snapshot.requests[2].deadline is None
    assert snapshot.requests[0].arrival <= snapshot.requests[0].first_token <= snapshot.time
    assert snapshot.requests[2].first_token is None


def test_latencies_are_told_with_their_events():
    core = make_core()
    core.add_request([1] * 6, greedy(4))
    core.add_request([2] * 6, SamplingParams(n=2, max_tokens=3, seed=1))
    run(core)
    for request_id in (1, 2):
        times, ends = (
            core.get(request_id).metrics,
            [e for e in events(core, EventKind.FINISHED) if e.request_id == request_id],
        )
        assert {e.numbers["ttft"] for e in ends} == {times.ttft} and ends[-1].numbers["e2e"] == times.e2e
    steps, metrics = events(core, EventKind.STEP), core.metrics()
    name = "vllm:inter_token_latency_seconds"
    assert sum(e.numbers["gaps"] for e in steps) == metrics[f"{name}_count"] == 3 + 2 * 2
    assert sum(e.numbers["gap_seconds"] for e in steps) == pytest.approx(metrics[f"{name}_sum"])
    assert steps[0].numbers["gaps"] == 0 and all(
        e.numbers["longest_gap"] * e.numbers["gaps"] >= e.numbers["gap_seconds"] > 0 for e in steps[1:4]
    )


def test_a_step_says_what_it_did():
    core = make_core()
    core.add_request([1, 2, 3], greedy(2))
    core.add_request([4, 5], SamplingParams(n=2, max_tokens=1, seed=1))
    output = core.step()
    assert (output.step, output.scheduled, output.finished, output.preempted) == (1, {1: 3, 2: 2}, [2], [])
    assert [child for child, _ in output.new_tokens[2]] == [0, 1] and len(output.new_tokens[1]) == 1
    assert 0 < events(core, EventKind.STEP)[0].numbers["schedule_seconds"] < output.seconds
    core.step()
    idle = core.step()
    assert (idle.step, idle.scheduled) == (2, {}), "without work nothing happens"
    assert core.runner.model.num_calls == 2 and len(events(core, EventKind.STEP)) == 2


def test_gauges_follow_the_blocks():
    core = make_core(max_num_seqs=1)
    core.add_request([1] * 6, greedy(3))
    core.add_request([2], greedy(3))
    core.step()
    metrics = core.metrics()
    assert (metrics["vllm:num_requests_running"], metrics["vllm:num_requests_waiting"]) == (1, 1)
    assert metrics["vllm:kv_cache_usage_perc"] == 2 / 16 and metrics["kvscope:num_slots_used"] == 6
    text = core.metrics_text()
    assert 'vllm:num_requests_running{model_name="fake"} 1.0\n' in text
