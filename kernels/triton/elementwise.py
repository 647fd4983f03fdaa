"""Norms, rotation and activation: one pass over memory each, float32 inside, what follows in the model fused in."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import launch, power_of_2

LARGEST_ROW = 16_384  # elements that one program holds in registers
TILE = 1024  # elements of a program that takes several short rows


@triton.jit
def _rms_norm(
    x, residual, weight, out, num_rows, size, eps, x_stride, residual_stride,
    ADD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """ROWS rows of `size` elements: residual += x where ADD, then the norm of what was read or summed."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < num_rows) & (column < size)
    values = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        values += tl.load(residual + row * residual_stride + column, mask=inside, other=0.0)
        tl.store(residual + row * residual_stride + column, values, mask=inside)
    mean = tl.sum(values * values, 1) / size
    normed = values * tl.rsqrt(mean + eps)[:, None]
    scale = tl.load(weight + column, mask=column < size, other=0.0).to(tl.float32)
    tl.store(out + row * size + column, (scale * normed).to(out.dtype.element_ty), mask=inside)


def _normed(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, out_dtype: torch.dtype, add: bool
) -> torch.Tensor:
    num_rows, size = x.shape
    if size > LARGEST_ROW:
        raise ValueError(f"x has rows of {size} elements; kernels='triton' norms at most {LARGEST_ROW}")
    block = power_of_2(size)
    rows = max(1, TILE // block)
    out = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    x = x if x.stride(1) == 1 else x.contiguous()
    launch(
        _rms_norm, (-(-num_rows // rows),), x, residual, weight, out, num_rows, size, eps, x.stride(0),
        residual.stride(0), ADD=add, ROWS=rows, BLOCK=block,
        num_warps=min(32, max(4, block // 1024)),
    )  # fmt: skip
    return out


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, out_dtype: torch.dtype) -> torch.Tensor:
    return _normed(x, x, weight, eps, out_dtype, add=False)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, out_dtype: torch.dtype
) -> torch.Tensor:
    return _normed(x, residual, weight, eps, out_dtype, add=True)


@triton.jit
def _rotate(heads, first, place, cos, sin, inside):
    """Turn the pairs (first half, second half) of a tile of heads [heads, half] at `heads`, in place."""
    a = tl.load(heads + first, mask=inside).to(tl.float32)
    b = tl.load(heads + first + place, mask=inside).to(tl.float32)
    tl.store(heads + first, (a * cos - b * sin).to(heads.dtype.element_ty), mask=inside)
    tl.store(heads + first + place, (b * cos + a * sin).to(heads.dtype.element_ty), mask=inside)


@triton.jit
def _rotary(
    q, k, positions, cos_sin, num_positions, q_token_stride, q_head_stride, k_token_stride, k_head_stride,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, HALF: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """All heads of one token. A position outside the table turns them into NaN."""
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token)
    known = tl.where((position >= 0) & (position < num_positions), HALF, 0)  # elements of its row of the table
    i = tl.arange(0, BLOCK)
    cos = tl.load(cos_sin + position * (2 * HALF) + i, mask=i < known, other=float("nan"))[None, :]
    sin = tl.load(cos_sin + position * (2 * HALF) + HALF + i, mask=i < known, other=float("nan"))[None, :]
    head = tl.arange(0, BLOCK_Q)[:, None]
    inside = (head < Q_HEADS) & (i < HALF)[None, :]
    _rotate(q + token * q_token_stride, head * q_head_stride + i[None, :], HALF, cos, sin, inside)
    head = tl.arange(0, BLOCK_K)[:, None]
    inside = (head < K_HEADS) & (i < HALF)[None, :]
    _rotate(k + token * k_token_stride, head * k_head_stride + i[None, :], HALF, cos, sin, inside)


def rotary(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
    half = cos_sin.shape[1] // 2
    launch(
        _rotary, (len(q),), q, k, positions, cos_sin, len(cos_sin), q.stride(0), q.stride(1), k.stride(0), k.stride(1),
        Q_HEADS=q.shape[1], K_HEADS=k.shape[1], HALF=half, BLOCK_Q=power_of_2(q.shape[1]),
        BLOCK_K=power_of_2(k.shape[1]), BLOCK=power_of_2(half),
    )  # fmt: skip


@triton.jit
def _silu_mul(gate_up, out, size, stride, BLOCK: tl.constexpr):
    """BLOCK elements of one token. Grid: (tokens, blocks of elements)."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    gate = tl.load(gate_up + token * stride + column, mask=inside).to(tl.float32)
    up = tl.load(gate_up + token * stride + size + column, mask=inside).to(tl.float32)
    product = gate / (1 + tl.exp(-gate)) * up
    tl.store(out + token * size + column, product.to(out.dtype.element_ty), mask=inside)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(num_tokens, size, dtype=gate_up.dtype, device=gate_up.device)
    gate_up = gate_up if gate_up.stride(1) == 1 else gate_up.contiguous()
    launch(_silu_mul, (num_tokens, -(-size // TILE)), gate_up, out, size, gate_up.stride(0), BLOCK=TILE)
    return out
