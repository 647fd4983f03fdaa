"""Registers as values: each operation against torch. The vector ones run where the CPU has bfloat16 dot products."""

import numba
import pytest
import torch
from kvscope.kernels.cpu import scalars, simd
from kvscope.kernels.cpu.compiler import CPU, array_at, kernel

vectors = pytest.mark.skipif(not CPU.avx512_bf16, reason="vector operations need avx512_bf16")
INF = float("inf")


@kernel("void(int64, int64, int64, int64)")
def scalar_operations(x, powers, rounded, n):
    values, to, bits = (
        array_at(x, n, numba.float32),
        array_at(powers, n, numba.float32),
        array_at(rounded, n, numba.uint16),
    )
    for i in range(n):
        to[i] = scalars.exp2_f32(values[i])
        bits[i] = scalars.f32_to_bf16(values[i])


@kernel("void(int64, int64)")
def vector_operations(x, out):
    v = simd.load_f32(x)
    simd.store_f32(out, simd.exp2(v))
    simd.store_f32(out + 64, simd.splat(simd.sum_of(v)))
    simd.store_f32(out + 128, simd.splat(simd.max_of(v)))
    simd.store_f32(out + 192, simd.maximum(simd.fma(v, v, v), simd.sub(simd.add(v, v), simd.mul(v, v))))
    simd.store_as_bf16(out + 256, v)
    simd.prefetch(x - (1 << 40))  # not mapped: no fault


@kernel("void(int64, int64, int64, int64)")
def pair_products(out, x, w, pairs):
    acc = simd.zeros()
    for k in range(pairs):
        acc = simd.dot_bf16(acc, simd.broadcast_pair(x + 4 * k), simd.load_bf16(w + 64 * k))
    simd.store_f32(out, acc)


def test_scalars_on_any_machine():
    x = torch.linspace(-140, 127.4, 100_003)
    powers, rounded = torch.empty_like(x), torch.empty(len(x), dtype=torch.bfloat16)
    scalar_operations(x.data_ptr(), powers.data_ptr(), rounded.data_ptr(), len(x))
    exact = torch.exp2(x.double())
    assert ((powers - exact) / exact)[x >= -126].abs().max() < 3e-7
    assert not powers[x < -126].any()
    assert torch.equal(rounded, x.bfloat16())


@vectors
@pytest.mark.parametrize("seed", range(3))
def test_vectors(seed):
    x = torch.randn(16, generator=torch.Generator().manual_seed(seed)) * 20
    out = torch.empty(5, 16)
    vector_operations(x.data_ptr(), out.data_ptr())
    torch.testing.assert_close(out[0], torch.exp2(x.double()).float(), rtol=3e-7, atol=0)
    torch.testing.assert_close(out[1], x.sum().expand(16), rtol=1e-5, atol=1e-4)
    assert torch.equal(out[2], x.max().expand(16))
    torch.testing.assert_close(out[3], torch.maximum(x * x + x, x + x - x * x), rtol=1e-6, atol=1e-5)
    assert torch.equal(out[4].view(torch.bfloat16)[:16], x.bfloat16())


@vectors
def test_exp2_at_its_ends():
    ends = [
        -INF,
        -1e30,
        -127.0,
        -126.5,
        -126.0,
        -0.0,
        0.0,
        1.0,
        127.0,
        127.9,
        128.0,
        1e30,
        INF,
        float("nan"),
        0.5,
        -0.5,
    ]
    x, out = torch.tensor(ends), torch.empty(5, 16)
    vector_operations(x.data_ptr(), out.data_ptr())
    want = torch.where(x < -126, 0.0, torch.exp2(x))
    torch.testing.assert_close(out[0], want, rtol=3e-7, atol=0, equal_nan=True)


@vectors
def test_pair_products():
    x, w = torch.randn(64).bfloat16(), torch.randn(32, 16, 2).bfloat16()
    out = torch.empty(16)
    pair_products(out.data_ptr(), x.data_ptr(), w.data_ptr(), 32)
    torch.testing.assert_close(out.double(), (w.double() * x.double().view(32, 1, 2)).sum((0, 2)), rtol=1e-5, atol=1e-5)
