"""Counters and histograms of one engine, under vLLM's names where vLLM has one, else under `kvscope:`.

A counter rises only when the work has really been done: prompt tokens when the last of them is computed, prefix hits when a
request was admitted with them, tokens when they were computed or chosen. Writing needs the standard library only and is
done by one thread; reading gives plain numbers, or Prometheus text through the client library.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .request import Request

LATENCY_BUCKETS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    120.0,
    300.0,
    600.0,
    1800.0,
)  # seconds
TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000)
COUNT_BUCKETS = (0, 1, 2, 5, 10, 20, 50, 100)

GAUGES = {
    "vllm:num_requests_running": "Requests in the running batch",
    "vllm:num_requests_waiting": "Requests waiting to be admitted or resumed",
    "vllm:kv_cache_usage_perc": "Share of KV blocks with a reader, 1 means all",
    "kvscope:num_sequences_running": "Samples in the running batch",
    "kvscope:num_blocks_used": "KV blocks with a reader",
    "kvscope:num_blocks_cached": "KV blocks without a reader whose text can be found",
    "vllm:num_requests_swapped": "Requests with KV in host memory",
    "vllm:cpu_cache_usage_perc": "Share of host blocks in use, 1 means all",
    "kvscope:num_cpu_blocks_used": "Host blocks in use",
    "kvscope:num_slots_used": "Written KV slots in used blocks, each block once; where KV groups have blocks of different sizes, of common blocks",
}
COUNTERS = {
    "vllm:prompt_tokens_total": "Prompt tokens of requests that got a first token, cached ones included",
    "vllm:generation_tokens_total": "Tokens generated",
    "vllm:prefix_cache_queries_total": "Tokens looked up in the prefix cache, at first admission",
    "vllm:prefix_cache_hits_total": "Tokens found in the prefix cache, at first admission: their prefill was skipped",
    "vllm:num_preemptions_total": "Samples that lost their blocks while running",
    "vllm:corrupted_requests_total": "Requests that ended because their logits were not finite",
    "kvscope:preempted_prefix_cache_queries_total": "Tokens looked up when a preempted sample resumed",
    "kvscope:preempted_prefix_cache_hits_total": "Tokens found when a preempted sample resumed",
    "kvscope:computed_tokens_total": "Tokens whose KV was computed, recomputation included",
    "kvscope:blocks_evicted_total": "Cached blocks that lost their text to someone who needed room",
    "kvscope:blocks_copied_total": "Blocks copied before a write because others still read them or their text is cached",
    "kvscope:blocks_swapped_out_total": "Blocks moved to host memory, each once however many samples read it",
    "kvscope:blocks_swapped_in_total": "Blocks moved back from host memory",
    "kvscope:padding_tokens_total": "Tokens of nobody that static batches of equal rows computed beside the real ones",
    "kvscope:requests_refused_total": "Requests refused when they were added",
    "kvscope:steps_total": "Steps that computed something",
}
FINISHED_REASONS = ("stop", "length", "abort", "error")  # label of vllm:request_success_total
# `latency` defines the times. Those of a whole request are observed when it has finished; cancelled and failed ones are not.
HISTOGRAMS = {
    "vllm:iteration_tokens_total": ("Tokens computed in one step", TOKEN_BUCKETS),
    "vllm:request_prompt_tokens": ("Prompt tokens of finished requests", TOKEN_BUCKETS),
    "vllm:request_generation_tokens": ("Output tokens of samples that ended", TOKEN_BUCKETS),
    "vllm:request_max_num_generation_tokens": ("Output tokens of a finished request's longest sample", TOKEN_BUCKETS),
    "vllm:request_params_n": ("Samples that finished requests asked for", COUNT_BUCKETS),
    "vllm:request_params_max_tokens": ("Most output tokens that finished requests asked for", TOKEN_BUCKETS),
    "vllm:request_prefill_kv_computed_tokens": ("Prompt tokens that were not found in the cache", TOKEN_BUCKETS),
    "vllm:request_num_preemptions": ("Times that the samples of a finished request lost their blocks", COUNT_BUCKETS),
    "vllm:request_queue_time_seconds": ("Arrival to first admission", LATENCY_BUCKETS),
    "vllm:request_prefill_time_seconds": ("First admission to first token", LATENCY_BUCKETS),
    "vllm:request_decode_time_seconds": ("First token to end", LATENCY_BUCKETS),
    "vllm:request_inference_time_seconds": ("First admission to end", LATENCY_BUCKETS),
    "vllm:time_to_first_token_seconds": ("Arrival to first token", LATENCY_BUCKETS),
    "vllm:inter_token_latency_seconds": ("One token to the next of the same sample", LATENCY_BUCKETS),
    "vllm:request_time_per_output_token_seconds": ("(End − first token) / (output tokens − 1)", LATENCY_BUCKETS),
    "vllm:e2e_request_latency_seconds": ("Arrival to end of finished requests", LATENCY_BUCKETS),
    "vllm:kv_block_lifetime_seconds": ("A cached block's allocation to its eviction", LATENCY_BUCKETS),
    "vllm:kv_block_idle_before_evict_seconds": ("A cached block's last reader to its eviction", LATENCY_BUCKETS),
    "vllm:kv_block_reuse_gap_seconds": ("One prefix hit of a block to the next", LATENCY_BUCKETS),
}


class Histogram:
    """Counts of observations up to each bucket's bound, their sum and number."""

    __slots__ = ("bounds", "buckets", "count", "total")

    def __init__(self, bounds: tuple[float, ...]):
        self.bounds = bounds
        self.buckets = [0] * (len(bounds) + 1)
        self.total = 0.0
        self.count = 0

    def observe(self, value: float) -> None:
        self.buckets[bisect_left(self.bounds, value)] += 1
        self.total += value
        self.count += 1


