"""Greedy and filtered sampling on a GPU: one program a row, no sort, and the same token whatever the batch.

**Whole numbers.** A token's mass is 2^((logit − largest) · log2 e / temperature) in units of 2^−40, an int64, so sums are
exact in any order, and ranks, thresholds and the draw are decided without rounding.

**Thresholds.** The ranking is by logit, so what a filter keeps is all tokens above some logit and the first few, by id,
of those at it. Logits become int32 keys that order alike; the threshold is found two bits at a time from the top:

    top_k   the largest key t with   #{key ≥ t} ≥ k                            then k − #{key > t} tokens at t stay
    top_p   the largest key t with   mass{key ≥ t} ≥ top_p · mass of top_k     then as many at t as reach it

Sixteen passes over a row that lies in the L2 cache; a filter that is off costs none. min_p is a bound on the mass.
**Draw.** The kept mass block by block in id order, until it exceeds uniform · (kept mass); then one scan in that block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import launch

BLOCK = 4096  # logits of a pass under way at once
LOWEST = tl.constexpr(1 - 2**31)  # below the key of −∞; an int32, where −2^31 would not be taken for one
UNIT = tl.constexpr(float(2**40))
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _best(row, size, BLOCK: tl.constexpr):
    """The largest logit and the lowest id that has it; id −1 where the row has no finite maximum."""
    lane = tl.arange(0, BLOCK)
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    first = tl.zeros((BLOCK,), tl.int32)
    unordered = tl.zeros((BLOCK,), tl.int1)
    for start in range(0, size, BLOCK):
        logits = tl.load(row + start + lane, mask=start + lane < size, other=float("-inf"))
        unordered = unordered | (logits != logits)
        higher = logits > top
        top = tl.where(higher, logits, top)
        first = tl.where(higher, start + lane, first)
    largest = tl.max(top, 0)
    lowest = tl.min(tl.where(top == largest, first, size), 0)
    finite = (largest > float("-inf")) & (largest < float("inf")) & (tl.max(unordered.to(tl.int32), 0) == 0)
    return largest, tl.where(finite, lowest, -1)


@triton.jit
def _tokens(row, start, size, largest, scale, BLOCK: tl.constexpr):
    """A block's ids, keys, and masses; past the end the key is the lowest and the mass zero."""
    ids = start + tl.arange(0, BLOCK)
    logits = tl.load(row + ids, mask=ids < size, other=float("-inf"))
    bits = tl.where(logits == 0, 0.0, logits).to(tl.int32, bitcast=True)  # −0 equals 0
    keys = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    masses = (tl.exp2((logits - largest) * scale) * UNIT).to(tl.int64)
    return ids, tl.where(ids < size, keys, LOWEST), masses


