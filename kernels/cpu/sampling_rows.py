"""The steps of filtered sampling for one row of logits, inside a kernel.

A token's rank is one integer, its `rank_key`: it grows as the logit falls, and with the token id among equals, so that
"what is kept" is "what has a key up to `last`". Logits are read in blocks of BLOCK, whose maxima say where to look.
"""

from __future__ import annotations

import numpy as np
from numba import float32, float64, int32, int64, uint32

from .compiler import inline
from .scalars import bits_of, exp2_f32, float_of

BLOCK = 64  # logits of a block
BINS, BINS_PER_NAT = 2048, np.float32(64.0)  # the histogram: 32 nats below the largest; its last bin takes the rest
INFINITY = np.float32(np.inf)
NOTHING = np.float32(-44.0)  # the weight 2^x of a block's largest token below which the block counts as empty
STEEPEST = np.float32(1e30)  # keeps 0 · slope a number for the smallest temperatures
TOKEN_BITS = 0x7FFFFFFF
EVERYTHING = (1 << 63) - 1  # the rank key that no token exceeds


@inline
def block_maxima(row, maxima):
    """The largest of each block of BLOCK logits, and of all; NaN if the row holds one."""
    whole = len(row) // BLOCK
    lanes = np.empty(16, np.float32)
    nans = int32(0)
    for block in range(whole):
        part = row[block * BLOCK : (block + 1) * BLOCK]
        for i in range(16):
            lanes[i] = -INFINITY
        for j in range(0, BLOCK, 16):
            for i in range(16):
                lanes[i] = part[j + i] if part[j + i] > lanes[i] else lanes[i]
        for i in range(BLOCK):
            nans |= int32(part[i] != part[i])
        best = lanes[0]
        for i in range(1, 16):
            best = max(best, lanes[i])
        maxima[block] = best
    if whole < len(maxima):
        best = -INFINITY
        for i in range(whole * BLOCK, len(row)):
            nans |= int32(row[i] != row[i])
            best = max(best, row[i])
        maxima[whole] = best
    return float32(np.nan) if nans else maxima.max()


@inline
def first_equal(row, maxima, value):
    """The lowest id whose logit is `value`, the largest."""
    for block in range(len(maxima)):
        if maxima[block] == value:
            for i in range(block * BLOCK, len(row)):
                if row[i] == value:
                    return int64(i)
    return int64(-1)


@inline
def rank_key(x, token):
    """An integer >= 0 that sorts by logit, descending, then by token id, ascending: 32 and 31 bits."""
    bits = bits_of(x + float32(0.0))  # −0 becomes 0
    ordered = bits ^ (uint32(0x80000000) if bits < uint32(0x80000000) else uint32(0xFFFFFFFF))
    return int64(ordered ^ uint32(0xFFFFFFFF)) << 31 | int64(token)


@inline
def logit_of(key):
    """The logit of a `rank_key`."""
    ordered = uint32(key >> 31) ^ uint32(0xFFFFFFFF)
    return float_of(ordered ^ (uint32(0x80000000) if ordered >= uint32(0x80000000) else uint32(0xFFFFFFFF)))


@inline
def sort(keys, n):
    """Sorts the first n of `keys`, ascending, in place: Shell's method with gaps that grow by 2.25."""
    gap = 1
    while gap < n // 2:
        gap = gap * 9 // 4 + 1
    while gap > 0:
        for i in range(gap, n):
            key, j = keys[i], i
            while j >= gap and keys[j - gap] > key:
                keys[j] = keys[j - gap]
                j -= gap
            keys[j] = key
        gap = gap * 4 // 9


@inline
def bin_of(x, top, slope):
    """The bin of a logit: 0 at the largest, growing as the probability falls; equal logits share one."""
    return int32(min((top - x) * slope, float32(BINS - 1)))


@inline
def block_bins(row, block, top, slope, bins):
    """Writes the bins of a block's logits to `bins`. Returns where the block begins and how many it has."""
    begin = block * BLOCK
    n = min(BLOCK, len(row) - begin)
    part = row[begin : begin + n]
    for i in range(n):
        bins[i] = bin_of(part[i], top, slope)
    return begin, n


@inline
def block_weights(row, block, top, turn, edge, min_p, weights):
    """Writes exp((logit − top) / temperature) of a block to `weights`, 0 for what lies below `edge` or `min_p`."""
    begin = block * BLOCK
    n = min(BLOCK, len(row) - begin)
    part = row[begin : begin + n]  # a slice: an index with an offset is tested for being negative, and not vectorised
    for i in range(n):
        e = exp2_f32((part[i] - top) * turn)
        weights[i] = e if (e >= min_p) & (part[i] >= edge) else float32(0.0)
    for i in range(n, BLOCK):
        weights[i] = 0


@inline
def listed_candidates(row, maxima, top, slope, k, counts, keys):
    """Writes to `keys`, in order of rank, at least the k first tokens of the row. Returns how many.

    If k blocks have their maximum in bins 0 to b, then k logits lie in these bins, and the first k are among them.
    """
    counts[:] = 0
    for block in range(len(maxima)):
        counts[bin_of(maxima[block], top, slope)] += 1
    b, seen = 0, counts[0]
    while seen < k:
        b += 1
        seen += counts[b]
    n = 0
    for block in range(len(maxima)):
        if bin_of(maxima[block], top, slope) <= b:
            for i in range(block * BLOCK, min(len(row), (block + 1) * BLOCK)):
                if bin_of(row[i], top, slope) <= b:
                    keys[n] = rank_key(row[i], i)
                    n += 1
    sort(keys, n)
    return n


