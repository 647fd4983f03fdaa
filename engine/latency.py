"""The latencies of serving, each defined once: whoever prints one of these words calls the function here.

    arrival ── queue ──▶ scheduled ── prefill ──▶ first token ── decode ──▶ last token
    │                    └──────────────── inference ────────────────┘              │
    ├──────────────── TTFT ──────────────────────▶│                                 │
    └──────────────────────────────── E2E ─────────────────────────────────────────▶│

All times are seconds on one clock. The words and formulas are those of vLLM's serving benchmark; a benchmark says whether
its clock starts at the scheduled arrival or when the request was sent. Two pairs are easily mixed up. TPOT is one number a
request, ITL one a gap: pooled, long outputs have more of them. And goodput is a rate of requests at a given load
(`request_goodput`) or the load itself (`highest_rate`). Knows no engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Protocol


class Latencies(Protocol):
    """Of one request, in seconds; None for what never came. `outputs.RequestMetrics` is one."""

    @property
    def ttft(self) -> float | None: ...
    @property
    def tpot(self) -> float | None: ...
    @property
    def e2e(self) -> float | None: ...
    @property
    def num_output_tokens(self) -> int: ...


def time_per_output_token(ttft: float, e2e: float, num_output_tokens: int) -> float:
    """TPOT: the mean time of a token after the first, (E2E − TTFT) / (output tokens − 1); 0 where there is no second one."""
    return (e2e - ttft) / (num_output_tokens - 1) if num_output_tokens > 1 else 0.0


def inter_token_latency(before: float, now: float) -> float:
    """ITL: the time from one arrival of new tokens to the next of the same output; a burst of several tokens is one gap."""
    return now - before


def pooled_inter_token_latencies(outputs: Iterable[Sequence[float]]) -> list[float]:
    """ITL over a workload: the gaps of all outputs in one list, from the arrival times of each output's tokens."""
    return [inter_token_latency(before, now) for times in outputs for before, now in pairwise(times)]


def normalized_latency(requests: Iterable[Latencies]) -> float:
    """The mean of E2E / output tokens over requests that ended with a token, in seconds a token (Orca, OSDI 2022, section 6.2;
    PagedAttention, SOSP 2023, section 6.1). Unlike TPOT it holds the queue and the prompt too. 0 without any request."""
    ended = [r.e2e / r.num_output_tokens for r in requests if r.e2e is not None and r.num_output_tokens]
    return fmean(ended) if ended else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Objectives:
    """Service level objectives: the most seconds that a request may take for each. None: any time will do."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    def are_met(self, request: Latencies) -> bool:
        """All of them, each to the very second; a request that never ended meets none."""
        if request.e2e is None or request.ttft is None or request.tpot is None:
            return False
        pairs = ((request.ttft, self.ttft), (request.tpot, self.tpot), (request.e2e, self.e2e))
        return all(most is None or seconds <= most for seconds, most in pairs)

    def attainment(self, requests: Sequence[Latencies]) -> float:
        """The share of all requests, refused and failed ones included, that meet all objectives. 0 of none."""
        return sum(map(self.are_met, requests)) / len(requests) if requests else 0.0


def request_goodput(requests: Iterable[Latencies], objectives: Objectives, seconds: float) -> float:
    """Goodput at a given load: requests a second that meet all objectives (vLLM's `--goodput`)."""
    return sum(map(objectives.are_met, requests)) / seconds


def highest_rate(attainment: Mapping[float, float], share: float = 0.9) -> float:
    """Goodput as a capacity: of the request rates measured, {rate: attainment}, the highest at which at least `share` of the
    requests met all objectives; 0 where none did (DistServe, OSDI 2024, section 2; divide by the number of GPUs)."""
    return max((rate for rate, attained in attainment.items() if attained >= share), default=0.0)
