"""Metrics by hand: a clock that only the model moves, one second a step, so that every time is a small number."""

import statistics
import time
from types import SimpleNamespace

import pytest
from fake_model import greedy, make_core, run
from kvscope.engine import SamplingParams
from kvscope.engine.metrics import COUNTERS, GAUGES, HISTOGRAMS, BlockClock, Metrics
from prometheus_client.parser import text_string_to_metric_families


@pytest.fixture
def make_timed(monkeypatch):
    """`make_timed(**options)`: (core, clock). It is 100 s; a forward takes 1 s."""
    clock = SimpleNamespace(now=100.0)
    stopped = SimpleNamespace(monotonic=lambda: clock.now, perf_counter=time.perf_counter)
    for module in ("core", "scheduling.lifecycle"):
        monkeypatch.setattr(f"kvscope.engine.{module}.time", stopped)

    def make(**options):
        core = make_core(**options)
        execute = core.runner.execute

        def one_second(batch):
            clock.now += 1
            return execute(batch)

        core.runner.execute = one_second
        return core, clock

    return make


def observed(core, name):
    """(number, sum) of a histogram."""
    metrics = core.metrics()
    return metrics[f"{name}_count"], metrics[f"{name}_sum"]


def test_every_interval_of_two_requests_one_after_the_other(make_timed):
    core, _ = make_timed(max_num_seqs=1)
    core.add_request([1] * 6, greedy(3))  # scheduled at 100, tokens at 101, 102, 103
    core.add_request([2], greedy(2))  # scheduled at 103, tokens at 104, 105
    run(core)
    expected = {
        "vllm:request_queue_time_seconds": (2, 0 + 3),
        "vllm:time_to_first_token_seconds": (2, 1 + 4),
        "vllm:request_prefill_time_seconds": (2, 1 + 1),
        "vllm:request_decode_time_seconds": (2, 2 + 1),
        "vllm:request_inference_time_seconds": (2, 3 + 2),
        "vllm:e2e_request_latency_seconds": (2, 3 + 5),
        "vllm:inter_token_latency_seconds": (3, 3),
        "vllm:request_time_per_output_token_seconds": (2, 1 + 1),
        "vllm:iteration_tokens_total": (5, 6 + 1 + 1 + 1 + 1),
        "vllm:request_prompt_tokens": (2, 7),
        "vllm:request_generation_tokens": (2, 5),
        "vllm:request_max_num_generation_tokens": (2, 5),
        "vllm:request_params_n": (2, 2),
        "vllm:request_params_max_tokens": (2, 5),
        "vllm:request_prefill_kv_computed_tokens": (2, 7),
        "vllm:request_num_preemptions": (2, 0),
    }
    assert {name: observed(core, name) for name in expected} == expected
    times = core.get(2).metrics
    assert (times.queue_time, times.ttft, times.tpot, times.e2e) == (3, 4, 1, 5)


def test_samples_and_requests_are_counted_apart(make_timed):
    core, _ = make_timed()
    core.add_request([1] * 6, SamplingParams(n=3, max_tokens=2, seed=1))
    run(core)
    assert observed(core, "vllm:request_generation_tokens") == (3, 6)
    assert observed(core, "vllm:request_max_num_generation_tokens") == (1, 2)
    assert observed(core, "vllm:request_params_n") == (1, 3)
    assert observed(core, "vllm:time_to_first_token_seconds") == (1, 1)
    assert observed(core, "vllm:inter_token_latency_seconds") == (3, 3)
    assert core.metrics()["vllm:prompt_tokens_total"] == 6 and core.metrics()["vllm:generation_tokens_total"] == 6


def test_the_time_to_resume_is_part_of_decode_and_inference(make_timed):
    core, clock = make_timed(enable_prefix_caching=False)
    core.add_request([1] * 6, greedy(3))
    core.step()
    core.preempt(1)
    clock.now += 10
    run(core)
    assert observed(core, "vllm:request_num_preemptions") == (1, 1)
    assert observed(core, "vllm:request_queue_time_seconds") == (1, 0)
    assert observed(core, "vllm:request_decode_time_seconds") == (1, 12)
    assert core.metrics()["vllm:prompt_tokens_total"] == 6, "once, however often it is computed"
    assert core.metrics()["kvscope:computed_tokens_total"] == 6 + 7 + 1


def test_nothing_counts_that_was_not_done(make_timed):
    core, clock = make_timed()
    before = core.metrics()
    core.add_request([1] * 6, greedy(3))
    core.runner.model.fault = RuntimeError("no")
    core.step()
    core.add_request([1] * 6, greedy(3), deadline=1)
    clock.now += 2
    core.step()
    core.add_request([1] * 6, greedy(3))
    core.cancel(3)
    after = core.metrics()
    changed = {name for name in after if after[name] != before[name]}
    endings = {f'vllm:request_success_total{{finished_reason="{reason}"}}' for reason in ("abort", "error")}
    lookup = {"vllm:prefix_cache_queries_total", "vllm:request_queue_time_seconds_count"}
    assert changed - endings - lookup == {"vllm:request_generation_tokens_count"}


