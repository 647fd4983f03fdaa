"""Two orders of the same loops, to be read and measured: FlashAttention 1 and 2, counting the bytes that they move.

Plain attention writes and reads the N × N scores. Both of these keep a tile of scores on the chip and differ in which
operand stays there (Dao et al. 2022, algorithm 1; Dao 2023, section 3.1):

    1   for each tile of K, V:  for each tile of Q:    O, sum and maximum are read, updated and written at every pair
    2   for each tile of Q:     for each tile of K, V: O is written once; tiles of Q need nothing of each other, so
                                                       each is a program of its own, and causal ones stop at the diagonal

Every load and store of a program adds its bytes to a counter in the same memory; the counter itself is not counted.
Without cache: what an L2 would save is not subtracted. These are no part of the engine.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import dot, launch, power_of_2


@triton.jit
def _scores(q, k, rows, columns, size, scale, CAUSAL: tl.constexpr):
    """q·kᵀ·scale of a tile, −inf where a column is past the end or, CAUSAL, past its row."""
    scores = dot(q, tl.trans(k), tl.zeros((q.shape[0], k.shape[0]), tl.float32)) * scale
    hidden = columns[None, :] >= size
    if CAUSAL:
        hidden = hidden | (columns[None, :] > rows[:, None])
    return tl.where(hidden, float("-inf"), scores)


@triton.jit
def _update(values, total, top, scores, v):
    """One step of the online softmax: a tile of scores and its V go into Σ p·v, Σ p and the maximum."""
    higher = tl.maximum(top, tl.max(scores, 1))
    weights = tl.exp(scores - higher[:, None])
    shrink = tl.exp(top - higher)
    return dot(weights.to(v.dtype), v, values * shrink[:, None]), total * shrink + tl.sum(weights, 1), higher


@triton.jit
def _flash_1(
    q, k, v, values, total, top, moved, size, scale,
    CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    """One head. values float32 [N, d], total and top float32 [N] are the state between passes."""
    head = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    counted = tl.zeros((), tl.int64)
    for column in range(0, size, TILE):
        columns = column + tl.arange(0, TILE)
        place = (head * size + columns[:, None]) * HEAD_DIM + d[None, :]
        inside = (columns < size)[:, None] & (d < HEAD_DIM)[None, :]
        k_tile, v_tile = tl.load(k + place, mask=inside, other=0.0), tl.load(v + place, mask=inside, other=0.0)
        counted += 2 * BYTES * HEAD_DIM * tl.minimum(TILE, size - column)
        for row in range(column if CAUSAL else 0, size, TILE):
            rows = row + tl.arange(0, TILE)
            place = (head * size + rows[:, None]) * HEAD_DIM + d[None, :]
            state = head * size + rows
            known, inside = rows < size, (rows < size)[:, None] & (d < HEAD_DIM)[None, :]
            q_tile = tl.load(q + place, mask=inside, other=0.0)
            state_values = tl.load(values + place, mask=inside, other=0.0)
            state_total = tl.load(total + state, mask=known, other=0.0)
            state_top = tl.load(top + state, mask=known, other=0.0)
            scores = _scores(q_tile, k_tile, rows, columns, size, scale, CAUSAL)
            state_values, state_total, state_top = _update(state_values, state_total, state_top, scores, v_tile)
            tl.debug_barrier()
            tl.store(values + place, state_values, mask=inside)
            tl.store(total + state, state_total, mask=known)
            tl.store(top + state, state_top, mask=known)
            tl.debug_barrier()
            counted += (BYTES * HEAD_DIM + 2 * (4 * HEAD_DIM + 8)) * tl.minimum(TILE, size - row)
    tl.atomic_add(moved, counted)


@triton.jit
def _flash_2(
    q, k, v, out, lse, moved, size, scale,
    CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    """One tile of queries of one head. lse float32 [N]: log Σ exp(score), all that a backward pass would need."""
    row, head = tl.program_id(0) * TILE, tl.program_id(1).to(tl.int64)
    d, rows = tl.arange(0, BLOCK_D), row + tl.arange(0, TILE)
    here = (head * size + rows[:, None]) * HEAD_DIM + d[None, :]
    mine = (rows < size)[:, None] & (d < HEAD_DIM)[None, :]
    q_tile = tl.load(q + here, mask=mine, other=0.0)
    values, total = tl.zeros((TILE, BLOCK_D), tl.float32), tl.zeros((TILE,), tl.float32)
    top = tl.full((TILE,), float("-inf"), tl.float32)
    height = tl.minimum(TILE, size - row)
    counted = (2 * BYTES * HEAD_DIM + 4) * height.to(tl.int64)
    for column in range(0, tl.minimum(row + TILE, size) if CAUSAL else size, TILE):
        columns = column + tl.arange(0, TILE)
        place = (head * size + columns[:, None]) * HEAD_DIM + d[None, :]
        inside = (columns < size)[:, None] & (d < HEAD_DIM)[None, :]
        k_tile, v_tile = tl.load(k + place, mask=inside, other=0.0), tl.load(v + place, mask=inside, other=0.0)
        scores = _scores(q_tile, k_tile, rows, columns, size, scale, CAUSAL)
        values, total, top = _update(values, total, top, scores, v_tile)
        counted += 2 * BYTES * HEAD_DIM * tl.minimum(TILE, size - column)
    tl.store(out + here, (values / total[:, None]).to(out.dtype.element_ty), mask=mine)
    tl.store(lse + head * size + rows, top + tl.log(total), mask=rows < size)
    tl.atomic_add(moved, counted)


def _shape(q: torch.Tensor, causal: bool, tile: int) -> dict[str, int | bool]:
    dim = q.shape[2]
    block_d = max(16, power_of_2(dim))
    return {"CAUSAL": causal, "HEAD_DIM": dim, "BLOCK_D": block_d, "TILE": tile, "BYTES": q.element_size()}


def flash_attention_1(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = True, tile: int = 32
) -> tuple[torch.Tensor, int]:
    """q, k, v [heads, N, d] in D, contiguous -> (attention [heads, N, d] in D, bytes moved). K/V is the outer loop.

    The last division, which the paper folds into every pass, is torch's here and not counted. Waits for the device.
    """
    heads, size, dim = q.shape
    values = torch.zeros(heads, size, dim, device=q.device)
    total, top = torch.zeros(heads, size, device=q.device), torch.full((heads, size), -torch.inf, device=q.device)
    moved = torch.zeros(1, dtype=torch.int64, device=q.device)
    launch(_flash_1, (heads,), q, k, v, values, total, top, moved, size, dim**-0.5, **_shape(q, causal, tile))
    return (values / total[..., None]).to(q.dtype), int(moved)


def flash_attention_2(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = True, tile: int = 32
) -> tuple[torch.Tensor, int]:
    """The same with the queries outside. Waits for the device."""
    heads, size, dim = q.shape
    out, lse = torch.empty_like(q), torch.empty(heads, size, device=q.device)
    moved = torch.zeros(1, dtype=torch.int64, device=q.device)
    grid = (-(-size // tile), heads)
    launch(_flash_2, grid, q, k, v, out, lse, moved, size, dim**-0.5, **_shape(q, causal, tile))
    return out, int(moved)
