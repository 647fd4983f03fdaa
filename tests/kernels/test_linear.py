"""The CPU linears against plain torch in float64: every shape of padding, both dtypes, int8, and the promises on top."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from kvscope.kernels import reference
from kvscope.kernels.cpu import compiler, linear_steps
from kvscope.kernels.cpu.compiler import CPU, kernel
from kvscope.kernels.cpu.linear import linear, linear_add, linear_silu_mul, pack_linear
from kvscope.kernels.cpu.simd import I32X16, I64, load, operation, store
from numba import int64, types

DTYPES = [torch.float32, torch.bfloat16]
QUANTIZATIONS = [None, "int8", "int8-dynamic"]
EPS = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}  # half a unit in the last place
# out features, in features, rows: one of each; around the panel (16, 32), the tile (6, 12), the word (2) and the chunk (128)
SHAPES = [(1, 1, 1), (2, 3, 2), (31, 64, 5), (33, 7, 12), (100, 129, 13), (64, 128, 25), (49, 577, 31), (576, 1536, 3)]


def problem(n, k, m, dtype, *, bias, seed=0):
    """Random (x [m, k], weight [n, k], bias [n] or None), already rounded to dtype."""
    g = torch.Generator().manual_seed(seed)
    x, weight, b = (torch.randn(shape, generator=g).to(dtype) for shape in ((m, k), (n, k), (n,)))
    return x, weight, b if bias else None


def exact(x, weight, bias):
    return F.linear(x.double(), weight.double(), None if bias is None else bias.double())


@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("n", "k", "m"), SHAPES)
def test_matches_float64(n, k, m, bias, dtype, out_dtype):
    x, weight, b = problem(n, k, m, dtype, bias=bias)
    got = linear(x, pack_linear(weight, b, dtype), out_dtype=out_dtype)
    want = exact(x, weight, b)
    assert got.dtype == out_dtype and got.shape == (m, n)
    # float32 accumulation of k products, then one rounding to the output's type
    sums = EPS[torch.float32] * 4 * k**0.5 * F.linear(x.double().abs(), weight.double().abs()) + 1e-6
    assert ((got.double() - want).abs() <= sums + 1.01 * EPS[out_dtype] * want.abs()).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("n", "k", "m"), SHAPES)
def test_a_product_is_added_to_the_residual_stream(n, k, m, bias, quantization, dtype):
    x, weight, b = problem(n, k, m, dtype, bias=bias)
    packed = pack_linear(weight, b, dtype, quantization)
    before = torch.randn(m, n + 3)
    residual = before.clone()
    linear_add(x, packed, residual[:, 1 : n + 1])  # columns of a wider tensor
    want = before[:, 1 : n + 1] + linear(x, packed, out_dtype=torch.float32)
    torch.testing.assert_close(residual[:, 1 : n + 1], want, rtol=2e-6, atol=2e-6 * k**0.5)
    assert torch.equal(residual[:, 0], before[:, 0]) and torch.equal(residual[:, n + 1 :], before[:, n + 1 :])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("n", "k", "m"), SHAPES)
def test_a_gate_is_applied_to_sums_that_were_not_rounded(n, k, m, bias, quantization, dtype):
    x, weight, b = problem(2 * n, k, m, dtype, bias=bias)
    got = linear_silu_mul(x, pack_linear(weight, b, dtype, quantization, gated=True))
    gate, up = linear(x, pack_linear(weight, b, dtype, quantization), out_dtype=torch.float32).double().chunk(2, -1)
    want = F.silu(gate) * up
    assert got.dtype == dtype and got.shape == (m, n)
    sums = 4e-6 * (k**0.5 + gate.abs() + up.abs()) * (1 + gate.abs() + up.abs())
    assert ((got.double() - want).abs() <= sums + 1.01 * EPS[dtype] * want.abs()).all()


def test_gates_far_from_zero():
    packed = pack_linear(torch.tensor([[1.0], [1.0]]), None, torch.float32, gated=True)
    x = torch.tensor([[-1e30], [-200.0], [200.0], [float("nan")]])
    got = linear_silu_mul(x, packed)[:, 0]
    torch.testing.assert_close(got, F.silu(x[:, 0]) * x[:, 0], rtol=1e-5, atol=1e-30, equal_nan=True)


def test_a_weight_serves_the_product_it_was_packed_for():
    x, residual = torch.ones(2, 4), torch.zeros(2, 6)
    gated, plain = (pack_linear(torch.ones(6, 4), None, torch.float32, gated=g) for g in (True, False))
    for call in (
        lambda: linear(x, gated),
        lambda: linear_silu_mul(x, plain),
        lambda: linear_add(x, gated, residual[:, :3]),
    ):
        with pytest.raises(ValueError, match="gated="):
            call()
    with pytest.raises(ValueError, match="residual is"):
        linear_add(x, plain, residual[:, :5])
    with pytest.raises(ValueError, match="7 rows"):
        pack_linear(torch.ones(7, 4), None, torch.float32, gated=True)


@pytest.mark.parametrize("k", [576, 1536, 8192])
def test_float32_is_as_exact_as_torch(k):
    x, weight, _ = problem(320, k, 32, torch.float32, bias=False)
    want = exact(x, weight, None)
    ours = (linear(x, pack_linear(weight, None, torch.float32)) - want).square().mean().sqrt()
    theirs = (F.linear(x, weight) - want).square().mean().sqrt()
    assert ours <= 1.1 * theirs


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_a_row_does_not_depend_on_its_neighbours_or_on_threads(quantization, dtype):
    x, weight, b = problem(200, 300, 700, dtype, bias=True)
    packed = pack_linear(weight, b, dtype, quantization)
    gated = pack_linear(weight, b, dtype, quantization, gated=True)
    together, products, stream = linear(x, packed), linear_silu_mul(x, gated), torch.ones(700, 200)
    linear_add(x, packed, stream)
    for rows in (1, 2, 7, 12, 13, 32):
        some, added = slice(300, 300 + rows), torch.ones(rows, 200)
        linear_add(x[some], packed, added)
        assert torch.equal(linear(x[some], packed), together[some])
        assert torch.equal(linear_silu_mul(x[some], gated), products[some]) and torch.equal(added, stream[some])
    before = compiler.num_threads()
    try:
        compiler.set_num_threads(1)
        assert torch.equal(linear(x, packed), together)
    finally:
        compiler.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("row_bytes", [64, 40_000])  # row blocks of many tiles, and of the one that always fits
def test_more_rows_than_a_block(row_bytes, dtype):
    k = row_bytes // dtype.itemsize
    x, weight, _ = problem(40, k, 90 if k > 1000 else 5000, dtype, bias=False)
    got = linear(x, pack_linear(weight, None, dtype), out_dtype=torch.float32)
    torch.testing.assert_close(got.double(), exact(x, weight, None), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_strided_x(quantization, dtype):
    x, weight, _ = problem(50, 24, 9, dtype, bias=False)
    packed = pack_linear(weight, None, dtype, quantization)
    wide = torch.zeros(9, 100, dtype=dtype)
    wide[:, 10:34] = x
    assert torch.equal(linear(wide[:, 10:34], packed), linear(x, packed))  # rows of a larger tensor
    assert torch.equal(linear(x.T.contiguous().T, packed), linear(x, packed))  # a transpose


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_no_rows(quantization, dtype):
    _, weight, _ = problem(5, 6, 1, dtype, bias=False)
    assert linear(torch.empty(0, 6, dtype=dtype), pack_linear(weight, None, dtype, quantization)).shape == (0, 5)


def test_bfloat16_rounds_to_nearest_even_and_keeps_the_special_values():
    values = torch.tensor(
        [[1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 3.0e38, 3.4e38, float("inf"), -float("inf"), float("nan")]]
    )
    # x = 1 with the value as a bias is the one way to any float32 before the rounding
    packed = pack_linear(torch.zeros(8, 2), values[0], torch.float32)
    got = linear(torch.ones(1, 2), packed, out_dtype=torch.bfloat16)
    torch.testing.assert_close(got, values.bfloat16(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (33, 7), (128, 64), (100, 129)])
def test_rows_give_the_weight_back(n, k, dtype):
    _, weight, _ = problem(n, k, 1, dtype, bias=False)
    packed = pack_linear(weight, None, dtype)
    ids = torch.tensor([n - 1, 0, n // 2, 0])
    assert torch.equal(packed.rows(ids), weight[ids])
    assert torch.equal(packed.rows(ids.int()), weight[ids])
    assert torch.equal(packed.rows(torch.arange(n)), weight)
    assert packed.rows(ids[:0]).shape == (0, k)


@pytest.mark.parametrize("wrong", [-1, 100])
def test_rows_refuse_an_id_outside(wrong):
    packed = pack_linear(torch.zeros(100, 8), None, torch.float32)
    with pytest.raises(IndexError, match="ids must lie in 0 to 99"):
        packed.rows(torch.tensor([5, wrong]))


def test_one_copy_of_the_weight():
    weight = torch.randn(96, 64)
    packed = pack_linear(weight, None, torch.float32)
    assert packed.num_bytes == weight.nbytes
    before = linear(torch.ones(1, 64), packed)
    weight.zero_()  # the packed weight is its own
    assert torch.equal(linear(torch.ones(1, 64), packed), before)


def test_converts_the_checkpoint_to_dtype():
    weight = torch.randn(40, 16, dtype=torch.float16)
    assert torch.equal(pack_linear(weight, None, torch.bfloat16).rows(torch.arange(40)), weight.bfloat16())


# ------------------------------------------------------------------------------------------------------------ int8


@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quantization", QUANTIZATIONS[1:])
@pytest.mark.parametrize(("n", "k", "m"), [*SHAPES, (70, 8192, 9)])
def test_int8_is_the_reference_but_for_the_order_of_sums(n, k, m, quantization, dtype, out_dtype):
    x, weight, b = problem(n, k, m, dtype, bias=n % 2 == 0)
    weight[n // 2] = 0
    plain = reference.pack_linear(weight, b, dtype, quantization)
    got = linear(x, pack_linear(weight, b, dtype, quantization), out_dtype=out_dtype)
    if plain.dynamic:
        whole, scale = reference.quantize_groups(x)
        x = (whole.double() * scale).flatten(1)[:, :k]
    rounded = plain.weight.double() * plain.scale[:, None]
    want = exact(x, rounded, plain.bias)
    assert got.dtype == out_dtype and got.shape == (m, n)
    sums = EPS[torch.float32] * 4 * k**0.5 * F.linear(x.double().abs(), rounded.abs()) + 1e-6
    assert ((got.double() - want).abs() <= sums + 1.01 * EPS[out_dtype] * want.abs()).all()


def _widening(widened, name):
    """A kernel: 64 int8 at an address, as two vectors of 16 pairs of bfloat16."""

    @operation(types.void, int64, int64)
    def emit(builder, source, to):
        for half, pairs in enumerate(widened(builder, load(builder, source, I32X16))):
            store(builder, pairs, builder.add(to, I64(64 * half)))

    @kernel("void(int64, int64)", name=name)
    def widen(source, to):
        emit(source, to)

    return widen


@pytest.mark.skipif(not CPU.avx512_bf16, reason="vectors of bfloat16 need avx512_bf16")
def test_both_ways_to_widen_int8_are_exact():
    widen = [_widening(linear_steps._shifted, "shifted")]
    if CPU.avx512_vbmi:
        widen.append(_widening(linear_steps._looked_up, "looked_up"))
    every = torch.cat([torch.arange(-127, 128), torch.tensor([0])]).to(torch.int8).view(4, 16, 2, 2)
    for function in widen:
        for values in every:
            made = torch.empty(2, 16, 2, dtype=torch.bfloat16)
            function(values.contiguous().data_ptr(), made.data_ptr())
            assert torch.equal(made, values.transpose(0, 1).to(torch.bfloat16))


def test_int8_uses_all_of_its_range_row_by_row():
    _, weight, _ = problem(64, 100, 1, torch.float32, bias=False)
    weight *= torch.logspace(-20, 10, 64)[:, None]
    int8, scale = reference.quantize_weight(weight)
    assert (int8.abs().amax(1) == 127).all()
    assert ((int8 * scale[:, None] - weight).abs() <= 0.5001 * scale[:, None]).all()
    packed = pack_linear(weight, None, torch.float32, "int8")
    assert torch.equal(packed.rows(torch.tensor([7, 39])), int8[[7, 39]] * scale[[7, 39], None])
    assert packed.num_bytes == 64 * 100 + 4 * 64  # one byte a weight, and the scales


def test_large_weights_are_rounded_in_pieces(monkeypatch):
    _, weight, _ = problem(33, 100, 1, torch.bfloat16, bias=False)
    whole = reference.quantize_weight(weight)
    monkeypatch.setattr(reference, "PIECE", 1000)
    assert all(torch.equal(a, b) for a, b in zip(reference.quantize_weight(weight), whole, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_group_of_32_has_its_own_scale(dtype):
    """One huge value costs its own group all digits, and the next group none; 127 is the largest that is kept exactly."""
    x = torch.zeros(1, 70, dtype=dtype)
    x[0, :3], x[0, 31], x[0, 32:35], x[0, 69] = torch.tensor([1.0, -2, 3]), 1e30, torch.tensor([-127.0, 5, 1]), 2**-90
    got = linear(x, pack_linear(torch.eye(70), None, dtype, "int8-dynamic"), out_dtype=torch.float32)[0]
    assert not got[:31].any() and got[31] == pytest.approx(float(x[0, 31]))
    torch.testing.assert_close(got[32:35], torch.tensor([-127.0, 5, 1]), rtol=1e-6, atol=0)
    assert got[69] == pytest.approx(2**-90)
    x[0, 69] = 2**-110  # of a group whose reciprocal would be infinite
    assert linear(x, pack_linear(torch.eye(70), None, dtype, "int8-dynamic"))[0, 69] == 0


@pytest.mark.parametrize("quantization", QUANTIZATIONS[1:])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_int8_hides_no_broken_activation(value, quantization):
    x, weight, _ = problem(33, 70, 3, torch.float32, bias=False)
    x[1, 40] = value
    finite = linear(x, pack_linear(weight, None, torch.float32, quantization)).isfinite()
    assert finite[[0, 2]].all() and not finite[1].any()


def test_the_default_dtype_of_torch_is_the_users():
    """What is float32 to a kernel stays so: it reads addresses."""
    script = """
