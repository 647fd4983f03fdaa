"""Counters and histograms of one engine, under vLLM's names where vLLM has one, else under `kvscope:`.

A counter rises only when the work has really been done: prefix hits when a request was admitted, tokens when they were
computed or chosen. Needs the standard library only; one thread writes, reading gives plain numbers.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate

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
)  # fmt: skip  (seconds)
TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000)

GAUGES = {
    "vllm:num_requests_running": "Requests in the running batch",
    "vllm:num_requests_waiting": "Requests waiting to be admitted or resumed",
    "vllm:kv_cache_usage_perc": "Share of KV blocks with a reader, 1 means all",
    "kvscope:num_sequences_running": "Samples in the running batch",
    "kvscope:num_blocks_used": "KV blocks with a reader",
    "kvscope:num_blocks_cached": "KV blocks without a reader whose text can be found",
    "kvscope:num_slots_used": "Written KV slots in used blocks, each block once",
}
COUNTERS = {
    "vllm:prompt_tokens_total": "Prompt tokens of admitted requests, cached ones included",
    "vllm:generation_tokens_total": "Tokens generated",
    "vllm:prefix_cache_queries_total": "Tokens looked up in the prefix cache, at first admission",
    "vllm:prefix_cache_hits_total": "Tokens found in the prefix cache, at first admission: their prefill was skipped",
    "vllm:num_preemptions_total": "Samples that lost their blocks while running",
    "kvscope:preempted_prefix_cache_queries_total": "Tokens looked up when a preempted sample resumed",
    "kvscope:preempted_prefix_cache_hits_total": "Tokens found when a preempted sample resumed",
    "kvscope:computed_tokens_total": "Tokens whose KV was computed, recomputation included",
    "kvscope:blocks_evicted_total": "Cached blocks that lost their text to someone who needed room",
    "kvscope:blocks_copied_total": "Blocks copied before a write because others still read them or their text is cached",
    "kvscope:padding_tokens_total": "Tokens that static batches of equal rows would have computed beside the real ones",
    "kvscope:requests_refused_total": "Requests refused when they were added",
    "kvscope:steps_total": "Steps that computed something",
}
FINISHED_REASONS = ("stop", "length", "abort", "error")  # label of vllm:request_success_total
HISTOGRAMS = {
    "vllm:iteration_tokens_total": ("Tokens computed in one step", TOKEN_BUCKETS),
    "vllm:request_prompt_tokens": ("Prompt tokens of finished requests", TOKEN_BUCKETS),
    "vllm:request_generation_tokens": ("Output tokens of finished samples", TOKEN_BUCKETS),
    "vllm:request_queue_time_seconds": ("Arrival to first admission", LATENCY_BUCKETS),
    "vllm:time_to_first_token_seconds": ("Arrival to first token", LATENCY_BUCKETS),
    "vllm:inter_token_latency_seconds": ("One token to the next of the same sample", LATENCY_BUCKETS),
    "vllm:request_time_per_output_token_seconds": ("(End − first token) / (output tokens − 1)", LATENCY_BUCKETS),
    "vllm:e2e_request_latency_seconds": ("Arrival to end of finished requests", LATENCY_BUCKETS),
}


class Histogram:
    """Counts of observations up to each bucket's bound, their sum and number."""

    __slots__ = ("bounds", "buckets", "count", "total")

    def __init__(self, bounds: tuple[float, ...]):
        self.bounds = bounds
        self.buckets = [0] * (len(bounds) + 1)
        self.total = 0.0
        self.count = 0

    def observe(self, value: float, times: int = 1) -> None:
        self.buckets[bisect_left(self.bounds, value)] += times
        self.total += value * times
        self.count += times


class Metrics:
    """`count(name)` and `observe(name, value)` while the engine works; `as_dict` and `as_text` for those who look."""

    def __init__(self):
        self.counters: dict[str, float] = dict.fromkeys(COUNTERS, 0)
        self.finished: dict[str, int] = dict.fromkeys(FINISHED_REASONS, 0)
        self.histograms = {name: Histogram(bounds) for name, (_, bounds) in HISTOGRAMS.items()}

    def count(self, name: str, amount: float = 1) -> None:
        self.counters[name] += amount

    def observe(self, name: str, value: float, times: int = 1) -> None:
        self.histograms[name].observe(value, times)

    def as_dict(self, gauges: dict[str, float]) -> dict[str, float]:
        """Gauges, counters, and sum and count of each histogram, flat."""
        flat = gauges | self.counters
        for reason, number in self.finished.items():
            flat[f'vllm:request_success_total{{finished_reason="{reason}"}}'] = number
        for name, histogram in self.histograms.items():
            flat[f"{name}_sum"] = histogram.total
            flat[f"{name}_count"] = histogram.count
        return flat

    def as_text(self, gauges: dict[str, float]) -> str:
        """Prometheus text exposition format 0.0.4."""
        lines = []
        for name, value in gauges.items():
            lines += [f"# HELP {name} {GAUGES[name]}", f"# TYPE {name} gauge", f"{name} {value:g}"]
        for name, value in self.counters.items():
            lines += [f"# HELP {name} {COUNTERS[name]}", f"# TYPE {name} counter", f"{name} {value:g}"]
        lines += ["# HELP vllm:request_success_total Samples that ended", "# TYPE vllm:request_success_total counter"]
        lines += [f'vllm:request_success_total{{finished_reason="{r}"}} {n}' for r, n in self.finished.items()]
        for name, histogram in self.histograms.items():
            lines += [f"# HELP {name} {HISTOGRAMS[name][0]}", f"# TYPE {name} histogram"]
            bounds = [f"{bound:g}" for bound in histogram.bounds] + ["+Inf"]
            counts = accumulate(histogram.buckets)
            lines += [f'{name}_bucket{{le="{b}"}} {n}' for b, n in zip(bounds, counts, strict=True)]
            lines += [f"{name}_sum {histogram.total:g}", f"{name}_count {histogram.count}"]
        return "\n".join(lines) + "\n"
