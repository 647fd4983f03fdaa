"""The arithmetic of attention for a few query rows and one chunk of keys, inside a kernel.

A *query row* is one query head of one token; the rows of one KV head are numbered token · group + head, so that a tile
of 12 or 4 of them serves any group size. For a chunk of at most KEYS keys:

    scores  S = Q Kᵀ                 a tile at a time, 16 keys (a panel) by 12 or 4 rows
    softmax P = exp(scale · S − m)   m the largest of the row; keys that a row must not see are −∞
    values  O = P V                  and denom = Σ P

A chunk gives (m, denom, O); `merge` joins it to what earlier chunks gave (online softmax: Milakov and Gimelshein 2018). A
chunk's result does not depend on which thread computed it or on what else is in the batch.

Here is what both variants of scores and values share:
- `attention_panels`: bfloat16 pages of order "vnni" are multiplied where they lie. Needs `CPU.avx512_bf16`.
- `attention_plain`: K and V of one head are first copied into float32 panels. Any machine, element type and block size.
"""

from __future__ import annotations

import numpy as np
from numba import float32, uint16

from .compiler import array_at, inline
from .scalars import LOG2_E, exp2_f32, f32_to_bf16, load_row

KEYS = 512  # keys of a chunk
S_STRIDE = 4 * KEYS + 64  # bytes between rows of scores; off the power of two, which would crowd a few cache sets
P_STRIDE = 2 * KEYS + 64
MINUS_INFINITY = np.float32(-np.inf)


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
            if j < rows:
                load_row(q + (2 if bf16 else 4) * at, bf16, wide, dim)
            else:
                wide[:] = 0


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
