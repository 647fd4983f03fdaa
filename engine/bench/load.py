"""Requests that come by themselves, whether or not earlier ones are done (an open load), and how they were served.

The clock of a request starts when it was to arrive, so that a client that comes late, or an engine that keeps it from
sending, hides nothing. `engine.latency` defines what is measured.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..latency import Objectives, pooled_inter_token_latencies, request_goodput
from ..outputs import RequestMetrics
from .contender import Arrival
from .trace import random_jobs

PERCENTILES = (50, 95, 99)


def open_load(
    count: int,
    rate: float,
    prompt: tuple[int, int],
    new: tuple[int, int],
    *,
    vocab_size: int,
    burstiness: float = 1.0,
    seed: int = 0,
) -> list[Arrival]:
    """`count` requests, the first at once, on average `rate` a second; lengths uniform over their ranges, ends included.

    The gaps are drawn from a gamma distribution whose shape is `burstiness`: 1 is a Poisson process, below 1 they come in bursts,
    above more evenly (vLLM's serving benchmark). An infinite rate: all at once.
    """
    draw = random.Random(seed)
    gaps = [draw.gammavariate(burstiness, 1.0) / (rate * burstiness) for _ in range(count - 1)]
    moments = np.cumsum([0.0, *gaps]).tolist()
    jobs = random_jobs(count, prompt, new, vocab_size=vocab_size, seed=seed)
    return [Arrival(at, list(job.prompt), job.num_new) for at, job in zip(moments, jobs, strict=True)]


def offered(arrivals: Sequence[Arrival]) -> float:
    """Requests a second that the load brought: the rate as it was drawn."""
    last = arrivals[-1].at
    return (len(arrivals) - 1) / last if last else float("inf")


@dataclass(frozen=True, slots=True)
class Service:
    """`times`: when each token of each arrival came, in seconds from the start."""

    arrivals: Sequence[Arrival]
    times: Sequence[Sequence[float]]

    @property
    def seconds(self) -> float:
        """From the start to the last token."""
        return max(times[-1] for times in self.times)

    @property
    def output_tokens(self) -> int:
        return sum(map(len, self.times))

    @property
    def requests(self) -> list[RequestMetrics]:
        return [
            RequestMetrics(arrival.at, None, times[0], times[-1], len(times))
            for arrival, times in zip(self.arrivals, self.times, strict=True)
        ]


def milliseconds(services: Sequence[Service]) -> dict[str, list[float]]:
    """TTFT, TPOT and E2E of every request, ITL of every gap, of all runs of a load together. TPOT needs a second token."""
    requests = [request for service in services for request in service.requests]
    seconds = {
        "TTFT": [request.ttft for request in requests],
        "TPOT": [request.tpot for request in requests if request.num_output_tokens > 1],
        "ITL": pooled_inter_token_latencies(times for service in services for times in service.times),
        "E2E": [request.e2e for request in requests],
    }
    return {name: [1e3 * value for value in values if value is not None] for name, values in seconds.items()}


def percentiles(values: Sequence[float]) -> list[float]:
    """At PERCENTILES; NaN of nothing."""
    return np.percentile(values, PERCENTILES).tolist() if len(values) else [float("nan")] * len(PERCENTILES)


def goodput(services: Sequence[Service], objectives: Objectives) -> tuple[float, float]:
    """(requests a second that met all objectives, their share of all requests)."""
    requests = [request for service in services for request in service.requests]
    seconds = sum(service.seconds for service in services)
    return request_goodput(requests, objectives, seconds), objectives.attainment(requests)


def span(ends: tuple[int, int]) -> str:
    return " to ".join(map(str, ends))