@triton.jit
def _threshold(row, size, largest, scale, floor, goal, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The largest key t whose amount{key ≥ t} is at least `goal`; those at `floor` or below have enough."""
    t = LOWEST
    step = 1 << 30
    for _digit in range(16):
        t1, t2, t3 = t + step, t + step + step, t + step + step + step
        zero = tl.zeros((BLOCK,), tl.int64)
        a1, a2, a3 = zero, zero, zero
        for start in range(0, size, BLOCK):
            _ids, keys, masses = _tokens(row, start, size, largest, scale, BLOCK)
            each = masses if BY_MASS else tl.full((BLOCK,), 1, tl.int64)
            a1 += tl.where(keys >= t1, each, 0)
            a2 += tl.where(keys >= t2, each, 0)
            a3 += tl.where(keys >= t3, each, 0)
        enough1 = (t1 <= floor) | (tl.sum(a1, 0) >= goal)
        enough2 = (t2 <= floor) | (tl.sum(a2, 0) >= goal)
        enough3 = (t3 <= floor) | (tl.sum(a3, 0) >= goal)
        t += step * (enough1.to(tl.int32) + enough2.to(tl.int32) + enough3.to(tl.int32))
        step = step >> 2
    return t


@triton.jit
def _above(row, size, largest, scale, t, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The amount of the tokens above key t, and of those at it."""
    above, equal = tl.zeros((BLOCK,), tl.int64), tl.zeros((BLOCK,), tl.int64)
    for start in range(0, size, BLOCK):
        _ids, keys, masses = _tokens(row, start, size, largest, scale, BLOCK)
        each = masses if BY_MASS else tl.full((BLOCK,), 1, tl.int64)
        above += tl.where(keys > t, each, 0)
        equal += tl.where(keys == t, each, 0)
    return tl.sum(above, 0), tl.sum(equal, 0)


@triton.jit
def _kept_masses(row, start, size, largest, scale, t, ties, seen, least, BLOCK: tl.constexpr):
    """A block's ids, the masses of what is kept (0 elsewhere), and how many tokens at t came so far."""
    ids, keys, masses = _tokens(row, start, size, largest, scale, BLOCK)
    at = (keys == t).to(tl.int32)
    stays = (keys > t) | ((at > 0) & (seen + tl.cumsum(at, 0) <= ties))
    stays = stays & (masses.to(tl.float64) >= least)
    return ids, tl.where(stays, masses, 0), seen + tl.sum(at, 0)


@triton.jit
def _greedy(logits, out, size, stride, BLOCK: tl.constexpr):
    """One row."""
    s = tl.program_id(0).to(tl.int64)
    _largest, best = _best(logits + s * stride, size, BLOCK)
    tl.store(out + s, best.to(tl.int64))


@triton.jit
def _sample(logits, temperature, top_k, top_p, min_p, uniform, out, size, stride, BLOCK: tl.constexpr):
    """One row."""
    s = tl.program_id(0).to(tl.int64)
    row = logits + s * stride
    largest, best = _best(row, size, BLOCK)
    tl.store(out + s, best.to(tl.int64))
    heat = tl.load(temperature + s)
    if (heat <= 0) | (best < 0):
        return
    scale = tl.minimum(LOG2E / heat, 1e38)  # finite, so that the largest logit has mass 1 at any temperature

    t, ties = LOWEST, size  # kept: every key above t, and the first `ties` tokens at it
    k = tl.load(top_k + s)
    if (k > 0) & (k < size):
        t = _threshold(row, size, largest, scale, LOWEST, k, False, BLOCK)
        above, _equal = _above(row, size, largest, scale, t, False, BLOCK)
        ties = k - above.to(tl.int32)
    p = tl.load(top_p + s).to(tl.float64)
    if p < 1:
        above, equal = _above(row, size, largest, scale, t, True, BLOCK)
        _more, count = _above(row, size, largest, scale, t, False, BLOCK)
        each = equal // tl.maximum(count, 1)
        whole = above + tl.minimum(count, ties) * each
        goal = tl.maximum(tl.ceil(p * whole.to(tl.float64)).to(tl.int64), 1)
        edge = _threshold(row, size, largest, scale, t, goal, True, BLOCK)
        above, equal = _above(row, size, largest, scale, edge, True, BLOCK)
        _more, count = _above(row, size, largest, scale, edge, False, BLOCK)
        each = tl.maximum(equal // tl.maximum(count, 1), 1)
        reached = ((goal - above + each - 1) // each).to(tl.int32)
        ties = tl.where(edge > t, reached, tl.minimum(reached, ties))
        t = tl.maximum(edge, t)
    least = tl.load(min_p + s).to(tl.float64) * UNIT

    seen, kept = 0, tl.zeros((), tl.int64)
    for start in range(0, size, BLOCK):
        _ids, masses, seen = _kept_masses(row, start, size, largest, scale, t, ties, seen, least, BLOCK)
        kept += tl.sum(masses, 0)
    goal = tl.minimum((tl.load(uniform + s) * kept.to(tl.float64)).to(tl.int64), kept - 1)
    start, seen = 0, 0
    ids, masses, seen = _kept_masses(row, start, size, largest, scale, t, ties, seen, least, BLOCK)
    passed, here = tl.zeros((), tl.int64), tl.sum(masses, 0)
    while (passed + here <= goal) & (start + BLOCK < size):
        passed += here
        start += BLOCK
        ids, masses, seen = _kept_masses(row, start, size, largest, scale, t, ties, seen, least, BLOCK)
        here = tl.sum(masses, 0)
    token = tl.min(tl.where(passed + tl.cumsum(masses, 0) > goal, ids, size - 1), 0)
    tl.store(out + s, token.to(tl.int64))


def _choose(kernel, logits: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    out = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    sizes = (logits.shape[1], logits.stride(0))
    launch(kernel, (len(logits),), logits, *parameters, out, *sizes, BLOCK=BLOCK, num_warps=16)
    return out


def greedy(logits: torch.Tensor) -> torch.Tensor:
    return _choose(_greedy, logits)


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniform: torch.Tensor,
) -> torch.Tensor:
    return _choose(_sample, logits, temperature, top_k, top_p, min_p, uniform)
