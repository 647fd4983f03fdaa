"""Greedy choice and filtered sampling over large vocabularies, touching the logits as few times as the rule allows.

| asked for | work on the V logits of a row |
|---|---|
| greedy | one pass: maxima of blocks of 64; then one block |
| temperature, min-p | and one pass of exponentials, summed by blocks; then one block again |
| top-k up to MOST_LISTED | the first pass only: the k largest lie in blocks whose maximum is among the k largest maxima |
| top-p, or a larger top-k | and a histogram of count and mass over log-probability; ties and order matter in one bin only |

`kernels.ops.sample` states the rule. Masses are summed in float64 from float32 exponentials (relative error 3e-7).
"""

from __future__ import annotations

import numpy as np
import torch
from numba import float32, float64, int32, int64, prange

from .compiler import array_at, inline, kernel, num_threads
from .sampling_rows import (
    BINS,
    BINS_PER_NAT,
    BLOCK,
    EVERYTHING,
    INFINITY,
    STEEPEST,
    block_maxima,
    draw_from_all,
    draw_listed,
    first_equal,
    last_kept,
    listed_candidates,
)
from .scalars import LOG2_E

MOST_LISTED = 256  # top_k up to which the candidates are listed and sorted
SERIAL_LOGITS = 1 << 16  # up to which one thread is faster than waking the others


@inline
def sample_rows(begin, end, logits, stride, size, temperature, top_k, top_p, min_p, uniform, out):
    blocks = (size + BLOCK - 1) // BLOCK
    maxima, sums = np.empty(blocks, np.float32), np.empty(blocks, np.float32)
    counts, masses = np.empty(BINS, np.int32), np.empty(BINS, np.float64)
    keys = np.empty(size, np.int64)
    for s in range(begin, end):
        row = array_at(logits + 4 * stride * s, size, float32)
        top = block_maxima(row, maxima)
        if not -INFINITY < top < INFINITY:
            out[s] = -1
            continue
        if temperature[s] <= float32(0.0):
            out[s] = first_equal(row, maxima, top)
            continue
        k = int64(top_k[s])
        turn, slope = min(LOG2_E / temperature[s], STEEPEST), min(BINS_PER_NAT / temperature[s], STEEPEST)
        if 0 < k <= MOST_LISTED and k <= blocks:
            n = listed_candidates(row, maxima, top, slope, k, counts, keys)
            out[s] = draw_listed(keys, min(n, k), top, turn, top_p[s], min_p[s], uniform[s])
            continue
        last = EVERYTHING
        if 0 < k < size or top_p[s] < float32(1.0):
            last = last_kept(row, top, turn, slope, k, top_p[s], counts, masses, keys)
        out[s] = draw_from_all(row, maxima, top, turn, last, min_p[s], uniform[s], sums)


@inline
def greedy_rows(begin, end, logits, stride, size, out):
    maxima = np.empty((size + BLOCK - 1) // BLOCK, np.float32)
    for s in range(begin, end):
        row = array_at(logits + 4 * stride * s, size, float32)
        top = block_maxima(row, maxima)
        out[s] = first_equal(row, maxima, top) if -INFINITY < top < INFINITY else -1


@kernel("void(int64, int64, int64, int64, int64, int64)", parallel=True, name="greedy")
def _greedy(logits, stride, rows, size, out_at, parts):
    out = array_at(out_at, rows, int64)
    if parts == 1:
        greedy_rows(0, rows, logits, stride, size, out)
    else:
        for part in prange(parts):
            greedy_rows(part * rows // parts, (part + 1) * rows // parts, logits, stride, size, out)


@kernel(f"void({', '.join(['int64'] * 11)})", parallel=True, name="sample")
def _sample(logits, stride, rows, size, temperature_at, top_k_at, top_p_at, min_p_at, uniform_at, out_at, parts):
    temperature, top_k = array_at(temperature_at, rows, float32), array_at(top_k_at, rows, int32)
    top_p, min_p = array_at(top_p_at, rows, float32), array_at(min_p_at, rows, float32)
    uniform, out = array_at(uniform_at, rows, float64), array_at(out_at, rows, int64)
    if parts == 1:
        sample_rows(0, rows, logits, stride, size, temperature, top_k, top_p, min_p, uniform, out)
    else:
        for part in prange(parts):
            begin, end = part * rows // parts, (part + 1) * rows // parts
            sample_rows(begin, end, logits, stride, size, temperature, top_k, top_p, min_p, uniform, out)


def _parts(rows: int, size: int) -> int:
    return 1 if rows * size <= SERIAL_LOGITS else min(rows, num_threads())


def greedy(logits: torch.Tensor) -> torch.Tensor:
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    rows, size = logits.shape
    out = torch.empty(rows, dtype=torch.long)
    _greedy(logits.data_ptr(), logits.stride(0), rows, size, out.data_ptr(), _parts(rows, size))
    return out


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniform: torch.Tensor,
) -> torch.Tensor:
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    rows, size = logits.shape
    out = torch.empty(rows, dtype=torch.long)
    _sample(
        logits.data_ptr(), logits.stride(0), rows, size, temperature.data_ptr(), top_k.data_ptr(), top_p.data_ptr(),
        min_p.data_ptr(), uniform.data_ptr(), out.data_ptr(), _parts(rows, size),
    )  # fmt: skip
    return out
