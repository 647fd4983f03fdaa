"""Scores, softmax and values on bfloat16 pages of order "vnni", multiplied where they lie. Needs `CPU.avx512_bf16`.

A page of such an order is a row of panels of 16 keys, in which a tile finds pairs of elements as `vdpbf16ps` wants them: K
panels for Q Kᵀ, V panels for P V. Nothing is copied but the last pair of an odd number of keys.
"""

from __future__ import annotations

from numba import float32, int64, uint16

from .attention_rows import MINUS_INFINITY, P_STRIDE, S_STRIDE, mask_scores
from .compiler import array_at, inline
from .scalars import LOG2_E
from .simd import add, exp2, load_f32, max_of, maximum, mul, splat, store_as_bf16, sub, sum_of, zeros
from .tiles import make_tile

panels_large = make_tile(12, 1, "bf16", prefetch=True)
panels_small = make_tile(4, 1, "bf16", prefetch=True)
panels_small_wide = make_tile(4, 4, "bf16", prefetch=True)


@inline
def softmax_panels(s, p, count, turn, m, denom):
    """P = 2^(turn (S − m)) as bfloat16, for 4 rows of `count` scores (a multiple of 16). Writes m and denom [4].

    Four rows side by side: one alone would wait for each maximum and each sum.
    """
    largest, total = array_at(m, 4, float32), array_at(denom, 4, float32)
    s1, s2, s3 = s + S_STRIDE, s + 2 * S_STRIDE, s + 3 * S_STRIDE
    a = b = c = d = splat(MINUS_INFINITY)
    for i in range(0, 4 * count, 64):
        a, b = maximum(a, load_f32(s + i)), maximum(b, load_f32(s1 + i))
        c, d = maximum(c, load_f32(s2 + i)), maximum(d, load_f32(s3 + i))
    largest[0], largest[1], largest[2], largest[3] = max_of(a), max_of(b), max_of(c), max_of(d)
    factor = splat(turn)
    for j in range(4):
        shift = splat(largest[j] if largest[j] > MINUS_INFINITY else float32(0.0))
        sums = zeros()
        for i in range(0, count, 16):
            e = exp2(mul(sub(load_f32(s + j * S_STRIDE + 4 * i), shift), factor))
            sums = add(sums, e)
            store_as_bf16(p + j * P_STRIDE + 2 * i, e)
        total[j] = sum_of(sums)


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
    for head in range(heads):
        mask_scores(s + head * rows * S_STRIDE, rows, first, count, key, group, context, window, softcap, scale)
    for j in range(0, heads * rows, 4):
        softmax_panels(s + j * S_STRIDE, p + j * P_STRIDE, 16 * panels, turn, m + 4 * j, denom + 4 * j)

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
