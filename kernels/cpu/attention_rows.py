"""The arithmetic of attention for a few query rows and one chunk of keys, inside a kernel.

A *query row* is one query head of one token; the rows of one KV head are numbered token · group + head, so that a tile
of 12 or 4 of them serves any group size. For a chunk of at most KEYS keys:

    scores  S = Q Kᵀ                 a tile at a time, 16 keys (a panel) by 12 or 4 rows
    softmax P = exp(scale · S − m)   m the largest of the row; keys that a row must not see are −∞
    values  O = P V                  and denom = Σ P

A chunk gives (m, denom, O); `merge` joins it to what earlier chunks gave (online softmax: Milakov and Gimelshein 2018). A
chunk's result does not depend on which thread computed it or on what else is in the batch.

Two variants of the scores and values:
- `attend_panels`: bfloat16 pages of order "vnni" are multiplied where they lie. Needs `CPU.avx512_bf16`.
- `attend_plain`: K and V of one head are first copied into float32 panels. Any machine, element type and block size.
"""

from __future__ import annotations

import numpy as np
from numba import float32, int64, uint16

from .compiler import CPU, array_at, inline
from .simd import (
    add,
    bf16_to_f32,
    exp2,
    exp2_f32,
    f32_to_bf16,
    load_f32,
    max_of,
    maximum,
    mul,
    splat,
    store_as_bf16,
    sub,
    sum_of,
    zeros,
)
from .tiles import make_tile

KEYS = 512  # keys of a chunk
TILE = 12 if CPU.avx512 else 4  # rows of the larger float32 tile: as many sums as the registers hold
S_STRIDE = 4 * KEYS + 64  # bytes between rows of scores; off the power of two, which would crowd a few cache sets
P_STRIDE = 2 * KEYS + 64
LOG2_E = np.float32(1.4426950408889634)
MINUS_INFINITY = np.float32(-np.inf)

panels_large = make_tile(12, 1, "bf16", prefetch=True)
panels_small = make_tile(4, 1, "bf16", prefetch=True)
panels_small_wide = make_tile(4, 4, "bf16", prefetch=True)
plain_large = make_tile(TILE, 1, "f32", prefetch=False)
plain_small = make_tile(4, 1, "f32", prefetch=False)


@inline
def mask_scores(s, rows, first, count, key, group, context, window, softcap, scale):
    """Apply the softcap, and write −∞ where a row must not look. s: scores of `rows` rows against `count` keys.

    Row j belongs to the token at cache index context + (first + j) // group; key 0 is at cache index `key`.
    """
    padded = (count + 15) // 16 * 16
    for j in range(rows):
        row = array_at(s + j * S_STRIDE, padded, float32)
        if softcap > float32(0.0):
            turn = float32(2.0) * LOG2_E * scale / softcap
            for i in range(padded):  # c · tanh(x / c), tanh from exp
                row[i] = softcap - float32(2.0) * softcap / (
                    exp2_f32(min(row[i] * turn, float32(126.0))) + float32(1.0)
                )
        at = context + (first + j) // group  # the token's own cache index
        end = min(count, max(0, at + 1 - key))
        begin = min(end, max(0, at + 1 - window - key)) if window > 0 else 0
        for i in range(begin):
            row[i] = MINUS_INFINITY
        for i in range(end, padded):
            row[i] = MINUS_INFINITY


@inline
def softmax_panels(s, p, count, turn):
    """P = 2^(turn (S − m)) as bfloat16, for one row of `count` scores (a multiple of 16). Returns (m, denom)."""
    best = splat(MINUS_INFINITY)
    for i in range(0, count, 16):
        best = maximum(best, load_f32(s + 4 * i))
    m = max_of(best)
    shift = splat(m if m > MINUS_INFINITY else float32(0.0))
    factor = splat(turn)
    total = zeros()
    for i in range(0, count, 16):
        e = exp2(mul(sub(load_f32(s + 4 * i), shift), factor))
        total = add(total, e)
        store_as_bf16(p + 2 * i, e)
    return m, sum_of(total)


