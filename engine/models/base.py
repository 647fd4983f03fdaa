"""What the engine knows of a model: its shape, and one call.

A model never knows requests, samplers or schedules: it gets the flat arrays of a step and the KV storage, and gives
logits for the rows that were asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from ..kvcache.storage import KVStorage
    from ..scheduling.batch import Batch


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that share one block table: the same window and the same choice of what to evict."""

    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    window: int = 0  # tokens a query can look back, itself included; 0 = all

    def first_visible_block(self, num_tokens: int, block_size: int) -> int:
        """Of a text of `num_tokens` tokens, the first block that the next token can still see."""
        return max(0, num_tokens - self.window + 1) // block_size if self.window else 0

    def most_blocks(self, num_tokens: int, block_size: int, chunk: int) -> int:
        """The most blocks that a sequence of `num_tokens` tokens ever holds at once, computed at most `chunk` a step."""
        blocks = -(-num_tokens // block_size)
        return min(blocks, -(-(self.window + chunk - 2) // block_size) + 1) if self.window else blocks


def group_layers(windows: Sequence[int], num_kv_heads: int, head_dim: int) -> tuple[KVGroup, ...]:
    """The KV groups of a model whose layer i has the window `windows[i]` (0: sees everything).

    Layers of one window share tables. All groups are about as large as the smallest kind, because a block holds one page
    per layer of the largest group: with groups of 4 and 22 layers most of every block would stay empty.
    """
    kinds = {window: [i for i, w in enumerate(windows) if w == window] for window in sorted(set(windows))}
    size = min(map(len, kinds.values()))
    groups = []
    for window, layers in kinds.items():
        count = -(-len(layers) // size)
        groups += [KVGroup(tuple(layers[i::count]), num_kv_heads, head_dim, window) for i in range(count)]
    return tuple(groups)


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
