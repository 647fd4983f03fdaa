"""Every latency by hand: three requests of known times."""

import pytest
from kvscope.engine.latency import (
    Objectives,
    highest_rate,
    normalized_latency,
    pooled_inter_token_latencies,
    request_goodput,
    time_per_output_token,
)
from kvscope.engine.outputs import RequestMetrics

LONG = RequestMetrics(10.0, scheduled=11.0, first_token=13.0, finished=21.0, num_output_tokens=5)
ONE_TOKEN = RequestMetrics(0.0, scheduled=0.0, first_token=2.0, finished=2.0, num_output_tokens=1)
QUICK = RequestMetrics(4.0, scheduled=4.5, first_token=5.0, finished=6.0, num_output_tokens=3)
CANCELLED_EARLY = RequestMetrics(1.0, finished=9.0)
ALL = [LONG, ONE_TOKEN, QUICK, CANCELLED_EARLY]


def test_the_intervals_of_a_request():
    assert (LONG.queue_time, LONG.prefill_time, LONG.decode_time, LONG.inference_time) == (1.0, 2.0, 8.0, 10.0)
    assert (LONG.ttft, LONG.tpot, LONG.e2e) == (3.0, 2.0, 11.0), "(11 − 3) / 4: the first token is not one of them"
    assert (ONE_TOKEN.tpot, ONE_TOKEN.e2e) == (0.0, 2.0)
    assert time_per_output_token(1.0, 9.0, 0) == 0.0


def test_what_has_not_come_yet_is_none():
    fresh = RequestMetrics(1.0)
    assert fresh.queue_time is fresh.ttft is fresh.tpot is fresh.e2e is fresh.inference_time is None
    assert (CANCELLED_EARLY.ttft, CANCELLED_EARLY.tpot, CANCELLED_EARLY.e2e) == (None, None, 8.0)


def test_gaps_are_pooled_so_that_long_outputs_weigh_more_than_in_the_mean_tpot():
    gaps = pooled_inter_token_latencies([[0.0, 1.0, 2.0, 3.0], [0.0, 5.0], [7.0], []])
    assert gaps == [1.0, 1.0, 1.0, 5.0]
    assert sum(gaps) / len(gaps) == 2.0
    per_request = [time_per_output_token(0.0, 3.0, 4), time_per_output_token(0.0, 5.0, 2)]
    assert sum(per_request) / 2 == 3.0, "the same tokens, and another number"


def test_normalized_latency_is_the_mean_over_requests():
    assert normalized_latency(ALL) == pytest.approx((11 / 5 + 2 / 1 + 2 / 3) / 3), (
        "who got no token has no latency a token"
    )
    assert normalized_latency([CANCELLED_EARLY]) == 0.0


def test_goodput_at_a_given_load_counts_who_met_all_objectives():
    assert request_goodput(ALL, Objectives(ttft=2.0, tpot=0.5), seconds=10.0) == 0.2, "a single token passes any TPOT"
    assert request_goodput(ALL, Objectives(ttft=2.0, tpot=0.5, e2e=1.9), seconds=10.0) == 0.0
    assert request_goodput(ALL, Objectives(), seconds=10.0) == 0.3, (
        "who was cancelled before its first token met nothing"
    )
    assert Objectives(ttft=2.0).attainment(ALL) == 0.5
    assert Objectives().attainment([]) == 0.0


def test_goodput_as_a_capacity_is_the_highest_rate_that_still_attains():
    measured = {4.0: 0.97, 1.0: 1.0, 8.0: 0.9, 16.0: 0.4}
    assert highest_rate(measured) == 8.0, "ninety of a hundred are enough"
    assert highest_rate(measured, share=0.95) == 4.0
    assert highest_rate({1.0: 0.5}) == 0.0