import torch
torch.set_default_dtype(torch.bfloat16)
from kvscope.kernels.cpu import linear, pack_linear
from kvscope.kernels.cpu.linear_groups import rounded_rows
x, weight = torch.eye(3, 64, dtype=torch.float32), torch.arange(64 * 70, dtype=torch.float32).view(70, 64).sin()
for quantization, most in (None, 1e-6), ("int8", 0.01), ("int8-dynamic", 0.01):
    got = linear(x, pack_linear(weight, None, torch.float32, quantization))
    assert (got - weight[:, :3].T).abs().max() < most, quantization
assert torch.equal(rounded_rows(x), x)
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_errors_name_what_is_wrong():
    weight = torch.zeros(8, 4)
    packed = pack_linear(weight, None, torch.float32)
    with pytest.raises(ValueError, match="float16"):
        pack_linear(weight, None, torch.float16)
    with pytest.raises(ValueError, match=r"quantization='int4': must be one of None, 'int8', 'int8-dynamic'"):
        pack_linear(weight, None, torch.float32, "int4")
    with pytest.raises(ValueError, match=r"bias has shape \(7,\), not \[8\]"):
        pack_linear(weight, torch.zeros(7), torch.float32)
    with pytest.raises(ValueError, match=r"\(8, 0\)"):
        pack_linear(torch.zeros(8, 0), None, torch.float32)
    with pytest.raises(ValueError, match=r"\[1, 5\].*takes torch.float32 \[tokens, 4\]"):
        linear(torch.zeros(1, 5), packed)
    with pytest.raises(ValueError, match=r"x is torch\.bfloat16"):
        linear(torch.zeros(1, 4, dtype=torch.bfloat16), packed)
    with pytest.raises(ValueError, match=r"out_dtype=torch\.float16"):
        linear(torch.zeros(1, 4), packed, out_dtype=torch.float16)
