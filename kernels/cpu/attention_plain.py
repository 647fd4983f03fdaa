"""Scores, softmax and values in float32, on any machine, for pages of order "nhd" of either element type and any block size.

K and V of one head are copied to float32 panels first: 16 keys side by side for Q Kᵀ, which is a transposition, and keys
one after the other for P V.
"""

from __future__ import annotations

import numpy as np
from numba import float32, int64, uint16

from .attention_rows import MINUS_INFINITY, S_STRIDE, mask_scores
from .compiler import CPU, array_at, inline
from .scalars import LOG2_E, bf16_to_f32, exp2_f32, load_row
from .simd import prefetch
from .tiles import make_tile, make_transpose

TILE = 12 if CPU.avx512 else 4  # rows of the larger tile: as many sums as the registers hold

plain_large = make_tile(TILE, 1, "f32", prefetch=False)
plain_small = make_tile(4, 1, "f32", prefetch=False)
transpose_f32, transpose_bf16 = make_transpose("f32"), make_transpose("bf16")


@inline
def softmax_plain(s, count, turn):
    """P = 2^(turn (S − m)) in place, for one row of `count` scores (a multiple of 16). Returns (m, denom)."""
    row, lanes = array_at(s, count, float32), np.empty(16, np.float32)  # lanes: one running value per vector lane
    lanes[:] = MINUS_INFINITY
    for i in range(0, count, 16):
        part = array_at(s + 4 * i, 16, float32)
        for lane in range(16):
            lanes[lane] = max(lanes[lane], part[lane])
    m = lanes.max()
    shift = m if m > MINUS_INFINITY else float32(0.0)
    for i in range(count):
        row[i] = exp2_f32(turn * (row[i] - shift))
    lanes[:] = 0
    for i in range(0, count, 16):
        part = array_at(s + 4 * i, 16, float32)
        for lane in range(16):
            lanes[lane] += part[lane]
    return m, lanes.sum()


@inline
def row_address(pages, page_stride, block_ids, block_size, token_bytes, at):
    """The address of the first head's key of the token at cache index `at`, in "nhd" pages."""
    return pages + block_ids[at // block_size] * page_stride + at % block_size * token_bytes


@inline
def load_element(address, bf16):
    """One element as float32."""
    return bf16_to_f32(array_at(address, 1, uint16)[0]) if bf16 else array_at(address, 1, float32)[0]


@inline
def gather_panels(
    pages, page_stride, block_ids, block_size, half_bytes, head_offset, dim, bf16, key, count, k, v, sources, nothing
):
    """Copy `count` keys from cache index `key` on, of the head `head_offset` bytes into a token, to float32.

    k [panels of 16 keys, dim, 16], v [keys, dim rounded up to 16]; zeros beyond `count` and beyond `dim`.
    sources [16] and nothing [dim]: scratch.
    """
    width, whole, token_bytes = (dim + 15) // 16 * 16, dim // 16 * 16, half_bytes // block_size
    size, row_bytes = (2, 2 * dim) if bf16 else (4, 4 * dim)
    source, zero = array_at(sources, 16, int64), array_at(nothing, dim, float32)
    zero[:] = 0
    first = pages + head_offset
    for panel in range((count + 15) // 16):
        for lane in range(16):
            t = 16 * panel + lane
            if t >= count:
                source[lane] = nothing
                continue
            source[lane] = row_address(first, page_stride, block_ids, block_size, token_bytes, key + t)
            ahead = row_address(first, page_stride, block_ids, block_size, token_bytes, key + min(t + 16, count - 1))
            for line in range(0, row_bytes, 64):
                prefetch(ahead + line)
                prefetch(ahead + half_bytes + line)
        for i in range(0, whole, 16):
            if bf16:
                transpose_bf16(sources, 2 * i, k + 64 * (panel * dim + i))
            else:
                transpose_f32(sources, 4 * i, k + 64 * (panel * dim + i))
        for lane in range(16):
            for i in range(whole, dim):
                column = array_at(k + 64 * (panel * dim + i), 16, float32)
                column[lane] = load_element(source[lane] + size * i, bf16)
            t = 16 * panel + lane
            values, value = array_at(v + 4 * width * t, width, float32), source[lane] + half_bytes
            if t >= count:
                values[:] = 0
            else:
                load_row(value, bf16, values, dim)
            for i in range(dim, width):
                values[i] = 0


@inline
def attend_plain(q, rows, dim, table, k, v, count, s, o, m, denom, first, key, group, context, window, softcap, scale):
    """`rows` (at most TILE) query rows of one KV head against `count` keys from cache index `key` on.

    q: float32 [rows, dim]; k, v: the panels of `gather_panels`. Writes o float32 [rows, dim rounded up to 16] and
    m, denom float32 [rows]. s, table: scratch.
    """
    width, panels = (dim + 15) // 16 * 16, (count + 15) // 16
    address = array_at(table, 1, int64)
    address[0] = k
    for panel in range(panels):
        offset, column = 64 * dim * panel, s + 64 * panel
        if rows == TILE:
            plain_large(q, 4 * dim, table, 1, offset, dim, 64, column, S_STRIDE, 1)
        else:
            for j in range(0, rows, 4):
                plain_small(q + 4 * dim * j, 4 * dim, table, 1, offset, dim, 64, column + j * S_STRIDE, S_STRIDE, 1)
    turn = LOG2_E if softcap > float32(0.0) else LOG2_E * scale
    mask_scores(s, rows, first, count, key, group, context, window, softcap, scale)
    largest, total = array_at(m, rows, float32), array_at(denom, rows, float32)
    for j in range(rows):
        largest[j], total[j] = softmax_plain(s + j * S_STRIDE, 16 * panels, turn)
    address[0] = v
    for column in range(0, 4 * width, 64):
        if rows == TILE:
            plain_large(s, S_STRIDE, table, 1, column, count, 4 * width, o + column, 4 * width, 1)
        else:
            for j in range(0, rows, 4):
                o_at = o + 4 * width * j + column
                plain_small(s + j * S_STRIDE, S_STRIDE, table, 1, column, count, 4 * width, o_at, 4 * width, 1)
