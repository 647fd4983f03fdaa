"""The operations of kvscope, and which implementation serves each: torch tensors in, torch tensors out.

Every operation exists once here, with its meaning, and once in every implementation, with the same signature:

| implementation | module | device | element types |
|---|---|---|---|
| "reference" | `kvscope.kernels.reference` | any | float32, bfloat16, float16 |
| "cpu" | `kvscope.kernels.cpu` (Numba) | cpu | float32, bfloat16 |
| "triton" | `kvscope.kernels.triton` | cuda; cpu in Triton's interpreter | float32, bfloat16, float16 |

On a GPU an operation never waits for the device, so it raises no IndexError: what lies outside is left out, and what
depends on it is NaN.

An engine resolves its own once, `k = ops.resolve("auto", device, dtype)`, and calls `k.rms_norm(…)`; two engines of
one process may differ. Direct calls, `ops.rms_norm(…)`, serve tests and notebooks: they take the implementation
chosen by `with ops.using("reference"):`, or else what "auto" gives for the first tensor.

Letters in shapes: T tokens of a step, R rows (sequences), S sampled rows, H hidden size, Hq query heads, Hk KV heads
(Hq is a multiple of Hk), d head size, B pages of a layer, V vocabulary. D is the element type of the model.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import torch

from .layout import PageLayout

IMPLEMENTATIONS = {  # name -> (module, device types or None for all, element types)
    "reference": (".reference", None, (torch.float32, torch.bfloat16, torch.float16)),
    "cpu": (".cpu", ("cpu",), (torch.float32, torch.bfloat16)),
    "triton": (".triton", ("cuda",), (torch.float32, torch.bfloat16, torch.float16)),
}
AUTO_ORDER = ("cpu", "triton", "reference")  # the first that serves the device and the element type


@dataclass(frozen=True, slots=True)
class Ops:
    """One implementation of every operation. The functions of this module of the same names say what each does."""

    name: str
    page_layout: Callable[..., PageLayout]
    rms_norm: Callable[..., torch.Tensor]
    add_rms_norm: Callable[..., torch.Tensor]
    rotary: Callable[..., None]
    silu_mul: Callable[..., torch.Tensor]
    write_kv: Callable[..., None]
    gather_kv: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    copy_pages: Callable[..., None]
    paged_attention: Callable[..., torch.Tensor]
    pack_linear: Callable[..., Any]
    linear: Callable[..., torch.Tensor]
    linear_add: Callable[..., None]
    linear_silu_mul: Callable[..., torch.Tensor]
    greedy: Callable[..., torch.Tensor]
    sample: Callable[..., torch.Tensor]
    batch_invariant: bool = False  # a row's result depends on that row alone; see `invariant`


OPERATIONS = tuple(f.name for f in fields(Ops) if f.name not in ("name", "batch_invariant"))


def resolve(name: str = "auto", device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Ops:
    """The implementation called `name` for tensors of `dtype` on `device`; "auto" takes the fastest that serves them.

    Raises ValueError when there is no such implementation or it does not serve that device or element type.
    """
    device_type = torch.device(device).type
    if name == "auto":
        return _load(next(n for n in AUTO_ORDER if not _refusal(n, device_type, dtype)))
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"kernels={name!r}: the implementations are 'auto', {', '.join(map(repr, IMPLEMENTATIONS))}")
    # Triton's interpreter runs the kernels on CPU tensors: for tests and for reading, so never chosen by "auto".
    interpreted = name == "triton" and device_type == "cpu" and _interprets()
    if refusal := _refusal(name, "cuda" if interpreted else device_type, dtype):
        raise ValueError(refusal)
    return _load(name)


def _interprets() -> bool:
    """Whether Triton was imported as an interpreter (TRITON_INTERPRET=1)."""
    return importlib.util.find_spec("triton") is not None and importlib.import_module("triton").knobs.runtime.interpret


def _refusal(name: str, device_type: str, dtype: torch.dtype) -> str:
    """Why `name` cannot serve; empty when it can."""
    _, device_types, dtypes = IMPLEMENTATIONS[name]
    if device_types is not None and device_type not in device_types:
        return f"kernels={name!r} serves the device {', '.join(device_types)}, not {device_type}; use 'auto'"
    if name == "triton" and importlib.util.find_spec("triton") is None:
        return "kernels='triton' needs the package triton, which is not installed; use 'auto'"
    if dtype not in dtypes:
        served = ", ".join(str(d).removeprefix("torch.") for d in dtypes)
        return f"kernels={name!r} serves dtype {served}, not {str(dtype).removeprefix('torch.')}; use 'reference'"
    return ""


@cache
def _load(name: str) -> Ops:
    module = importlib.import_module(IMPLEMENTATIONS[name][0], __package__)
    return Ops(name, **{operation: getattr(module, operation) for operation in OPERATIONS})


_chosen: ContextVar[str] = ContextVar("kvscope_kernels", default="auto")


@contextmanager
def using(name: str) -> Iterator[None]:
    """Direct calls inside the block use implementation `name`. Holds for this thread (or task) only."""
    if name != "auto" and name not in IMPLEMENTATIONS:
        raise ValueError(f"kernels={name!r}: the implementations are 'auto', {', '.join(map(repr, IMPLEMENTATIONS))}")
    token = _chosen.set(name)
    try:
        yield
    finally:
        _chosen.reset(token)


def _for(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> Ops:
    return resolve(_chosen.get(), tensor.device, dtype or tensor.dtype)


# The operations


def page_layout(block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> PageLayout:
    """The layout in which this implementation reads pages fastest. Every implementation of a device reads every layout."""
    name = _chosen.get()
    kernels = resolve(name, "cpu", dtype) if name == "auto" else _load(name)
    return kernels.page_layout(block_size, num_kv_heads, head_dim, dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, out_dtype: torch.dtype) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension, in float32 (Zhang and Sennrich 2019, eq. 4).

    x [T, H] in D or float32, rows may be strided; weight [H] in D or float32. Returns a new [T, H] in `out_dtype`.
    """
    return _for(x).rms_norm(x, weight, eps, out_dtype=out_dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, out_dtype: torch.dtype
) -> torch.Tensor:
    """residual += x in place, then `rms_norm(residual, weight, eps)`: the step between two halves of a layer.

    x [T, H] in D or float32; residual float32 [T, H], the residual stream; weight [H]. Returns [T, H] in `out_dtype`.
    """
    return _for(x).add_rms_norm(x, residual, weight, eps, out_dtype=out_dtype)


