"""Paged attention where transformers' models call for attention, and the list of maths it stands for.

transformers looks an attention function up by name and hands it query, key, value and keyword arguments. Ours is
registered as `NAME`. What the step is (its batch, the pages, the kernels) travels as one more keyword argument through
the model's own forward, so any number of engines and threads may run at once: nothing is kept between calls.

An argument that changes the maths is implemented (scale, window, soft cap) or refused by name. transformers makes no
mask for an attention function that it has no mask for; a model that brings one of its own is refused as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .decoder_config import UnsupportedModel

if TYPE_CHECKING:
    from kvscope.kernels.ops import Ops

    from ..kvcache.storage import KVStorage
    from ..scheduling.batch import Batch

NAME = "kvscope_paged"
STEP = "kvscope_step"  # the keyword under which an `AttentionStep` travels

_NEUTRAL = {  # may be given with any value: they change what is returned or how masks are made, not this function's maths
    "position_ids", "cache_position", "position_embeddings", "use_cache", "output_attentions", "output_hidden_states",
    "output_router_logits", "return_dict", "logits_to_keep",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What one layer asked for."""

    layer: int
    module: torch.nn.Module
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int  # tokens a query can look back, itself included; 0 = all


@dataclass(slots=True)
class AttentionStep:
    """One forward call: where K and V go, and who reads them. `calls` is filled while a probe looks on."""

    kernels: Ops
    batch: Batch
    storage: KVStorage | None  # None: a probe asks for shapes only, on one prompt without a cache
    calls: list[AttentionCall] | None = None


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, Hq, T, d]
    key: torch.Tensor,  # [1, Hk, T, d]
    value: torch.Tensor,  # [1, Hk, T, d]
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention signature: ([1, T, Hq, d], no weights). Raises UnsupportedModel for other maths."""
    step: AttentionStep | None = kwargs.pop(STEP, None)
    if step is None:
        raise UnsupportedModel(f"the model does not pass keyword arguments on to {type(module).__name__}")
    layer = getattr(module, "layer_idx", None)
    where = f"{type(module).__name__} of layer {layer}"
    if not isinstance(layer, int):
        raise UnsupportedModel(f"{type(module).__name__} does not say which layer it is (no layer_idx)")
    if attention_mask is not None:
        raise UnsupportedModel(f"{where} brings an attention mask of its own")
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise UnsupportedModel(f"{where} is not causal")
    if dropout:
        raise UnsupportedModel(f"{where} asks for dropout={dropout}")
    for name, argument in kwargs.items():
        if name not in _NEUTRAL and argument is not None and argument is not False:
            raise UnsupportedModel(f"{where} asks for {name}, which paged attention does not implement")
    if value.shape[-1] != key.shape[-1]:
        raise UnsupportedModel(f"{where} has keys of {key.shape[-1]} and values of {value.shape[-1]} elements")
    if query.shape[0] != 1:
        raise UnsupportedModel(f"{where} works on {query.shape[0]} sequences where one packed step was given")

    window = int(sliding_window or 0)
    if step.calls is not None:
        call = AttentionCall(layer, module, query.shape[1], key.shape[1], key.shape[-1], window)
        step.calls.append(call)
    if step.storage is None:
        return torch.zeros_like(query).transpose(1, 2), None

    batch, storage = step.batch, step.storage
    group = storage.group_of(layer)
    pages, layout = storage.pages(layer)
    q, k, v = (x[0].transpose(0, 1).to(layout.dtype) for x in (query, key, value))  # [T, heads, d], views
    step.kernels.write_kv(k, v, pages, layout, batch.slot_mapping[group])
    attended = step.kernels.paged_attention(
        q,
        pages,
        layout,
        batch.block_tables[group],
        batch.query_start_loc,
        batch.seq_lens,
        scale=key.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=window,
        softcap=float(softcap or 0.0),
    )
    return attended.to(query.dtype)[None], None


def register() -> None:
    """Make `NAME` known to transformers. The function is stateless, so doing it again changes nothing."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, paged_attention)
