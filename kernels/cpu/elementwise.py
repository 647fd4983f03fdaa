"""Norms, rotary embedding, SiLU and widening: one pass over a row at a time, computed in float32.

Element types travel as flags (1 for bfloat16, 0 for float32), so that one compiled kernel serves every mixture of them.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import float32, int64, prange, uint16

from .compiler import array_at, inline, kernel, num_threads
from .scalars import bf16_to_f32, f32_to_bf16, load_row, silu, store_row

SERIAL_ELEMENTS = 1 << 13  # up to which one thread is faster than waking the others, which takes 1.5 µs
BF16 = torch.bfloat16


def _parts(elements: int) -> int:
    return 1 if elements <= SERIAL_ELEMENTS else num_threads()


@inline
def sum_of_squares(row):
    """Σ row², in 16 running sums that LLVM keeps in vectors."""
    whole = len(row) // 16 * 16
    sums = np.zeros(16, np.float32)
    for block in range(0, whole, 16):
        for i in range(16):
            sums[i] += row[block + i] * row[block + i]
    total = sums.sum()
    for i in range(whole, len(row)):
        total += row[i] * row[i]
    return total


@inline
def rms_norm_rows(
    begin, end, x, x_stride, x_bf16, residual, residual_stride, weight, weight_bf16, out, out_bf16, n, eps
):
    row, scale = np.empty(n, np.float32), np.empty(n, np.float32)
    load_row(weight, weight_bf16, scale, n)
    for t in range(begin, end):
        load_row(x + t * x_stride, x_bf16, row, n)
        if residual:
            stream = array_at(residual + t * residual_stride, n, float32)
            for i in range(n):
                row[i] += stream[i]
                stream[i] = row[i]
        factor = float32(1.0) / np.sqrt(sum_of_squares(row) / float32(n) + eps)
        for i in range(n):
            row[i] = scale[i] * (row[i] * factor)
        store_row(out + t * n * (2 if out_bf16 else 4), out_bf16, row, n)


@kernel(f"void({', '.join(['int64'] * 11)}, float32, int64)", parallel=True, name="rms_norm")
def _rms_norm(x, x_stride, x_bf16, residual, residual_stride, weight, weight_bf16, out, out_bf16, rows, n, eps, parts):
    """x, residual: rows `stride` bytes apart; residual 0 for none, else updated in place. out [rows, n]."""
    if parts == 1:
        rms_norm_rows(
            0, rows, x, x_stride, x_bf16, residual, residual_stride, weight, weight_bf16, out, out_bf16, n, eps
        )
    else:
        for part in prange(parts):
            begin, end = part * rows // parts, (part + 1) * rows // parts
            rms_norm_rows(
                begin, end, x, x_stride, x_bf16, residual, residual_stride, weight, weight_bf16, out, out_bf16, n, eps
            )


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, out_dtype: torch.dtype) -> torch.Tensor:
    return _norm(x, 0, 0, weight, eps, out_dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, out_dtype: torch.dtype
) -> torch.Tensor:
    if residual.stride(1) != 1:
        raise ValueError(f"residual must be contiguous in its last dimension, not strided by {residual.stride(1)}")
    return _norm(x, residual.data_ptr(), 4 * residual.stride(0), weight, eps, out_dtype)


def _norm(x, residual: int, residual_stride: int, weight, eps: float, out_dtype: torch.dtype) -> torch.Tensor:
    rows, n = x.shape
    out = torch.empty(rows, n, dtype=out_dtype)
    if x.stride(1) != 1:
        x = x.contiguous()
    _rms_norm(
        x.data_ptr(), x.stride(0) * x.element_size(), x.dtype is BF16, residual, residual_stride, weight.data_ptr(),
        weight.dtype is BF16, out.data_ptr(), out_dtype is BF16, rows, n, eps, _parts(rows * n),
    )  # fmt: skip
    return out


@inline
def rotate(address, bf16, cos, sin, half):
    """Turns element i with element half + i, for one head at `address`."""
    if bf16:
        first, second = array_at(address, half, uint16), array_at(address + 2 * half, half, uint16)
        for i in range(half):
            a, b = bf16_to_f32(first[i]), bf16_to_f32(second[i])
            first[i], second[i] = f32_to_bf16(a * cos[i] - b * sin[i]), f32_to_bf16(b * cos[i] + a * sin[i])
    else:
        one, two = array_at(address, half, float32), array_at(address + 4 * half, half, float32)
        for i in range(half):
            x, y = one[i], two[i]
            one[i], two[i] = x * cos[i] - y * sin[i], y * cos[i] + x * sin[i]


@inline
def rotate_tokens(begin, end, q, q_stride, q_heads, k, k_stride, k_heads, bf16, head_bytes, position, table, half):
    for t in range(begin, end):
        cos = array_at(table + position[t] * 8 * half, half, float32)
        sin = array_at(table + position[t] * 8 * half + 4 * half, half, float32)
        for head in range(q_heads):
            rotate(q + t * q_stride + head * head_bytes, bf16, cos, sin, half)
        for head in range(k_heads):
            rotate(k + t * k_stride + head * head_bytes, bf16, cos, sin, half)


@kernel(f"int64({', '.join(['int64'] * 14)})", parallel=True, name="rotary")
def _rotary(
    q, q_stride, q_heads, k, k_stride, k_heads, bf16, head_bytes, positions, tokens, table, table_rows, half, parts
):
    """Strides in bytes. Returns 0, or −1 − t for the first token whose position lies outside the table."""
    position = array_at(positions, tokens, int64)
    for t in range(tokens):
        if position[t] < 0 or position[t] >= table_rows:
            return -1 - t
    if parts == 1:
        rotate_tokens(0, tokens, q, q_stride, q_heads, k, k_stride, k_heads, bf16, head_bytes, position, table, half)
    else:
        for part in prange(parts):
            begin, end = part * tokens // parts, (part + 1) * tokens // parts
            rotate_tokens(
                begin, end, q, q_stride, q_heads, k, k_stride, k_heads, bf16, head_bytes, position, table, half
            )
    return 0


def rotary(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
    tokens, q_heads, dim = q.shape
    for name, heads in (("q", q), ("k", k)):
        if heads.stride(2) != 1 or heads.stride(1) != dim:
            raise ValueError(
                f"{name} must hold a token's heads side by side: strides (any, {dim}, 1), not {heads.stride()}"
            )
    size = q.element_size()
    failed = _rotary(
        q.data_ptr(), q.stride(0) * size, q_heads, k.data_ptr(), k.stride(0) * size, k.shape[1], q.dtype is BF16, dim * size,
        positions.data_ptr(), tokens, cos_sin.data_ptr(), len(cos_sin), cos_sin.shape[1] // 2, _parts(tokens * q_heads * dim),
    )  # fmt: skip
    if failed:
        raise IndexError(
            f"positions hold {int(positions[-1 - failed])}; the rotary table reaches from 0 to {len(cos_sin) - 1}"
        )


@inline
def silu_mul_rows(begin, end, gate_up, stride, bf16, out, n):
    size = 2 if bf16 else 4
    gate, up = np.empty(n, np.float32), np.empty(n, np.float32)
    for t in range(begin, end):
        load_row(gate_up + t * stride, bf16, gate, n)
        load_row(gate_up + t * stride + n * size, bf16, up, n)
        for i in range(n):
            up[i] *= silu(gate[i])
        store_row(out + t * n * size, bf16, up, n)


@kernel("void(int64, int64, int64, int64, int64, int64, int64)", parallel=True, name="silu_mul")
def _silu_mul(gate_up, stride, bf16, out, rows, n, parts):
    """gate_up: rows of 2 n, `stride` bytes apart. out [rows, n]."""
    if parts == 1:
        silu_mul_rows(0, rows, gate_up, stride, bf16, out, n)
    else:
        for part in prange(parts):
            silu_mul_rows(part * rows // parts, (part + 1) * rows // parts, gate_up, stride, bf16, out, n)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    rows, width = gate_up.shape
    if gate_up.stride(1) != 1:
        gate_up = gate_up.contiguous()
    out = torch.empty(rows, width // 2, dtype=gate_up.dtype)
    _silu_mul(
        gate_up.data_ptr(), gate_up.stride(0) * gate_up.element_size(), gate_up.dtype is BF16, out.data_ptr(), rows, width // 2,
        _parts(rows * width),
    )  # fmt: skip
    return out


@kernel("void(int64, int64, int64, int64, int64, int64)", parallel=True, group="bfloat16")
def _widen(x, x_stride, out, rows, n, parts):
    """x: bfloat16 rows of n, `x_stride` bytes apart. out: float32 [rows, n]."""
    for part in prange(parts):
        for t in range(part * rows // parts, (part + 1) * rows // parts):
            load_row(x + t * x_stride, True, array_at(out + 4 * n * t, n, float32), n)


def widen(x: torch.Tensor) -> torch.Tensor:
    """bfloat16 [T, n], contiguous in its last dimension, as float32: `x.float()`, as a kernel."""
    out = torch.empty(x.shape, dtype=torch.float32)
    _widen(x.data_ptr(), x.stride(0) * x.itemsize, out.data_ptr(), *x.shape, _parts(x.numel()))
    return out
