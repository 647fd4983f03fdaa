"""Plain torch: the meaning of every operation, and the oracle of the other implementations' tests.

Slow and obviously right, on any device, in float32, bfloat16 and float16, over pages of either order. `kernels.ops`
documents each operation; here only the way it is computed is said. Sums that decide something (attention, sampling)
run in float64, so that another implementation is measured against the truth rather than against another rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .layout import PageLayout


def page_layout(block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> PageLayout:
    return PageLayout(block_size, num_kv_heads, head_dim, dtype)


# Element-wise


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, out_dtype: torch.dtype) -> torch.Tensor:
    x = x.float()
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return (weight.float() * x).to(out_dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, out_dtype: torch.dtype
) -> torch.Tensor:
    residual += x.float()
    return rms_norm(residual, weight, eps, out_dtype=out_dtype)


def rotary(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
    outside = positions[(positions < 0) | (positions >= len(cos_sin))]
    if len(outside):
        raise IndexError(f"positions hold {int(outside[0])}; the rotary table reaches from 0 to {len(cos_sin) - 1}")
    half = cos_sin.shape[1] // 2
    cos, sin = cos_sin[positions].unsqueeze(1).split(half, dim=-1)  # [T, 1, rot_dim / 2] each
    for heads in (q, k):
        first, second = heads[..., : 2 * half].to(torch.float32, copy=True).split(half, dim=-1)  # not a view of `heads`
        heads[..., :half] = (first * cos - second * sin).to(heads.dtype)
        heads[..., half : 2 * half] = (second * cos + first * sin).to(heads.dtype)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


# Pages


def page_views(pages: torch.Tensor, layout: PageLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of all pages as strided views, token-major: writing to them writes the pages.

    "nhd": both [B, block_size, Hk, d]. "vnni": K [B, block_size/16, 16, Hk, d/2, 2], V [B, block_size/2, 2, Hk, d].
    """
    size, heads, dim, half = layout.block_size, layout.num_kv_heads, layout.head_dim, layout.half_bytes
    k, v = (pages[:, start : start + half].view(layout.dtype) for start in (0, half))
    if layout.order == "nhd":
        return k.unflatten(1, (size, heads, dim)), v.unflatten(1, (size, heads, dim))
    k = k.unflatten(1, (heads, size // 16, dim // 2, 16, 2)).permute(0, 2, 4, 1, 3, 5)
    v = v.unflatten(1, (heads, size // 2, dim, 2)).permute(0, 2, 4, 1, 3)
    return k, v


def write_kv(
    k: torch.Tensor, v: torch.Tensor, pages: torch.Tensor, layout: PageLayout, slot_mapping: torch.Tensor
) -> None:
    kept = slot_mapping >= 0
    block, offset = slot_mapping[kept] // layout.block_size, slot_mapping[kept] % layout.block_size
    if len(block) and int(block.max()) >= len(pages):
        raise IndexError(f"slot_mapping names block {int(block.max())}; the pool has blocks 0 to {len(pages) - 1}")
    k_pages, v_pages = page_views(pages, layout)
    if layout.order == "nhd":
        k_pages[block, offset] = k[kept]
        v_pages[block, offset] = v[kept]
    else:
        k_pages[block, offset // 16, offset % 16] = k[kept].unflatten(-1, (-1, 2))
        v_pages[block, offset // 2, offset % 2] = v[kept]


def gather_kv(pages: torch.Tensor, layout: PageLayout, block_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    k_pages, v_pages = page_views(pages, layout)
    shape = (-1, layout.num_kv_heads, layout.head_dim)
    return k_pages[block_ids].reshape(shape), v_pages[block_ids].reshape(shape)


def copy_pages(slots: Sequence[torch.Tensor], pairs: torch.Tensor) -> None:
    for pages in slots:
        for source, copy in pairs.tolist():
            if not (0 <= source < len(pages) and 0 <= copy < len(pages)):
                raise IndexError(f"copy {source} -> {copy}: the pool has blocks 0 to {len(pages) - 1}")
            pages[copy] = pages[source]


# Attention


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
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    starts = query_start_loc.tolist()
    for row, length in enumerate(seq_lens.tolist()):
        tokens = slice(starts[row], starts[row + 1])
        if tokens.start == tokens.stop:
            continue
        block_ids = block_table[row, : -(-length // layout.block_size)].long()
        if len(block_ids) * layout.block_size < length:
            raise IndexError(f"row {row} has {length} tokens; its block table ends at {block_table.shape[1]} blocks")
        if int(block_ids.min()) < 0 or int(block_ids.max()) >= len(pages):
            raise IndexError(f"row {row} names a block outside the pool of blocks 0 to {len(pages) - 1}")
        k, v = gather_kv(pages, layout, block_ids)
        out[tokens] = attend(q[tokens], k[:length], v[:length], scale, window, softcap).to(q.dtype)
    return out


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int, softcap: float
) -> torch.Tensor:
    """One sequence: q [n, Hq, d] are its last n tokens, k and v [length, Hk, d] all of them. float64 [n, Hq, d]."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, dim=1) for x in (k, v))  # [length, Hq, d]
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    at = torch.arange(k.shape[0] - q.shape[0], k.shape[0], device=q.device)[:, None]  # cache index of each query
    seen = torch.arange(k.shape[0], device=q.device)[None, :]
    hidden = seen > at
    if window > 0:
        hidden |= seen <= at - window
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


# Linear layers

QUANTIZATIONS = (None, "int8", "int8-dynamic")
GROUP = 32  # values of x that share a scale under "int8-dynamic"
LEAST_LARGEST = 2.0**-100
PIECE = 1 << 20  # values that are quantized at a time


class _Weight:
    """What has a `weight` [N, K]."""

    __slots__ = ()
    weight: torch.Tensor

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]


@dataclass(frozen=True, slots=True)
class PackedLinear(_Weight):
    """A weight [N, K] and bias [N] as they are."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.weight)


@dataclass(frozen=True, slots=True)
class Int8Linear(_Weight):
    """A weight of int8 [N, K] with a float32 scale [N] for each output, and a bias [N] in D.

    `dynamic`: the product takes x as int8 too, with a scale for each group of 32.
    """

    weight: torch.Tensor
    scale: torch.Tensor
    bias: torch.Tensor | None
    dtype: torch.dtype
    dynamic: bool

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes + self.scale.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        return (self.weight[ids] * self.scale[ids, None]).to(self.dtype)


def check_quantization(quantization: str | None) -> None:
    if quantization not in QUANTIZATIONS:
        raise ValueError(f"quantization={quantization!r}: must be one of {', '.join(map(repr, QUANTIZATIONS))}")


def pack_linear(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    quantization: str | None = None,
    *,
    gated: bool = False,
) -> PackedLinear | Int8Linear:
    check_quantization(quantization)
    bias = None if bias is None else bias.detach().to(dtype)
    if quantization is None:
        return PackedLinear(weight.detach().to(dtype), bias)
    return Int8Linear(*quantize_weight(weight), bias, dtype, quantization == "int8-dynamic")


def quantize_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(int8 [N, K], float32 scale [N]): to the nearest multiple of the scale, which is a row's largest magnitude / 127.

    Symmetric, round to nearest (Nagel et al. 2021, A White Paper on Neural Network Quantization, 2.2). A row of zeros
    stays zero. Taken in pieces, so that no second copy of a large weight is made in float32.
    """
    rounded = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scale = torch.empty(len(weight), dtype=torch.float32, device=weight.device)
    rows = max(1, PIECE // max(1, weight.shape[1]))
    for piece, to, factor in zip(weight.detach().split(rows), rounded.split(rows), scale.split(rows), strict=True):
        piece = piece.float()
        torch.div(torch.linalg.vector_norm(piece, torch.inf, dim=1), 127, out=factor)
        to.copy_(torch.round(piece / torch.where(factor > 0, factor, 1.0)[:, None]))
    return rounded, scale


def quantize_groups(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, K] as (whole numbers from -127 to 127, float32 [T, G, 32]; scales float32 [T, G, 1]), K padded with zeros.

    The scale is the largest magnitude of a group / 127, NaN or infinite where x is. A group below LEAST_LARGEST, whose
    reciprocal would leave float32, is all zeros.
    """
    x = F.pad(x.float(), (0, -x.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
    largest = x.abs().amax(-1, keepdim=True)
    inverse = torch.where(largest < LEAST_LARGEST, 0.0, torch.full_like(largest, 127) / largest)
    return torch.round(x * inverse), largest / 127


def linear(x: torch.Tensor, packed: PackedLinear | Int8Linear, *, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    out_dtype = out_dtype or x.dtype
    if isinstance(packed, PackedLinear):
        return F.linear(x, packed.weight, packed.bias).to(out_dtype)
    if packed.dynamic:
        whole, scale = quantize_groups(x)
        x = (whole * scale).flatten(1)[:, : packed.in_features]
    out = F.linear(x.float(), packed.weight.float()) * packed.scale
    return (out if packed.bias is None else out + packed.bias).to(out_dtype)


def linear_add(x: torch.Tensor, packed: PackedLinear | Int8Linear, residual: torch.Tensor) -> None:
    residual += linear(x, packed, out_dtype=torch.float32)


def linear_silu_mul(x: torch.Tensor, packed: PackedLinear | Int8Linear) -> torch.Tensor:
    return silu_mul(linear(x, packed, out_dtype=torch.float32)).to(x.dtype)


# Sampling


def greedy(logits: torch.Tensor) -> torch.Tensor:
    top = logits.amax(-1, keepdim=True)  # NaN where the row holds one
    ids = torch.arange(logits.shape[-1], device=logits.device)
    lowest = torch.where(logits == top, ids, logits.shape[-1]).amin(-1)
    return torch.where(top.squeeze(-1).isfinite(), lowest, -1)


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniform: torch.Tensor,
) -> torch.Tensor:
    best = greedy(logits)
    tokens = best.tolist()
    for s, t in enumerate(temperature.tolist()):
        if tokens[s] >= 0 and t > 0:
            tokens[s] = _sample_row(logits[s], t, int(top_k[s]), float(top_p[s]), float(min_p[s]), float(uniform[s]))
    return torch.tensor(tokens, dtype=torch.long, device=logits.device)


def _sample_row(logits: torch.Tensor, temperature: float, k: int, top_p: float, min_p: float, uniform: float) -> int:
    kept, p = kept_tokens(logits, temperature, k, top_p, min_p)
    mass = p.cumsum(-1)
    over = (mass > uniform * mass[-1]).nonzero()
    return int(kept[over[0] if len(over) else -1])


def kept_tokens(
    logits: torch.Tensor, temperature: float, k: int, top_p: float, min_p: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the filters leave of one row, float32 [V], temperature above 0: (token ids ascending, int64 [K]; their
    probabilities in units of the largest, float64 [K])."""
    p = ((logits.double() - logits.max()) / temperature).exp()  # in units of the largest, so that equal stays equal
    order = torch.argsort(logits, descending=True, stable=True)  # equal logits stay in ascending id order
    if k > 0:
        order = order[:k]
    if top_p < 1:
        mass = p[order].cumsum(-1)
        order = order[: 1 + int((mass[:-1] < top_p * mass[-1]).sum())]
    if min_p > 0:
        order = order[p[order] >= min_p * p[order[0]]]
    kept = order[p[order] > 0].sort().values
    return kept, p[kept]