def rotary(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
    """Rotate the first `rot_dim` elements of every head by its token's position, in place (Su et al. 2021, eq. 34).

    Element i of the first half turns with element i of the second half (the GPT-NeoX pairing).
    q [T, Hq, d] and k [T, Hk, d] in D, possibly views of one qkv tensor (last dimension contiguous);
    positions int64 [T]; cos_sin float32 [max_pos, rot_dim]: cosines in the first half, sines in the second.
    Raises IndexError for a position outside the table.
    """
    _for(q).rotary(q, k, positions, cos_sin)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up for gate_up [T, 2·I] in D = gate | up. Returns [T, I] in D; computed in float32."""
    return _for(gate_up).silu_mul(gate_up)


def write_kv(
    k: torch.Tensor, v: torch.Tensor, pages: torch.Tensor, layout: PageLayout, slot_mapping: torch.Tensor
) -> None:
    """Store keys and values of the step's tokens: token t goes to page slot // block_size, row slot % block_size.

    k, v [T, Hk, d] in D, possibly strided views (last dimension contiguous); pages uint8 [B, at least page_bytes];
    slot_mapping int64 [T], −1 skips the token. Raises IndexError for a slot outside the pages.
    """
    _for(k).write_kv(k, v, pages, layout, slot_mapping)


def gather_kv(pages: torch.Tensor, layout: PageLayout, block_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain K and V of whole blocks: block_ids int64 [n] -> two [n·block_size, Hk, d] in D, in the order of the ids."""
    return _for(pages, layout.dtype).gather_kv(pages, layout, block_ids)


def copy_pages(slots: Sequence[torch.Tensor], pairs: torch.Tensor) -> None:
    """Copy whole pages as bytes, in the order of `pairs` int64 [C, 2] = (source, copy), in every slot.

    slots: uint8 [B, page_bytes], one per layer slot. Raises IndexError for an id outside the pages.
    """
    if slots:
        _for(slots[0], torch.float32).copy_pages(slots, pairs)


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
    """Causal attention of a step's queries over the cached pages, prefill and decode rows mixed.

    Row r owns tokens query_start_loc[r] : query_start_loc[r + 1]; its i-th token sits at cache index
    n = seq_lens[r] − q_len + i and sees cache indices 0..n, or max(0, n − window + 1)..n where window > 0. Its own K
    and V are written before. Scores are q·k·scale, with a softcap c > 0 then c·tanh(score / c). Query head h reads KV
    head h // (Hq / Hk). Softmax and sums are float32 or better.

    q [T, Hq, d] in D, possibly a strided view; pages uint8 [B, ≥ page_bytes]; block_table int32 [R, most blocks];
    query_start_loc int32 [R + 1]; seq_lens int32 [R]. Returns a new contiguous [T, Hq, d] in D; tokens that belong to no
    row are zero. Raises IndexError for a block id outside the pages or a row longer than its table.
    """
    return _for(q).paged_attention(
        q, pages, layout, block_table, query_start_loc, seq_lens, scale=scale, window=window, softcap=softcap
    )


def pack_linear(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    quantization: str | None = None,
    *,
    gated: bool = False,
) -> Any:
    """Lay out weight [N, K] (and bias [N]) once for `linear` on activations of `dtype`; the only copy kept.

    | quantization | the weight | the product |
    |---|---|---|
    | None | in D | x Wᵀ |
    | "int8" | int8, one float32 scale for each of the N outputs: the largest magnitude of its row / 127 | x in D, times the int8 as they are, times the scale |
    | "int8-dynamic" | the same | x as int8 with a scale for each 32 values along K, their largest magnitude / 127 |

    `gated`: the rows are those of a gate and then those of an up projection, for `linear_silu_mul`, which alone takes it.
    The result has `out_features`, `in_features`, `num_bytes`, and `rows(ids int64 [T]) -> [T, K] in D`, which serves
    an embedding tied to the head.
    """
    return _for(weight, dtype).pack_linear(weight, bias, dtype, quantization, gated=gated)


def linear(x: torch.Tensor, packed: Any, *, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """x [T, K] in D times a packed weight, plus its bias: [T, N] in `out_dtype` (default D), summed in float32.

    Products of two int8 are summed exactly within a group.
    """
    return _for(x).linear(x, packed, out_dtype=out_dtype)


def linear_add(x: torch.Tensor, packed: Any, residual: torch.Tensor) -> None:
    """residual += `linear(x, packed)`, in place and not rounded on its way: residual is float32 [T, N]."""
    _for(x).linear_add(x, packed, residual)


def linear_silu_mul(x: torch.Tensor, packed: Any) -> torch.Tensor:
    """silu(gate) · up [T, I] in D of a weight that was packed with `gated=True`, x [T, K] in D: an MLP's first half. Neither
    factor is rounded to D before (on a GPU both are)."""
    return _for(x).linear_silu_mul(x, packed)


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """The token of the largest logit, the lowest id among equals: logits float32 [S, V] -> int64 [S].

    A row without a finite maximum (NaN anywhere, +inf, or everything −inf) gives −1.
    """
    return _for(logits).greedy(logits)


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniform: torch.Tensor,
) -> torch.Tensor:
    """Draw one token a row from the filtered distribution: int64 [S].

    One rule on every backend:
    1. p = softmax(logits / temperature). Temperature 0 is `greedy`.
    2. Tokens are ranked by p, descending; among equals the lower id comes first.
    3. top_k > 0 keeps exactly the first top_k.
    4. top_p < 1 keeps the smallest prefix of these whose share of their mass is at least top_p, at least one token.
    5. min_p > 0 keeps, of these, the tokens with p >= min_p · (largest p).
    6. The token is the first, in ascending id order over what is kept, whose running mass exceeds
       uniform · (kept mass).

    logits float32 [S, V], −inf for a masked token; temperature, top_p, min_p float32 [S]; top_k int32 [S], <= 0 for off;
    uniform float64 [S] in [0, 1). A row without a finite maximum (NaN anywhere, +inf, or everything −inf) gives −1.
    """
    return _for(logits).sample(logits, temperature, top_k, top_p, min_p, uniform)