class Metrics:
    """`count(name)` and `observe(name, value)` while the engine works; `as_dict` and `as_text` for those who look."""

    def __init__(self) -> None:
        self.counters: dict[str, float] = dict.fromkeys(COUNTERS, 0)
        self.finished: dict[str, int] = dict.fromkeys(FINISHED_REASONS, 0)
        self.histograms = {name: Histogram(bounds) for name, (_, bounds) in HISTOGRAMS.items()}

    def count(self, name: str, amount: float = 1) -> None:
        self.counters[name] += amount

    def observe(self, name: str, value: float | None) -> None:
        """What never came (None) is not observed."""
        if value is not None:
            self.histograms[name].observe(value)

    def step_computed(self, num_tokens: int, num_padding: int) -> None:
        """A step ran to its end: the KV of so many tokens is written. One in which nobody could run counts nothing."""
        if not num_tokens:
            return
        self.count("kvscope:steps_total")
        self.count("kvscope:computed_tokens_total", num_tokens)
        self.count("kvscope:padding_tokens_total", num_padding)
        self.observe("vllm:iteration_tokens_total", num_tokens)

    def request_admitted(self, request: Request, now: float) -> None:
        """For the first time; what a preempted one waits before it resumes is part of its inference time."""
        request.metrics.scheduled = now
        self.observe("vllm:request_queue_time_seconds", request.metrics.queue_time)

    def prompt_computed(self, request: Request) -> None:
        """Its first token is there, and so is the KV of all of its prompt."""
        self.count("vllm:prompt_tokens_total", request.num_prompt_tokens)
        self.observe("vllm:time_to_first_token_seconds", request.metrics.ttft)

    def request_finished(self, request: Request) -> None:
        """All that is known of a request once its last sample has finished."""
        times, observe = request.metrics, self.observe
        observe("vllm:request_prompt_tokens", request.num_prompt_tokens)
        observe("vllm:request_max_num_generation_tokens", times.num_output_tokens)
        observe("vllm:request_params_n", request.params.n)
        observe("vllm:request_params_max_tokens", request.max_tokens)
        observe("vllm:request_prefill_kv_computed_tokens", request.num_prompt_tokens - request.num_cached_tokens)
        observe("vllm:request_num_preemptions", times.num_preemptions)
        observe("vllm:request_prefill_time_seconds", times.prefill_time)
        observe("vllm:request_decode_time_seconds", times.decode_time)
        observe("vllm:request_inference_time_seconds", times.inference_time)
        observe("vllm:e2e_request_latency_seconds", times.e2e)
        if times.num_output_tokens > 1:
            observe("vllm:request_time_per_output_token_seconds", times.tpot)

    def as_dict(self, gauges: dict[str, float]) -> dict[str, float]:
        """Gauges, counters, and sum and count of each histogram, flat."""
        flat = gauges | self.counters
        for reason, number in self.finished.items():
            flat[f'vllm:request_success_total{{finished_reason="{reason}"}}'] = number
        for name, histogram in self.histograms.items():
            flat[f"{name}_sum"] = histogram.total
            flat[f"{name}_count"] = histogram.count
        return flat

    def as_text(self, gauges: dict[str, float], model_name: str) -> str:
        """Prometheus text exposition format 0.0.4, labelled with the model as vLLM's is."""
        from prometheus_client import generate_latest

        return generate_latest(_Collector(self, gauges, model_name)).decode()


