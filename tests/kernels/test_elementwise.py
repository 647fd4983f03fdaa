"""Norms, rotary embedding and SiLU against float64, in every mixture of element types."""

import pytest
import torch
from kvscope.kernels import ops, reference
from kvscope.kernels.cpu import elementwise
from problems import ROUNDING

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(1, 576), (32, 576), (3, 1), (5, 17), (700, 96), (300, 600)]  # the last is shared between threads


def near(got, want, sums=4e-7):
    """Within one rounding to the type of `got` and `sums` of float32 arithmetic, relative and near zero absolute."""
    off = (got.double() - want).abs()
    assert (off <= (1.01 * ROUNDING[got.dtype] + sums) * want.abs() + sums).all(), f"off by {off.max():.2e}"


def exact_norm(x, weight, eps):
    x = x.double()
    return weight.double() * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rms_norm(shape, dtype, weight_dtype, out_dtype):
    g = torch.Generator().manual_seed(0)
    wide = torch.randn(shape[0], 2 * shape[1], generator=g).to(dtype)
    x, weight = wide[:, : shape[1]], torch.randn(shape[1], generator=g).to(weight_dtype)  # x: rows with a stride
    got = elementwise.rms_norm(x, weight, 1e-5, out_dtype=out_dtype)
    assert got.dtype == out_dtype
    near(got, exact_norm(x, weight, 1e-5), 2e-6)
    residual = torch.randn(*shape, generator=g)
    want = residual + x.float()
    got = elementwise.add_rms_norm(x, residual, weight, 1e-5, out_dtype=out_dtype)
    assert torch.equal(residual, want)
    near(got, exact_norm(want, weight, 1e-5), 2e-6)


def test_norm_of_zeros_and_of_tiny_rows():
    zeros = torch.zeros(2, 64)
    assert not elementwise.rms_norm(zeros, torch.ones(64), 1e-6, out_dtype=torch.float32).any()
    tiny = torch.full((1, 64), 1e-4)
    near(
        elementwise.rms_norm(tiny, torch.ones(64), 1e-5, out_dtype=torch.float32),
        exact_norm(tiny, torch.ones(64), 1e-5),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "dim", "turned"), [((9, 3), 64, 64), ((2, 1), 80, 32), ((5, 5), 48, 48), ((64, 8), 128, 128)]
)
@pytest.mark.parametrize("tokens", [1, 33])
def test_rotary(tokens, heads, dim, turned, dtype):
    g = torch.Generator().manual_seed(0)
    qkv = torch.randn(tokens, sum(heads) + heads[1], dim, generator=g).to(dtype)
    angles = torch.rand(100, turned // 2, generator=g, dtype=torch.float64) * 6.28
    table = torch.cat([angles.cos(), angles.sin()], dim=1).float()
    positions = torch.randint(0, 100, (tokens,), generator=g)
    before = qkv.double()
    elementwise.rotary(qkv[:, : heads[0]], qkv[:, heads[0] : sum(heads)], positions, table)
    want = before.clone()
    cos, sin = table[positions].double().unsqueeze(1).chunk(2, dim=-1)
    a, b = before[..., : turned // 2], before[..., turned // 2 : turned]
    want[..., : turned // 2], want[..., turned // 2 : turned] = a * cos - b * sin, b * cos + a * sin
    want[:, sum(heads) :] = before[:, sum(heads) :]  # v is left alone
    near(qkv, want, 1e-6)


@pytest.mark.parametrize("implementation", ["reference", "cpu"])
@pytest.mark.parametrize("bad", [-1, 10])
def test_a_position_outside_the_table_is_refused(implementation, bad):
    q = torch.randn(3, 2, 8)
    with pytest.raises(IndexError, match=f"positions hold {bad}; the rotary table reaches from 0 to 9"):
        ops.resolve(implementation).rotary(q, q.clone(), torch.tensor([0, bad, 1]), torch.ones(10, 8))


def test_rotary_needs_the_heads_of_a_token_side_by_side():
    q = torch.randn(2, 3, 8).transpose(0, 1)
    with pytest.raises(ValueError, match="q must hold"):
        elementwise.rotary(q, torch.randn(3, 2, 8), torch.arange(3), torch.ones(10, 8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_silu_mul(shape, dtype):
    gate_up = (torch.randn(shape[0], 2 * shape[1], generator=torch.Generator().manual_seed(0)) * 4).to(dtype)
    gate, up = gate_up.double().chunk(2, dim=1)
    near(elementwise.silu_mul(gate_up), gate * torch.sigmoid(gate) * up, 1e-6)


def test_silu_at_the_ends():
    gate = torch.tensor([0.0, -0.0, 1e4, -1e4, 88.0, -88.0, torch.inf, torch.nan])
    got = elementwise.silu_mul(torch.cat([gate, torch.ones(8)])[None])[0]
    torch.testing.assert_close(got, torch.nn.functional.silu(gate), equal_nan=True, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("wrong", [lambda x: x * 1.0001, lambda x: x.roll(1, 1), lambda x: x + 1e-4])
def test_a_wrong_kernel_fails_the_same_check(wrong):
    x, weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)), torch.ones(64)
    near(reference.rms_norm(x, weight, 1e-5, out_dtype=torch.float32), exact_norm(x, weight, 1e-5), 2e-6)
    with pytest.raises(AssertionError, match="off by"):
        near(wrong(elementwise.rms_norm(x, weight, 1e-5, out_dtype=torch.float32)), exact_norm(x, weight, 1e-5), 2e-6)
