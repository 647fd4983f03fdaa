"""What the engine knows of a model: its shape, and one call.

A model never knows requests, samplers or schedules: it gets the flat arrays of a step and the KV storage, and gives
logits for the rows that were asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from ..kvcache.storage import KVStorage
    from ..scheduling.batch import Batch


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that share one block table: the same window, block size and choice of what to evict."""

    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    window: int = 0  # tokens a query can look back, itself included; 0 = all
    block_size: int = 0  # tokens a block; 0 in a model's spec, where nobody has chosen it yet

    @property
    def page_size(self) -> int:
        """Elements of K, and of V, in a layer's page."""
        return self.block_size * self.num_kv_heads * self.head_dim

    def first_visible_block(self, num_tokens: int) -> int:
        """Of a text of `num_tokens` tokens, the first block that the next token can still see."""
        return max(0, num_tokens - self.window + 1) // self.block_size if self.window else 0

    def most_blocks(self, num_tokens: int, chunk: int) -> int:
        """The most blocks that a sequence of `num_tokens` tokens ever holds at once, computed at most `chunk` a step."""
        blocks = -(-num_tokens // self.block_size)
        return min(blocks, -(-(self.window + chunk - 2) // self.block_size) + 1) if self.window else blocks


def group_layers(windows: Sequence[int], num_kv_heads: int, head_dim: int) -> tuple[KVGroup, ...]:
    """The KV groups of a model whose layer i has the window `windows[i]` (0: sees everything), as long as all blocks hold
    equally many tokens. Layers of one window share tables."""
    kinds = {window: [i for i, w in enumerate(windows) if w == window] for window in sorted(set(windows))}
    groups = _alike([KVGroup(tuple(layers), num_kv_heads, head_dim, window, 1) for window, layers in kinds.items()])
    return with_block_size(groups, 0)


def with_block_size(groups: Sequence[KVGroup], block_size: int | Mapping[str, int]) -> tuple[KVGroup, ...]:
    """The groups of a model's spec with their block sizes: one for all, or one for layers that see everything ("full") and one
    for those with a window ("sliding"). Raises ValueError where the model has no layers of such a kind.

    Where sizes differ the layers are dealt out anew: a block of small pages holds more layers, and so fewer groups do.
    """
    if not isinstance(block_size, Mapping):
        return tuple(replace(group, block_size=block_size) for group in groups)
    kinds: dict[KVGroup, list[int]] = {}
    for group in groups:
        size = block_size["sliding" if group.window else "full"]
        kinds.setdefault(replace(group, layers=(), block_size=size), []).extend(group.layers)
    for name, has_window in (("full", False), ("sliding", True)):
        if not any(bool(kind.window) is has_window for kind in kinds):
            raise ValueError(
                f"block_size={dict(block_size)}: the model has no {name!r} layers; give one number for all, such as "
                f"{block_size['full' if has_window else 'sliding']}"
            )
    return _alike([replace(kind, layers=tuple(sorted(layers))) for kind, layers in kinds.items()])


def _alike(kinds: list[KVGroup]) -> tuple[KVGroup, ...]:
    """Split these so that all are about as large as the smallest, because a block has the bytes of the largest group: with groups
    of 4 and 22 equal layers most of every block would stay empty."""
    page = max(kind.page_size for kind in kinds)
    sizes = [-(-len(kind.layers) // (page // kind.page_size)) for kind in kinds]  # in pages of the largest
    counts = [-(-size // min(sizes)) for size in sizes]
    return tuple(
        replace(kind, layers=kind.layers[i::count])
        for kind, count in zip(kinds, counts, strict=True)
        for i in range(count)
    )


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The facts of a loaded model that the rest of the engine needs."""

    name: str
    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int
    kv_groups: tuple[KVGroup, ...]
    dtype: torch.dtype
    device: torch.device
    eos_token_ids: frozenset[int]  # union of config and generation_config; the tokenizer's is added by Engine
    num_parameters: int
    tied_embeddings: bool  # the head is the embedding table: one parameter, and stored once unless it is quantized
    weight_bytes: int  # as held in memory, tied tensors once
    quantization: str | None = None  # of the weights of all products: "int8" | "int8-dynamic"

    @property
    def bytes_per_weight(self) -> int:
        """Of the weights of all products."""
        return self.dtype.itemsize if self.quantization is None else 1

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V of one token over all layers."""
        return sum(2 * len(g.layers) * g.num_kv_heads * g.head_dim for g in self.kv_groups) * self.dtype.itemsize


class Model(Protocol):
    spec: ModelSpec

    def forward(self, batch: Batch, storage: KVStorage) -> torch.Tensor:
        """Write the step's K and V into `storage`, attend, return logits: float32 [len(logits_indices), vocab]."""
        ...

    def close(self) -> None:
        """Drop this engine's hold on the weights, whoever still refers to the object. Twice is fine."""
        ...
