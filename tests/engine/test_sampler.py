"""Sampling: what a row draws depends on that row alone, and log-probabilities are of the raw logits."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from kvscope.engine import SamplingParams
from kvscope.engine.sampling.random import mix, request_seed, uniforms
from kvscope.engine.sampling.sampler import Sampler, SampleRow
from kvscope.kernels import ops

VOCAB = 50
INF = math.inf


@pytest.fixture(params=["reference", "cpu"])
def sampler(request):
    return Sampler(ops.resolve(request.param, "cpu", torch.float32), VOCAB, seed=11)


def logits_of(rows, seed=0):
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def row(logits_row=0, request_id=1, child=0, index=0, masked=(), **params):
    return SampleRow(logits_row, SamplingParams(**params), request_id, child, index, masked)


# --- random numbers


def test_the_mix_is_splitmix64():
    """First outputs of SplitMix64 seeded with 0: mix of γ, 2γ, 3γ (published test vectors)."""
    gamma = 0x9E3779B97F4A7C15
    outputs = [mix(i * gamma & (1 << 64) - 1) for i in (1, 2, 3)]
    assert outputs == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_uniforms_are_a_pure_function_of_each_row():
    seeds, children, indices = [7, 7, 7, 8, 2**64 - 1], [0, 1, 0, 0, 63], [0, 0, 1, 0, 10**6]
    together = uniforms(seeds, children, indices)
    alone = [uniforms([s], [c], [i])[0] for s, c, i in zip(seeds, children, indices, strict=True)]
    assert together.tolist() == alone and len(set(alone)) == 5
    assert together.dtype == np.float64 and all(0 <= u < 1 for u in together)


@pytest.mark.parametrize("axis", ["seed", "child", "index"])
def test_uniforms_are_uniform_along_every_axis_and_neighbours_are_independent(axis):
    count = np.arange(20_000)
    zero = np.zeros_like(count)
    u = uniforms(*(count if axis == name else zero for name in ("seed", "child", "index")))
    counts = np.histogram(u, bins=100, range=(0, 1))[0]
    assert ((counts - 200) ** 2 / 200).sum() < 160  # χ² with 99 degrees of freedom: p ≈ 1e-4
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.03
    assert abs(u.mean() - 0.5) < 0.01


def test_a_request_without_seed_draws_from_the_engines_and_its_own_id():
    assert request_seed(5, 1, 9) == request_seed(5, 2, 8) == 5
    assert len({request_seed(None, engine, request) for engine in range(3) for request in range(3)}) == 9
    assert request_seed(-1, 0, 1) == 2**64 - 1


# --- tokens


def test_greedy_takes_the_largest_and_the_lowest_id_of_equals(sampler):
    logits = torch.zeros(2, VOCAB)
    logits[1, [7, 30]] = 3.0
    assert sampler.sample(logits, [row(temperature=0), row(1, temperature=0)]).token_ids == [0, 7]


def test_a_row_draws_the_same_alone_and_in_any_batch(sampler):
    logits = logits_of(6)
    rows = [row(i % 6, request_id=i, child=i % 3, index=i, seed=i if i % 2 else None, top_k=10) for i in range(24)]
    rows += [row(i, request_id=99, temperature=0) for i in range(6)]
    together = sampler.sample(logits.clone(), rows).token_ids
    for one, token_id in zip(rows, together, strict=True):
        alone = sampler.sample(logits[one.logits_row : one.logits_row + 1].clone(), [_moved(one)]).token_ids
        assert alone == [token_id]
    assert sampler.sample(logits.clone(), rows[::-1]).token_ids == together[::-1]


def _moved(one):
    return SampleRow(0, one.params, one.request_id, one.child, one.num_output_tokens, one.masked_token_ids)


def test_the_same_token_is_drawn_again_after_a_preemption(sampler):
    """A resumed sample has the same child and the same number of output tokens, wherever its row now is."""
    logits = logits_of(1)
    first = sampler.sample(logits.clone(), [row(request_id=4, index=17)])
    again = sampler.sample(logits.expand(3, -1).clone(), [row(0), row(1), row(2, request_id=4, index=17)])
    assert again.token_ids[2] == first.token_ids[0]


def test_n_children_share_logits_and_draw_apart(sampler):
    draws = sampler.sample(logits_of(1), [row(child=i, seed=3, temperature=2.0) for i in range(20)]).token_ids
    assert len(set(draws)) > 5


def test_frequencies_follow_the_distribution(sampler):
    logits = torch.full((1, VOCAB), -INF)
    logits[0, :4] = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    rows = [row(seed=1, index=i) for i in range(4000)]
    counts = Counter(sampler.sample(logits, rows).token_ids)
    assert all(abs(counts[i] / 4000 - p) < 0.03 for i, p in enumerate([0.4, 0.3, 0.2, 0.1]))


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_k": -1}, {0, 1, 2, 3}),
        ({"top_k": 10**6}, {0, 1, 2, 3}),
        ({"top_p": 0.39}, {0}),
        ({"top_p": 0.41}, {0, 1}),
        ({"top_p": 1.0}, {0, 1, 2, 3}),
        ({"top_p": 1e-9}, {0}),
        ({"min_p": 0.49}, {0, 1, 2}),
        ({"top_k": 3, "top_p": 0.69}, {0, 1}),  # 0.4 and 0.3 of the 0.9 that top_k left: 0.78
        ({"temperature": 1e-6}, {0}),
        ({"temperature": 1e-30}, {0}),
    ],
)
def test_filters_keep_exactly_these(sampler, params, kept):
    logits = torch.full((1, VOCAB), -INF)
    logits[0, :4] = torch.tensor([0.4, 0.2, 0.2, 0.1] if "min_p" in params else [0.4, 0.3, 0.2, 0.1]).log()
    drawn = set(sampler.sample(logits, [row(seed=2, index=i, **params) for i in range(400)]).token_ids)
    assert drawn == kept


def test_a_tie_at_the_edge_of_top_k_keeps_the_lower_id(sampler):
    logits = torch.full((1, VOCAB), -INF)
    logits[0, :3] = torch.tensor([0.4, 0.3, 0.3]).log()
    drawn = set(sampler.sample(logits, [row(seed=2, index=i, top_k=2) for i in range(300)]).token_ids)
    assert drawn == {0, 1}


# --- masks, log-probabilities, broken rows


def test_masked_ids_are_never_chosen_and_only_in_their_row(sampler):
    logits = torch.zeros(2, VOCAB)
    logits[:, 9] = 50.0
    result = sampler.sample(logits, [row(0, temperature=0, masked=(9, 0)), row(1, temperature=0)])
    assert result.token_ids == [1, 9]


def test_logprobs_are_of_the_raw_logits_best_first_with_the_chosen(sampler):
    logits = logits_of(2)
    raw = torch.log_softmax(logits, -1)
    best = raw.topk(3, dim=-1)
    masked = (int(best.indices[0, 0]),)
    rows = [
        row(0, temperature=0, logprobs=2, masked=masked),
        row(1, temperature=0),
        row(1, temperature=2.0, seed=5, top_k=40, logprobs=0),
        row(0, temperature=0, logprobs=20),
    ]
    result = sampler.sample(logits.clone(), rows)
    first, nothing, only_chosen, many = result.logprobs
    assert list(first) == best.indices[0, :2].tolist() and result.token_ids[0] == int(best.indices[0, 1])
    assert nothing is None and list(only_chosen) == [result.token_ids[2]] and len(many) == 20
    for top, index in ((first, 0), (only_chosen, 1), (many, 0)):
        assert all(value == pytest.approx(float(raw[index, token]), abs=1e-6) for token, value in top.items())
    assert list(many.values()) == sorted(many.values(), reverse=True)


def test_the_chosen_token_joins_the_best_ones(sampler):
    logits = torch.zeros(1, VOCAB)
    logits[0, 3] = 5.0
    (top,) = sampler.sample(logits, [row(temperature=0, logprobs=1, masked=(3,))]).logprobs
    assert list(top) == [3, 0]


@pytest.mark.parametrize("value", [math.nan, INF])
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_rows_that_are_not_finite_are_reported_and_the_others_sampled(sampler, value, temperature):
    logits = logits_of(3)
    expected = sampler.sample(logits.clone(), [row(0, temperature=0), row(2, temperature=0)]).token_ids
    logits[1, 17] = value
    rows = [row(0, temperature=0), row(1, temperature=temperature, logprobs=1), row(2, temperature=0)]
    result = sampler.sample(logits, [*rows, row(1, child=1, temperature=temperature)])
    assert result.invalid == [1, 3] and result.token_ids == [expected[0], -1, expected[1], -1]
    assert result.logprobs == [None] * 4


def test_a_row_of_nothing_is_reported(sampler):
    assert sampler.sample(torch.full((1, VOCAB), -INF), [row(temperature=0)]).invalid == [0]


def test_no_rows_no_tokens(sampler):
    assert sampler.sample(torch.zeros(0, VOCAB), []).token_ids == []
