"""Linear layers on a GPU: dense products are cuBLAS through torch, which is at the roofline; int8 weights are a kernel.

An int8 weight (`reference.quantize_weight`) has one scale per output, so that

    out[t, n] = scale[n] · Σ_k x[t, k] · w[n, k] + bias[n]

The kernel reads bytes, and multiplies in the type of x: every int8 is exact in bfloat16 and float16. Sums are float32.
How a product is tiled depends on the number of tokens, so its rounding does too, as with cuBLAS.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .. import reference
from .attention import Tile
from .elementwise import silu_mul
from .launch import dot, launch, power_of_2


def pack_linear(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    quantization: str | None = None,
    *,
    gated: bool = False,
) -> reference.PackedLinear | reference.Int8Linear:
    if quantization == "int8-dynamic":
        raise ValueError(
            "quantization='int8-dynamic': kernels='triton' multiply int8 weights by x in its own type: 'int8'"
        )
    return reference.pack_linear(weight, bias, dtype, quantization)


@triton.jit
def _int8_linear(
    x, weight, scale, bias, out, num_tokens, out_features, in_features, x_stride,
    HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One tile of out. Grid: (tiles of tokens, tiles of outputs): neighbours read the same weights."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    x_rows = x + m.to(tl.int64)[:, None] * x_stride
    w_rows = weight + n.to(tl.int64)[None, :] * in_features
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, in_features, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        inputs = tl.load(x_rows + k[None, :], mask=(m < num_tokens)[:, None] & (k < in_features)[None, :], other=0.0)
        weights = tl.load(w_rows + k[:, None], mask=(n < out_features)[None, :] & (k < in_features)[:, None], other=0)
        sums = dot(inputs, weights.to(tl.float32).to(inputs.dtype), sums)
    sums *= tl.load(scale + n, mask=n < out_features, other=0.0)[None, :]
    if HAS_BIAS:
        sums += tl.load(bias + n, mask=n < out_features, other=0.0).to(tl.float32)[None, :]
    place = m.to(tl.int64)[:, None] * out_features + n[None, :]
    inside = (m < num_tokens)[:, None] & (n < out_features)[None, :]
    tl.store(out + place, sums.to(out.dtype.element_ty), mask=inside)


def int8_tile(dtype: torch.dtype, num_tokens: int) -> tuple[Tile, int]:
    """The tile of tokens × outputs, and how many inputs it takes at a time: tall for prompts, flat and deep for decode."""
    if dtype == torch.float32:
        return Tile(16 if num_tokens <= 16 else 32, 32, 4, 2), 32
    if num_tokens <= 64:
        return Tile(max(16, power_of_2(num_tokens)), 32, 4, 4), 128
    return Tile(128, 128, 8, 3), 64


def linear(
    x: torch.Tensor, packed: reference.PackedLinear | reference.Int8Linear, *, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    out_dtype = out_dtype or x.dtype
    if isinstance(packed, reference.PackedLinear):
        return _dense(x, packed, out_dtype)
    if x.stride(1) != 1:
        x = x.contiguous()
    tokens, (n, k) = len(x), packed.weight.shape
    tile, depth = int8_tile(x.dtype, tokens)
    out = torch.empty(tokens, n, dtype=out_dtype, device=x.device)
    launch(
        _int8_linear, (-(-tokens // tile.rows), -(-n // tile.keys)), x, packed.weight, packed.scale,
        packed.scale if packed.bias is None else packed.bias, out, tokens, n, k, x.stride(0),
        HAS_BIAS=packed.bias is not None, BLOCK_M=tile.rows, BLOCK_N=tile.keys, BLOCK_K=depth,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return out


def linear_add(x: torch.Tensor, packed: reference.PackedLinear | reference.Int8Linear, residual: torch.Tensor) -> None:
    residual += linear(x, packed, out_dtype=torch.float32)


def linear_silu_mul(x: torch.Tensor, packed: reference.PackedLinear | reference.Int8Linear) -> torch.Tensor:
    return silu_mul(linear(x, packed))


def _dense(x: torch.Tensor, packed: reference.PackedLinear, out_dtype: torch.dtype) -> torch.Tensor:
    """cuBLAS. Where 16-bit inputs give float32 (the head's logits), the sums are stored as they are, not rounded first."""
    if out_dtype == x.dtype or x.dtype == torch.float32:
        return reference.linear(x, packed, out_dtype=out_dtype)
    if x.is_cuda:
        out = torch.mm(x, packed.weight.t(), out_dtype=torch.float32)
    else:
        out = x.float() @ packed.weight.float().t()
    return (out if packed.bias is None else out + packed.bias).to(out_dtype)
