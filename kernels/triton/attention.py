"""Paged attention: one kernel for prompts, pieces of prompts and single tokens of any lengths, and one to join splits.

**Tiles.** The query heads that read one KV head are rows of the same tile, so that keys are loaded once for all of them:

    row m of a tile = token m // group, query head m % group        group 3, tile of 16:  t0h0 t0h1 t0h2 t1h0 … t4h2 –

A program owns such a tile and walks over the keys that its tokens see, BLOCK_N at a time, looking each one's page up in
the block table: any block size will do. Softmax is the online one (Milakov and Gimelshein 2018): a running maximum, the
sum and the weighted values rescaled when it grows, in base 2. Masks are applied at the two edges only:

    keys        [ · · · ┆ edge of the window ┆ seen by every token of the tile ┆ causal edge ┆ · · · ]
                        begin                full_begin                        full_end      end

**Two launches.** A row with one token is a decode: its tile has one token, and long rows are split over programs, each
writing its (maximum, sum, values) for `_join` (Flash-Decoding). A split is SPLIT keys, more where a row would need more
than MAX_SPLITS. Rows with more tokens are tiled over tokens and not split. Which tile, which split, and so every
rounding depends on the row alone: its result is the same, bit for bit, whatever rows stand beside it. Only where there
are as many tokens as rows is everything taken token by token, so that a step of decodes is one launch.

A block id outside the pool, or a row longer than its table, gives NaN for its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..layout import PageLayout
from .cache import halves
from .launch import dot, launch, power_of_2

SPLIT = 256  # keys a split has at least
MAX_SPLITS = 32
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _row_of(query_start_loc, num_rows, index, BLOCK_Q: tl.constexpr):
    """The last row that starts at or before `index`: a token (BLOCK_Q = 1, no gap) or a tile.

    Row r's tiles of BLOCK_Q tokens begin at index query_start_loc[r] // BLOCK_Q + r, which leaves room for one that is
    not full; for tokens the place is query_start_loc[r] itself.
    """
    low, high = 0, num_rows
    while high - low > 1:
        middle = (low + high) // 2
        first = tl.load(query_start_loc + middle)
        if BLOCK_Q > 0:
            first = first // BLOCK_Q + middle
        before = first <= index
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    return low


@triton.jit
def _splits(begin, end, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr):
    """How the keys begin … end of one token are split: (keys a split, how many splits)."""
    keys = tl.cdiv(tl.cdiv(end - begin, MAX_SPLITS), BLOCK_N) * BLOCK_N
    keys = tl.maximum(keys, SPLIT)
    return keys, tl.cdiv(end - begin, keys)


@triton.jit
def _decode_place(
    query_start_loc, seq_lens, num_rows, table_width,
    EVERY_TOKEN: tl.constexpr, WINDOW: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """What a program of a decode serves: (its row, its token or −1, whether the row can be served, first key, end)."""
    index = tl.program_id(0)
    row = _row_of(query_start_loc, num_rows, index, 0) if EVERY_TOKEN else index
    start, stop, length = tl.load(query_start_loc + row), tl.load(query_start_loc + row + 1), tl.load(seq_lens + row)
    token = index if EVERY_TOKEN else start
    served = (token >= start) & (token < stop) if EVERY_TOKEN else stop - start == 1
    fits = (length >= stop - start) & (length <= table_width * BLOCK_SIZE)
    end = tl.where(fits, length - stop + token + 1, 0)
    begin = 0 if WINDOW == 0 else tl.maximum(end - WINDOW, 0) // BLOCK_N * BLOCK_N
    return row, tl.where(served, token, -1), fits, begin, end


@triton.jit
def _load(pointers, columns, rows, MASK_COLUMNS: tl.constexpr, MASK_ROWS: tl.constexpr):
    if MASK_COLUMNS and MASK_ROWS:
        return tl.load(pointers, mask=columns & rows, other=0.0)
    elif MASK_COLUMNS:
        return tl.load(pointers, mask=columns, other=0.0)
    elif MASK_ROWS:
        return tl.load(pointers, mask=rows, other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def _tanh(x):
    """1 − 2 / (1 + e^2x), and its series where that would lose digits."""
    square = x * x
    series = x * (1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    return tl.where(square < 0.0625, series, 1 - 2 / (1 + tl.exp2(x * (2 * LOG2E))))


@triton.jit
def _walk(
    values, total, top, broken, q, k_pages, v_pages, table, begin, end, first_key, last_key, at,
    num_blocks, page_stride, scale, softcap,
    MASKED: tl.constexpr, CAPPED: tl.constexpr, WINDOW: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Online softmax of a tile over the keys begin … end; only first_key … last_key − 1 are read where MASKED.

    values float32 [M, BLOCK_D], total and top float32 [M]: Σ p·v, Σ p, and the maximum that p = 2^(score − top) is
    relative to. at [M]: the cache index of each row's token. broken [BLOCK_N]: whether a page was outside the pool.
    """
    d = tl.arange(0, BLOCK_D)
    for start in range(begin, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        seen = (n >= first_key) & (n < last_key)
        if MASKED:
            block = tl.load(table + n // BLOCK_SIZE, mask=seen, other=0)
        else:
            block = tl.load(table + n // BLOCK_SIZE)
        missing = (block < 0) | (block >= num_blocks)
        broken = broken | missing
        place = tl.where(missing, 0, block).to(tl.int64) * page_stride + n % BLOCK_SIZE * TOKEN_STRIDE
        k = _load(
            k_pages + place[None, :] + d[:, None], seen[None, :], d[:, None] < HEAD_DIM, MASKED, HEAD_DIM < BLOCK_D
        )
        scores = dot(q, k, tl.zeros((q.shape[0], BLOCK_N), tl.float32))
        if CAPPED:
            scores = _tanh(scores * (scale / softcap)) * (softcap * LOG2E)
        else:
            scores *= scale * LOG2E
        if MASKED:
            hidden = (n[None, :] > at[:, None]) | (seen[None, :] == 0)
            if WINDOW > 0:
                hidden = hidden | (n[None, :] <= at[:, None] - WINDOW)
            scores = tl.where(hidden, float("-inf"), scores)
        higher = tl.maximum(top, tl.max(scores, 1))
        finite = tl.where(higher == float("-inf"), 0.0, higher) if MASKED else higher  # nothing seen yet: weights are 0
        weights = tl.exp2(scores - finite[:, None])
        shrink = tl.exp2(top - finite)
        total = total * shrink + tl.sum(weights, 1)
        v = _load(
            v_pages + place[:, None] + d[None, :], seen[:, None], d[None, :] < HEAD_DIM, MASKED, HEAD_DIM < BLOCK_D
        )
        values = dot(weights.to(v.dtype), v, values * shrink[:, None])
        top = higher
    return values, total, top, broken


@triton.jit
def _attend(
    q, k_pages, v_pages, out, split_values, split_sums, block_table, query_start_loc, seq_lens,
    num_rows, num_tokens, num_blocks, table_width, q_token_stride, q_head_stride, page_stride, scale, softcap,
    DECODE: tl.constexpr, EVERY_TOKEN: tl.constexpr, NUM_SPLITS: tl.constexpr, SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr, GROUP: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One tile of BLOCK_Q tokens × GROUP heads. Grid: (tokens, rows or tiles; KV heads; splits)."""
    kv_head, split = tl.program_id(1), tl.program_id(2)
    if DECODE:
        row, first, fits, begin, end = _decode_place(
            query_start_loc, seq_lens, num_rows, table_width, EVERY_TOKEN, WINDOW, BLOCK_SIZE, BLOCK_N
        )
        last, at_first = first, end - 1
        keys, used = _splits(begin, end, BLOCK_N, SPLIT, MAX_SPLITS)
        used = tl.maximum(used, 1)  # a row that cannot be served is written by its first program
        if (split >= used) | ((first < 0) & (not EVERY_TOKEN)):
            return
        end_of_split = tl.minimum(end, begin + (split + 1) * keys)
        first_key = 0 if WINDOW == 0 else tl.maximum(end - WINDOW, 0)
        begin += split * keys
    else:
        row = _row_of(query_start_loc, num_rows, tl.program_id(0), BLOCK_Q)
        start, stop = tl.load(query_start_loc + row), tl.load(query_start_loc + row + 1)
        first = start + (tl.program_id(0) - start // BLOCK_Q - row) * BLOCK_Q
        if first >= stop or stop - start == 1:
            return
        length = tl.load(seq_lens + row)
        fits = (length >= stop - start) & (length <= table_width * BLOCK_SIZE)
        last = tl.minimum(first + BLOCK_Q, stop) - 1
        at_first = length - stop + first
        end = tl.where(fits, length - stop + last + 1, 0)
        end_of_split = end
        first_key = 0 if WINDOW == 0 else tl.maximum(at_first - WINDOW + 1, 0)
        begin = tl.minimum(first_key // BLOCK_N * BLOCK_N, end)

    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    token = first + m // GROUP
    head = kv_head * GROUP + m % GROUP
    mine = (m < BLOCK_Q * GROUP) & (token >= 0) & (token <= last) & (token < num_tokens)
    at = at_first + m // GROUP
    inside = mine[:, None] & (d[None, :] < HEAD_DIM)
    q_place = token.to(tl.int64) * q_token_stride + head * q_head_stride
    q_tile = tl.load(q + q_place[:, None] + d[None, :], mask=inside, other=0.0)

    k_head, v_head = k_pages + kv_head * HEAD_DIM, v_pages + kv_head * HEAD_DIM
    table = block_table + row.to(tl.int64) * table_width
    values = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    broken = tl.zeros((BLOCK_N,), tl.int1)
    full_begin = begin
    if WINDOW > 0:
        full_begin = tl.maximum(begin, tl.cdiv(tl.maximum(end - WINDOW, 0), BLOCK_N) * BLOCK_N)
        full_begin = tl.minimum(full_begin, end_of_split)
        values, total, top, broken = _walk(
            values, total, top, broken, q_tile, k_head, v_head, table, begin, full_begin, first_key, end, at,
            num_blocks, page_stride, scale, softcap,
            True, CAPPED, WINDOW, BLOCK_SIZE, NUM_KV_HEADS * HEAD_DIM, HEAD_DIM, BLOCK_D, BLOCK_N,
        )  # fmt: skip
    full_end = tl.maximum(full_begin, tl.minimum(end_of_split, (at_first + 1) // BLOCK_N * BLOCK_N))
    values, total, top, broken = _walk(
        values, total, top, broken, q_tile, k_head, v_head, table, full_begin, full_end, first_key, end, at,
        num_blocks, page_stride, scale, softcap,
        False, CAPPED, WINDOW, BLOCK_SIZE, NUM_KV_HEADS * HEAD_DIM, HEAD_DIM, BLOCK_D, BLOCK_N,
    )  # fmt: skip
    values, total, top, broken = _walk(
        values, total, top, broken, q_tile, k_head, v_head, table, full_end, end_of_split, first_key, end, at,
        num_blocks, page_stride, scale, softcap,
        True, CAPPED, WINDOW, BLOCK_SIZE, NUM_KV_HEADS * HEAD_DIM, HEAD_DIM, BLOCK_D, BLOCK_N,
    )  # fmt: skip
    lost = (tl.max(broken.to(tl.int32), 0) > 0) | (fits == 0)
    total = tl.where(lost, float("nan"), total)

    if DECODE and NUM_SPLITS > 1:  # noqa: SIM102 - decided when the kernel is compiled
        if used > 1:
            part = (tl.program_id(0).to(tl.int64) * NUM_KV_HEADS * GROUP + head) * NUM_SPLITS + split
            tl.store(split_values + part[:, None] * HEAD_DIM + d[None, :], values, mask=inside)
            tl.store(split_sums + part * 2, top, mask=mine)
            tl.store(split_sums + part * 2 + 1, total, mask=mine)
            return
    result = values / total[:, None]
    if DECODE and EVERY_TOKEN:  # a token of no row is zero
        result = tl.where(first < 0, 0.0, result)
        token = tl.program_id(0) + m // GROUP
        inside = (m < GROUP)[:, None] & (d[None, :] < HEAD_DIM)
    out_place = (token.to(tl.int64) * (NUM_KV_HEADS * GROUP) + head) * HEAD_DIM
    tl.store(out + out_place[:, None] + d[None, :], result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _join(
    out, split_values, split_sums, query_start_loc, seq_lens, num_rows, table_width,
    EVERY_TOKEN: tl.constexpr, NUM_SPLITS: tl.constexpr, SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """out = Σ 2^(top_s − top) values_s / Σ 2^(top_s − top) total_s over the splits s of one token and head.

    Grid: (tokens or rows as `_attend` had them, heads). A token that was not split is left alone.
    """
    _, token, _, begin, end = _decode_place(
        query_start_loc, seq_lens, num_rows, table_width, EVERY_TOKEN, WINDOW, BLOCK_SIZE, BLOCK_N
    )
    _, used = _splits(begin, end, BLOCK_N, SPLIT, MAX_SPLITS)
    if used <= 1 or token < 0:
        return
    head, s, d = tl.program_id(1), tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    part = (tl.program_id(0).to(tl.int64) * NUM_HEADS + head) * NUM_SPLITS + s
    top = tl.load(split_sums + part * 2, mask=s < used, other=float("-inf"))
    total = tl.load(split_sums + part * 2 + 1, mask=s < used, other=0.0)
    inside = (s < used)[:, None] & (d < HEAD_DIM)[None, :]
    values = tl.load(split_values + part[:, None] * HEAD_DIM + d[None, :], mask=inside, other=0.0)
    weight = tl.exp2(top - tl.max(top, 0))
    result = tl.sum(weight[:, None] * values, 0) / tl.sum(weight * total, 0)
    place = (token.to(tl.int64) * NUM_HEADS + head) * HEAD_DIM
    tl.store(out + place + d, result.to(out.dtype.element_ty), mask=d < HEAD_DIM)


@dataclass(frozen=True, slots=True)
class Tile:
    """How a launch is tiled: rows and keys of a tile, warps of a program, and tiles of keys under way at once."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def decode_tile(dtype: torch.dtype, group: int, block_d: int) -> Tile:
    rows = max(16, power_of_2(group))
    if dtype == torch.float32:
        return Tile(rows, 32 if block_d <= 64 else 16, 4, 2)
    return Tile(rows, 64 if block_d <= 128 else 32, 4, 3)


def prefill_tile(dtype: torch.dtype, group: int, block_d: int, windowed: bool) -> Tile:
    """A window is one more loop, whose masks need registers: with large heads its tiles are narrower."""
    if dtype == torch.float32:
        rows, keys, warps, stages = (32, 32, 4, 2) if block_d <= 64 else (16, 16, 4, 2)
    elif block_d <= 64:
        rows, keys, warps, stages = 128, 64, 8, 3
    elif block_d <= 128:
        rows, keys, warps, stages = 128, 32 if windowed else 64, 8, 2
    else:
        rows, keys, warps, stages = 64, 32, 8, 2
    return Tile(max(rows, power_of_2(group)), keys, warps, stages)


def paged_attention(
    q: torch.Tensor,
    pages: torch.Tensor,
    layout: PageLayout,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> torch.Tensor:
    num_tokens, num_heads, dim = q.shape
    num_rows, width = block_table.shape
    if num_tokens == 0 or num_rows == 0:
        return torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    k_pages, v_pages = halves(pages, layout)
    group, block_d = num_heads // layout.num_kv_heads, max(16, power_of_2(dim))
    every_token = num_tokens == num_rows
    out = (torch.empty if every_token else torch.zeros)(q.shape, dtype=q.dtype, device=q.device)
    num_splits = min(MAX_SPLITS, -(-width * layout.block_size // SPLIT))
    places = num_tokens if every_token else num_rows
    split_values = torch.empty(places * num_heads * num_splits * dim if num_splits > 1 else 0, device=q.device)
    split_sums = torch.empty(places * num_heads * num_splits * 2 if num_splits > 1 else 0, device=q.device)
    where = (block_table.contiguous(), query_start_loc, seq_lens)
    sizes = (num_rows, num_tokens, len(pages), width, q.stride(0), q.stride(1), k_pages.stride(0), scale, softcap)
    shape = {
        "SPLIT": SPLIT, "MAX_SPLITS": MAX_SPLITS, "HEAD_DIM": dim, "BLOCK_SIZE": layout.block_size, "WINDOW": window,
        "BLOCK_D": block_d,
    }  # fmt: skip
    heads = {"GROUP": group, "NUM_KV_HEADS": layout.num_kv_heads, "CAPPED": softcap > 0}

    tile = decode_tile(q.dtype, group, block_d)
    decode = {"EVERY_TOKEN": every_token, "NUM_SPLITS": num_splits, "BLOCK_N": tile.keys}
    launch(
        _attend, (places, layout.num_kv_heads, num_splits),
        q, k_pages, v_pages, out, split_values, split_sums, *where, *sizes,
        DECODE=True, BLOCK_M=tile.rows, BLOCK_Q=1, **decode, **shape, **heads,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    if num_splits > 1:
        launch(
            _join, (places, num_heads), out, split_values, split_sums, query_start_loc, seq_lens, num_rows, width,
            NUM_HEADS=num_heads, BLOCK_S=power_of_2(num_splits), **decode, **shape,
        )  # fmt: skip
    if not every_token:
        tile = prefill_tile(q.dtype, group, block_d, window > 0)
        block_q = tile.rows // group
        launch(
            _attend, (num_tokens // block_q + num_rows, layout.num_kv_heads, 1),
            q, k_pages, v_pages, out, split_values, split_sums, *where, *sizes,
            DECODE=False, EVERY_TOKEN=False, NUM_SPLITS=1, BLOCK_M=tile.rows, BLOCK_Q=block_q, BLOCK_N=tile.keys,
            **shape, **heads, num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
    return out