def test_broken_logits_are_counted_in_requests(make_timed):
    core, _ = make_timed()
    core.add_request([1] * 6, SamplingParams(n=2, max_tokens=2, seed=1))
    core.add_request([2] * 6, greedy(2))
    core.runner.model.broken_rows = [0]
    run(core)
    assert core.metrics()["vllm:corrupted_requests_total"] == 1
    assert observed(core, "vllm:e2e_request_latency_seconds") == (1, 2)


def test_a_cached_block_lives_idles_and_is_reused(make_timed):
    """One block is all that can be found: a prompt of one block and a bit, the bit never kept."""
    core, clock = make_timed(num_blocks=3)
    core.add_request([1] * 4, greedy(1))
    run(core)  # 100 to 101: block 1 is full and stays
    for now in (110, 117):
        clock.now = now
        core.add_request([1] * 4 + [2], greedy(1))  # hits it, and leaves it a second later
        run(core)
    assert observed(core, "vllm:kv_block_reuse_gap_seconds") == (1, 7)
    assert observed(core, "vllm:kv_block_lifetime_seconds") == (0, 0), (
        "the other block is freed and holds no findable text"
    )
    clock.now = 130
    core.add_request([2] * 8, greedy(1))  # needs both blocks
    run(core)
    assert observed(core, "vllm:kv_block_lifetime_seconds") == (1, 30)
    assert observed(core, "vllm:kv_block_idle_before_evict_seconds") == (1, 12)


def test_a_block_that_is_given_out_again_begins_a_new_life():
    metrics = Metrics()
    clock = BlockClock(2, metrics)
    clock.taken(1, 10.0)
    clock.hit(1, 11.0)
    clock.left(1, 12.0)
    clock.evicted(1, 15.0)
    clock.taken(1, 20.0)
    clock.hit(1, 21.0)
    clock.hit(1, 24.0)
    clock.left(1, 25.0)
    clock.evicted(1, 26.0)
    flat = metrics.as_dict({})
    assert (flat["vllm:kv_block_lifetime_seconds_count"], flat["vllm:kv_block_lifetime_seconds_sum"]) == (2, 5 + 6)
    assert flat["vllm:kv_block_idle_before_evict_seconds_sum"] == 3 + 1
    assert (flat["vllm:kv_block_reuse_gap_seconds_count"], flat["vllm:kv_block_reuse_gap_seconds_sum"]) == (1, 3)


def test_the_text_is_prometheus_text_and_says_the_same(make_timed):
    core, _ = make_timed()
    core.add_request([1] * 6, greedy(3))
    run(core)
    families = {family.name: family for family in text_string_to_metric_families(core.metrics_text())}
    counters = {name.removesuffix("_total") for name in COUNTERS}
    assert set(families) == {*GAUGES, *counters, "vllm:request_success", *HISTOGRAMS}
    samples = [sample for family in families.values() for sample in family.samples]
    assert all(sample.labels["model_name"] == "fake" for sample in samples)
    told = {s.name: s.value for s in samples if set(s.labels) == {"model_name"}}
    flat = core.metrics()
    assert told == {name: value for name, value in flat.items() if "{" not in name}
    ended = {s.labels["finished_reason"]: s.value for s in families["vllm:request_success"].samples}
    assert ended == {"stop": 0, "length": 1, "abort": 0, "error": 0}
    buckets = {s.labels["le"]: s.value for s in families["vllm:iteration_tokens_total"].samples if "le" in s.labels}
    assert buckets["1.0"] == 2 and buckets["5.0"] == 2 and buckets["10.0"] == buckets["+Inf"] == 3, "6, 1 and 1 tokens"


def test_watching_costs_microseconds_a_token(capsys):
    """All that the counters do when one more token comes out, and when text is asked for; the median of many."""
    core = make_core()
    core.add_request([1] * 6, greedy(50))
    core.step()
    [seq] = core.scheduler.running

    def seconds(call, times):
        started = time.perf_counter()
        for _ in range(times):
            call()
        return (time.perf_counter() - started) / times

    token = statistics.median(seconds(lambda: core.lifecycle.count_token(seq), 1000) for _ in range(20))
    scrape = statistics.median(seconds(core.metrics_text, 1) for _ in range(10))
    with capsys.disabled():
        print(f"\nmetrics: {1e6 * token:.2f} µs a token, {1e3 * scrape:.1f} ms for the text")
    assert token < 50e-6