@inline
def draw_listed(keys, n, top, turn, top_p, min_p, uniform):
    """Steps 4 to 6 of the rule for the n first tokens, listed by rank."""
    mass = float64(0.0)
    for i in range(n):
        mass += exp2_f32((logit_of(keys[i]) - top) * turn)
    kept, below = n, float64(0.0)
    if top_p < float32(1.0):
        need, kept = float64(top_p) * mass, 0
        while kept < n and (kept == 0 or below < need):
            below += exp2_f32((logit_of(keys[kept]) - top) * turn)
            kept += 1
    total = float64(0.0)
    for i in range(kept):
        e = exp2_f32((logit_of(keys[i]) - top) * turn)
        if e < min_p or e == float32(0.0):
            kept = i
            break
        total += e
    for i in range(kept):  # the id first, so that sorting again puts the kept tokens in the order of their ids
        keys[i] = (keys[i] & TOKEN_BITS) << 32 | keys[i] >> 31
    sort(keys, kept)
    target, running = uniform * total, float64(0.0)
    for i in range(kept):
        running += exp2_f32((logit_of((keys[i] & 0xFFFFFFFF) << 31) - top) * turn)
        if running > target:
            return keys[i] >> 32
    return keys[kept - 1] >> 32


@inline
def collect_bin(row, which, top, slope, keys):
    """Writes the tokens of one bin to `keys` in order of rank. Returns how many."""
    n, bins = 0, np.empty(BLOCK, np.int32)
    for block in range((len(row) + BLOCK - 1) // BLOCK):
        begin, size = block_bins(row, block, top, slope, bins)
        for i in range(size):
            if bins[i] == which:
                keys[n] = rank_key(row[begin + i], begin + i)
                n += 1
    sort(keys, n)
    return n


@inline
def last_kept(row, top, turn, slope, k, top_p, counts, masses, keys):
    """Steps 3 and 4 of the rule for any k and top_p: the rank key of the last token that is kept."""
    counts[:] = 0
    masses[:] = 0
    bins, weights = np.empty(BLOCK, np.int32), np.empty(BLOCK, np.float32)
    for block in range((len(row) + BLOCK - 1) // BLOCK):
        _, n = block_bins(row, block, top, slope, bins)
        block_weights(row, block, top, turn, -INFINITY, float32(0.0), weights)
        for i in range(n):
            b = uint32(bins[i])
            counts[b] += 1
            masses[b] += weights[i]
    total, b, seen = masses.sum(), BINS - 1, 0
    last = EVERYTHING
    if 0 < k < len(row):
        b, seen, total = 0, 0, float64(0.0)
        while seen + counts[b] < k:
            seen += counts[b]
            total += masses[b]
            b += 1
        n = collect_bin(row, b, top, slope, keys)
        for i in range(k - seen):
            total += exp2_f32((logit_of(keys[i]) - top) * turn)
        last = keys[k - seen - 1]
    if top_p < float32(1.0):
        need, below, bp = float64(top_p) * total, float64(0.0), 0
        while bp < b and below + masses[bp] < need:
            below += masses[bp]
            bp += 1
        n = collect_bin(row, bp, top, slope, keys)
        i = 0
        below += exp2_f32((logit_of(keys[0]) - top) * turn)
        while i + 1 < n and below < need and keys[i] < last:
            i += 1
            below += exp2_f32((logit_of(keys[i]) - top) * turn)
        last = min(last, keys[i])
    return last


@inline
def mass_of_block(row, block, top, turn, last, min_p, target):
    """The kept mass of a block up to where it exceeds `target`, and the kept token there (the last; −1 if none)."""
    mass, token = float64(0.0), int64(-1)
    for i in range(block * BLOCK, min(len(row), (block + 1) * BLOCK)):
        e = exp2_f32((row[i] - top) * turn)
        if e > float32(0.0) and e >= min_p and rank_key(row[i], i) <= last:
            mass += e
            token = int64(i)
            if mass > target:
                break
    return mass, token


@inline
def draw_from_all(row, maxima, top, turn, last, min_p, uniform, sums):
    """Steps 5 and 6 of the rule for the tokens that rank up to `last`: masses of blocks, then inside one block."""
    edge = logit_of(last) if last < EVERYTHING else -INFINITY
    total = float64(0.0)
    weights, lanes = np.empty(BLOCK, np.float32), np.empty(16, np.float32)
    for block in range(len(sums)):
        sums[block] = 0
        if (maxima[block] - top) * turn < NOTHING:
            continue
        block_weights(row, block, top, turn, edge, min_p, weights)
        for i in range(16):
            lanes[i] = (weights[i] + weights[i + 16]) + (weights[i + 32] + weights[i + 48])
        sums[block] = lanes.sum()
    if last < EVERYTHING:  # what equals the edge with a larger id was counted too: count its blocks again, exactly
        token = last & TOKEN_BITS
        for block in range(token // BLOCK, len(sums)):
            for i in range(block * BLOCK, min(len(row), (block + 1) * BLOCK)):
                if row[i] == edge and i > token:
                    sums[block] = mass_of_block(row, block, top, turn, last, min_p, float64(np.inf))[0]
                    break
    for block in range(len(sums)):
        total += sums[block]
    target, running = uniform * total, float64(0.0)
    for block in range(len(sums)):
        if running + sums[block] > target:
            token = mass_of_block(row, block, top, turn, last, min_p, target - running)[1]
            if token >= 0:
                return token
        running += sums[block]
    for block in range(len(sums) - 1, -1, -1):  # the rounding of the sums left the target at their end
        token = mass_of_block(row, block, top, turn, last, min_p, float64(np.inf))[1]
        if token >= 0:
            return token
    return int64(-1)
