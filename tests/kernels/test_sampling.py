"""The sampling rule: small cases by hand, the CPU against the reference, and frequencies against probabilities."""

import pytest
import torch
from kvscope.kernels import ops

BOTH = pytest.mark.parametrize("k", [ops.resolve("reference"), ops.resolve("cpu")], ids=lambda k: k.name)
NAN, INF = float("nan"), float("inf")


def draw(k, logits, uniform, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """One token for every number of `uniform` [n], from the same logits [V] or from a row each [n, V]."""
    n = len(uniform)
    logits = logits.expand(n, -1).contiguous()
    options = (torch.full((n,), float(x)) for x in (temperature, top_p, min_p))
    temperature, top_p, min_p = options
    return k.sample(logits, temperature, torch.full((n,), top_k, dtype=torch.int32), top_p, min_p, uniform)


def kept(k, probabilities, **options):
    """The tokens that can come out: the uniform numbers are dense enough to meet every one of a few."""
    uniform = torch.linspace(0, 1, 401, dtype=torch.float64)[:-1]
    return sorted(set(draw(k, torch.tensor(probabilities).log(), uniform, **options).tolist()))


@BOTH
def test_ties_at_the_edge_of_top_k_go_to_the_lower_id(k):
    assert kept(k, [0.4, 0.3, 0.3, 0.0], top_k=2) == [0, 1]
    assert kept(k, [0.3, 0.4, 0.3, 0.0], top_k=2) == [0, 1]
    assert kept(k, [0.3, 0.3, 0.4, 0.0], top_k=2) == [0, 2]
    assert kept(k, [0.25] * 4, top_k=3) == [0, 1, 2]
    assert kept(k, [0.4, 0.3, 0.3, 0.0], top_k=1) == [0]


@BOTH
def test_zero_and_minus_zero_are_equal(k):
    logits = torch.tensor([-0.0, 0.0, -0.0, 0.0])
    uniform = torch.linspace(0, 0.99, 50, dtype=torch.float64)
    assert set(draw(k, logits, uniform, top_k=2).tolist()) == {0, 1}
    assert k.greedy(logits[None]).tolist() == [0]


@BOTH
def test_top_p_keeps_the_smallest_prefix_that_reaches_it(k):
    assert kept(k, [0.5, 0.5], top_p=0.5) == [0]
    assert kept(k, [0.5, 0.5], top_p=0.51) == [0, 1]
    assert kept(k, [0.5, 0.5], top_p=1.0) == [0, 1]
    assert kept(k, [0.125, 0.5, 0.25, 0.125], top_p=0.74) == [1, 2]
    assert kept(k, [0.125, 0.5, 0.25, 0.125], top_p=0.76) == [0, 1, 2]
    assert kept(k, [0.2, 0.8], top_p=0.0) == [1]  # one token always stays


@BOTH
def test_top_p_counts_the_mass_that_top_k_left(k):
    assert kept(k, [0.4, 0.3, 0.2, 0.1], top_k=2, top_p=0.55) == [0]  # 0.4 / 0.7 = 0.571
    assert kept(k, [0.4, 0.3, 0.2, 0.1], top_p=0.55) == [0, 1]


@BOTH
def test_min_p_is_relative_to_the_largest(k):
    assert kept(k, [0.5, 0.3, 0.15, 0.05], min_p=0.25) == [0, 1, 2]
    assert kept(k, [0.5, 0.3, 0.15, 0.05], min_p=0.5) == [0, 1]
    assert kept(k, [0.5, 0.3, 0.15, 0.05], min_p=1.0) == [0]


@BOTH
def test_off_values_change_nothing(k):
    logits, uniform = torch.randn(300, generator=torch.Generator().manual_seed(1)), torch.rand(64, dtype=torch.float64)
    plain = draw(k, logits, uniform)
    for off in ({"top_k": -1}, {"top_k": 300}, {"top_k": 1000}, {"top_p": 1.0}, {"min_p": 0.0}):
        assert torch.equal(draw(k, logits, uniform, **off), plain)


@BOTH
def test_the_draw_runs_in_the_order_of_ids(k):
    uniform = torch.tensor([0.0, 0.09, 0.11, 0.59, 0.61, 0.999999], dtype=torch.float64)
    assert draw(k, torch.tensor([0.1, 0.5, 0.4]).log(), uniform).tolist() == [0, 0, 1, 1, 2, 2]
    below_one = torch.tensor([1.0 - 2.0**-53], dtype=torch.float64)
    masked = torch.tensor([0.0, 1.0, -INF, 2.0, -INF])
    for options in ({}, {"top_k": 4}, {"top_p": 0.9999}, {"min_p": 0.01}):
        assert draw(k, masked, below_one, **options).tolist() == [3]  # never a masked token


@BOTH
def test_temperature_zero_is_greedy_and_a_tiny_one_nearly(k):
    logits = torch.tensor([1.0, 3.0, 3.0, 2.0])
    uniform = torch.tensor([0.7], dtype=torch.float64)
    assert draw(k, logits, uniform, temperature=0.0).tolist() == [1]
    assert draw(k, logits, uniform, temperature=1e-3).tolist() == [2]  # the two largest stay equally likely
    assert draw(k, logits, uniform, temperature=1e-38, top_p=0.9).tolist() == [2]


@BOTH
def test_rows_without_a_finite_maximum_are_marked(k):
    logits = torch.zeros(5, 200)
    logits[0, 150], logits[1], logits[2, 3], logits[3, 0] = NAN, -INF, INF, -INF
    assert k.greedy(logits).tolist() == [-1, -1, -1, 1, 0]
    for options in ({}, {"top_k": 3}, {"top_p": 0.5}, {"temperature": 0.0}):
        got = draw(k, logits, torch.zeros(5, dtype=torch.float64), **options)
        assert got.tolist() == [-1, -1, -1, 1, 0]


SETTINGS = [
    {}, {"top_k": 1}, {"top_k": 50}, {"top_k": 7, "top_p": 0.8}, {"top_p": 0.9}, {"top_p": 0.3, "temperature": 0.7}, {"min_p": 0.1},
    {"top_k": 1000, "top_p": 0.7, "min_p": 0.01}, {"top_k": 300}, {"top_p": 0.999999}, {"temperature": 0.05, "top_p": 0.5},
    {"top_k": 100_000}, {"temperature": 8.0, "top_p": 0.99},
]  # fmt: skip


@pytest.mark.parametrize("options", SETTINGS, ids=str)
@pytest.mark.parametrize("size", [1, 17, 64, 300, 5000, 49_152])
def test_the_cpu_draws_what_the_reference_draws(size, options):
    g = torch.Generator().manual_seed(size)
    reference, cpu = ops.resolve("reference"), ops.resolve("cpu")
    for spread, step in ((1.0, None), (3.0, 0.25), (0.0, None)):  # plain, full of ties, nothing but ties
        logits = torch.randn(3, size, generator=g) * spread
        logits = (logits / step).round() * step if step else logits
        logits[0, size // 3 : size // 2] = -INF
        uniform = torch.rand(3, generator=g, dtype=torch.float64)
        assert torch.equal(cpu.greedy(logits), reference.greedy(logits))
        assert torch.equal(draw(cpu, logits, uniform, **options), draw(reference, logits, uniform, **options))


def test_rows_with_settings_of_their_own():
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(7, 2000, generator=g)[:, :1500]  # strided rows
    arguments = (
        torch.tensor([1.0, 0.0, 0.7, 1.0, 2.0, 1.0, 1.0]), torch.tensor([0, 5, 40, 700, 0, 0, 1], dtype=torch.int32),
        torch.tensor([1.0, 0.5, 0.9, 0.8, 0.7, 1.0, 1.0]), torch.tensor([0.0, 0.0, 0.05, 0.0, 0.0, 0.2, 0.0]),
        torch.rand(7, generator=g, dtype=torch.float64),
    )  # fmt: skip
    assert torch.equal(
        ops.resolve("cpu").sample(logits, *arguments), ops.resolve("reference").sample(logits, *arguments)
    )


def test_frequencies_are_the_probabilities():
    g = torch.Generator().manual_seed(0)
    logits, n = torch.randn(40, generator=g), 20_000
    uniform = torch.rand(n, generator=g, dtype=torch.float64)
    counts = draw(ops.resolve("cpu"), logits, uniform, top_k=30).bincount(minlength=40)
    p = logits.masked_fill(logits < logits.topk(30).values[-1], -INF).softmax(-1)
    assert not counts[p == 0].any()
    chi_square = ((counts - n * p).square() / (n * p).clamp(min=1e-9))[p > 0].sum()
    assert chi_square < 60  # 29 degrees of freedom: exceeded once in a thousand draws of the seed


def test_a_wrong_rule_differs_from_the_reference():
    """What the comparison above would show if a rule were off by one, or the order of the draw another."""
    g = torch.Generator().manual_seed(3)
    logits, uniform = torch.randn(64, 300, generator=g), torch.rand(64, generator=g, dtype=torch.float64)
    reference, cpu = ops.resolve("reference"), ops.resolve("cpu")
    want = draw(reference, logits, uniform, top_k=20, top_p=0.8)
    assert torch.equal(draw(cpu, logits, uniform, top_k=20, top_p=0.8), want)
    for wrong in (
        {"top_k": 21, "top_p": 0.8},
        {"top_k": 20, "top_p": 0.82},
        {"top_k": 20, "top_p": 0.8, "temperature": 1.02},
    ):
        assert not torch.equal(draw(cpu, logits, uniform, **wrong), want)
    assert not torch.equal(299 - draw(cpu, logits.flip(1), uniform, top_k=20, top_p=0.8), want)