@inline
def softmax_plain(s, count, turn):
    """P = 2^(turn (S − m)) in place, for one row of `count` scores (a multiple of 16). Returns (m, denom)."""
    row = array_at(s, (count // 16, 16), float32)
    lanes = np.empty(16, np.float32)  # one running value per vector lane
    for i in range(16):
        lanes[i] = MINUS_INFINITY
    for block in range(count // 16):
        for i in range(16):
            lanes[i] = max(lanes[i], row[block, i])
    m = lanes.max()
    shift = m if m > MINUS_INFINITY else float32(0.0)
    lanes[:] = 0
    for block in range(count // 16):
        for i in range(16):
            e = exp2_f32(turn * (row[block, i] - shift))
            row[block, i] = e
            lanes[i] += e
    return m, lanes.sum()


@inline
def values_panels(p, rows, table, segments, offset, steps, dim, o, fresh):
    """O (+)= P V for the rows of one head over `segments` runs of 2 · `steps` keys."""
    if rows == 12:
        for v in range(dim // 16):
            panels_large(p, P_STRIDE, table, segments, offset + 64 * v, steps, 4 * dim, o + 64 * v, 4 * dim, fresh)
        return
    for j in range(0, rows, 4):
        p_rows, o_rows, wide = p + j * P_STRIDE, o + 4 * dim * j, dim // 64 * 4
        for v in range(0, wide, 4):
            panels_small_wide(
                p_rows, P_STRIDE, table, segments, offset + 64 * v, steps, 4 * dim, o_rows + 64 * v, 4 * dim, fresh
            )
        for v in range(wide, dim // 16):
            panels_small(
                p_rows, P_STRIDE, table, segments, offset + 64 * v, steps, 4 * dim, o_rows + 64 * v, 4 * dim, fresh
            )


@inline
def attend_panels(
    q, rows, heads, dim, table, count, head_bytes, half_bytes, s, p, odd, o, m, denom, first, key, group, context, window,
    softcap, scale,
):  # fmt: skip
    """`rows` (12, 8 or 4) query rows of each of `heads` KV heads against `count` keys from cache index `key` on.

    q: bfloat16 [heads, rows, dim]. table: addresses of the panels of 16 keys, of K of head 0; one more is read ahead.
    K of the next head lies `head_bytes` further, V `half_bytes` further. Writes o float32 [heads, rows, dim] and
    m, denom float32 [heads, rows]. s, p, odd: scratch.
    """
    panels = (count + 15) // 16
    addresses = array_at(table, panels + 1, int64)
    beyond = addresses[panels]
    addresses[panels] = addresses[0] + half_bytes  # what is read after the last panel of K
    for panel in range(panels):
        for head in range(heads):
            at, offset = head * rows, head * head_bytes
            entry, column = table + 8 * panel, s + 64 * panel
            if rows == 12:
                panels_large(
                    q + 2 * dim * at, 2 * dim, entry, 1, offset, dim // 2, 64, column + at * S_STRIDE, S_STRIDE, 1
                )
            else:
                for j in range(at, at + rows, 4):
                    panels_small(
                        q + 2 * dim * j, 2 * dim, entry, 1, offset, dim // 2, 64, column + j * S_STRIDE, S_STRIDE, 1
                    )
    turn = LOG2_E if softcap > float32(0.0) else LOG2_E * scale
    largest, total = array_at(m, heads * rows, float32), array_at(denom, heads * rows, float32)
    for head in range(heads):
        mask_scores(s + head * rows * S_STRIDE, rows, first, count, key, group, context, window, softcap, scale)
    for j in range(heads * rows):
        largest[j], total[j] = softmax_panels(s + j * S_STRIDE, p + j * P_STRIDE, 16 * panels, turn)

    whole, pairs = count // 16, count % 16 // 2
    addresses[panels] = beyond  # which also belongs to the later rows of this chunk
    run = max(whole, 1) if heads == 1 else 1  # panels multiplied in one go: all heads of a page are read together
    for panel in range(0, whole, run):
        for head in range(heads):
            values_panels(
                p + head * rows * P_STRIDE + 32 * panel, rows, table + 8 * panel, run, half_bytes + head * head_bytes, 8, dim,
                o + 4 * dim * head * rows, int64(panel == 0),
            )  # fmt: skip
    if pairs:
        for head in range(heads):
            values_panels(
                p + head * rows * P_STRIDE + 32 * whole, rows, table + 8 * whole, 1, half_bytes + head * head_bytes, pairs, dim,
                o + 4 * dim * head * rows, int64(whole == 0),
            )  # fmt: skip
    if count % 2:
        # The partner of the last key may never have been written, and 0 · NaN is NaN: multiply a pair with a zero there.
        pair_table, pair = array_at(odd, 2, int64), array_at(odd + 64, (dim, 2), uint16)
        pair_table[0] = pair_table[1] = odd + 64
        for head in range(heads):
            last = array_at(addresses[count // 16] + half_bytes + head * head_bytes + 4 * dim * pairs, (dim, 2), uint16)
            for i in range(dim):
                pair[i, 0], pair[i, 1] = last[i, 0], uint16(0)
            values_panels(
                p + head * rows * P_STRIDE + 2 * (count - 1), rows, odd, 1, 0, 1, dim,
                o + 4 * dim * head * rows, int64(count == 1),
            )  # fmt: skip


@inline
def gather_panels(
    pages, page_stride, block_ids, block_size, half_bytes, token_bytes, head, dim, bf16, key, count, k, v
):
    """Copy `count` keys from cache index `key` on, of one head of "nhd" pages, to float32.

    k [panels of 16 keys, dim, 16], v [keys, dim rounded up to 16]; zeros beyond `count` and beyond `dim`.
    """
    width, panels = (dim + 15) // 16 * 16, (count + 15) // 16
    keys, values = array_at(k, (panels, dim, 16), float32), array_at(v, (16 * panels, width), float32)
    for t in range(count):
        block = block_ids[(key + t) // block_size]
        source = pages + block * page_stride + (key + t) % block_size * token_bytes
        panel, lane = t // 16, t % 16
        if bf16:
            k_half, v_half = (
                array_at(source + 2 * head * dim, dim, uint16),
                array_at(source + half_bytes + 2 * head * dim, dim, uint16),
            )
            for i in range(dim):
                keys[panel, i, lane] = bf16_to_f32(k_half[i])
            for i in range(dim):
                values[t, i] = bf16_to_f32(v_half[i])
        else:
            k_row, v_row = (
                array_at(source + 4 * head * dim, dim, float32),
                array_at(source + half_bytes + 4 * head * dim, dim, float32),
            )
            for i in range(dim):
                keys[panel, i, lane] = k_row[i]
            for i in range(dim):
                values[t, i] = v_row[i]
        for i in range(dim, width):
            values[t, i] = 0
    for t in range(count, 16 * panels):
        keys[t // 16, :, t % 16] = 0
        values[t] = 0


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
                plain_small(
                    s + j * S_STRIDE,
                    S_STRIDE,
                    table,
                    1,
                    column,
                    count,
                    4 * width,
                    o + 4 * width * j + column,
                    4 * width,
                    1,
                )


@inline
def merge(rows, width, turn, o, m, denom, o_new, m_new, denom_new):
    """Join a chunk's (o, m, denom) of `rows` rows to the running ones, in place."""
    sums, new_sums = array_at(o, (rows, width), float32), array_at(o_new, (rows, width), float32)
    largest, new_largest = array_at(m, rows, float32), array_at(m_new, rows, float32)
    total, new_total = array_at(denom, rows, float32), array_at(denom_new, rows, float32)
    for j in range(rows):
        top = max(largest[j], new_largest[j])
        if top == MINUS_INFINITY:  # neither chunk held a key that the row may see
            continue
        old_weight, new_weight = exp2_f32(turn * (largest[j] - top)), exp2_f32(turn * (new_largest[j] - top))
        largest[j] = top
        total[j] = old_weight * total[j] + new_weight * new_total[j]
        for i in range(width):
            sums[j, i] = old_weight * sums[j, i] + new_weight * new_sums[j, i]


@inline
def pack_rows(q, q_stride, bf16, out, rows, padded, first, token, head, group, dim, keep):
    """Copy query rows first … first + rows of KV head `head` to out [padded, dim], zeros after them.

    q: rows of `q_stride` elements a token. `keep`: copy bfloat16 as it is; otherwise the copy is float32.
    """
    for j in range(padded):
        at = (token + (first + j) // group) * q_stride + (head * group + (first + j) % group) * dim
        if keep:
            target = array_at(out + 2 * dim * j, dim, uint16)
            if j < rows:
                source = array_at(q + 2 * at, dim, uint16)
                for i in range(dim):
                    target[i] = source[i]
            else:
                target[:] = 0
        else:
            wide = array_at(out + 4 * dim * j, dim, float32)
            if j >= rows:
                wide[:] = 0
            elif bf16:
                source = array_at(q + 2 * at, dim, uint16)
                for i in range(dim):
                    wide[i] = bf16_to_f32(source[i])
            else:
                exact = array_at(q + 4 * at, dim, float32)
                for i in range(dim):
                    wide[i] = exact[i]


@inline
def store_rows(out, bf16, o, denom, rows, width, first, token, head, heads, group, dim):
    """out = o / denom for query rows first … first + rows of KV head `head`; out is [T, heads · group, dim], contiguous."""
    sums, total = array_at(o, (rows, width), float32), array_at(denom, rows, float32)
    for j in range(rows):
        at = ((token + (first + j) // group) * heads * group + head * group + (first + j) % group) * dim
        share = float32(1.0) / total[j]
        if bf16:
            target = array_at(out + 2 * at, dim, uint16)
            for i in range(dim):
                target[i] = f32_to_bf16(sums[j, i] * share)
        else:
            exact = array_at(out + 4 * at, dim, float32)
            for i in range(dim):
                exact[i] = sums[j, i] * share