class _Collector:
    """What `generate_latest` reads: the numbers as they are now, as the client library's families."""

    def __init__(self, metrics: Metrics, gauges: dict[str, float], model_name: str):
        self.metrics = metrics
        self.gauges = gauges
        self.model_name = model_name

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        metrics, label, labels = self.metrics, ["model_name"], [self.model_name]
        for name, value in self.gauges.items():
            gauge = GaugeMetricFamily(name, GAUGES[name], labels=label)
            gauge.add_metric(labels, value)
            yield gauge
        for name, value in metrics.counters.items():
            counter = CounterMetricFamily(name, COUNTERS[name], labels=label)
            counter.add_metric(labels, value)
            yield counter
        ended = CounterMetricFamily("vllm:request_success", "Samples that ended", labels=[*label, "finished_reason"])
        for reason, number in metrics.finished.items():
            ended.add_metric([*labels, reason], number)
        yield ended
        for name, histogram in metrics.histograms.items():
            family = HistogramMetricFamily(name, HISTOGRAMS[name][0], labels=label)
            bounds = [*map(str, map(float, histogram.bounds)), "+Inf"]
            counts = accumulate(histogram.buckets)
            family.add_metric(labels, list(zip(bounds, counts, strict=True)), histogram.total)
            yield family


class BlockClock:
    """When each block was given out, hit and left, for the three histograms of cached blocks. The times are the step's.

    vLLM samples one block in a hundred and counts as idle what has not been hit lately, also while somebody reads it; here
    every block is counted, and a block is idle once its last reader has left.
    """

    def __init__(self, num_blocks: int, metrics: Metrics):
        self._taken = array("d", bytes(8 * num_blocks))
        self._hit = array("d", bytes(8 * num_blocks))  # 0: not since it was given out
        self._left = array("d", bytes(8 * num_blocks))
        self._metrics = metrics

    def taken(self, block: int, now: float) -> None:
        self._taken[block] = now
        self._hit[block] = 0.0

    def hit(self, block: int, now: float) -> None:
        if before := self._hit[block]:
            self._metrics.observe("vllm:kv_block_reuse_gap_seconds", now - before)
        self._hit[block] = now

    def left(self, block: int, now: float) -> None:
        self._left[block] = now

    def evicted(self, block: int, now: float) -> None:
        self._metrics.observe("vllm:kv_block_lifetime_seconds", now - self._taken[block])
        self._metrics.observe("vllm:kv_block_idle_before_evict_seconds", now - self._left[block])
