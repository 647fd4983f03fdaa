"""The KV pool's memory: one tensor of pages per layer slot, and the only owner of the page layout.

Block ids are one space for all groups. Groups of layers share memory: the j-th layer of every group uses slot j, so a
page belongs to whichever group holds its block. Copies move whole pages as bytes; `gather` is the one way to
see plain K and V.

    slot 0   [ page 0 | page 1 | … | page num_blocks − 1 ]   layer 0 of group 0, layer 0 of group 1, …
    slot 1   [ page 0 | page 1 | … ]

Pages of host memory, where there are any, lie the same way and hold what was swapped out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from kvscope.kernels.huge_pages import empty
from kvscope.kernels.layout import PageLayout
from kvscope.kernels.ops import Ops

from ..models.base import KVGroup


class KVStorage:
    """Pages for `num_blocks` blocks of `block_size` tokens in `dtype`; `kernels` chooses the order inside a page."""

    def __init__(
        self,
        groups: Sequence[KVGroup],
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        kernels: Ops,
        num_cpu_blocks: int = 0,
    ):
        self.kernels = kernels
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.layouts: tuple[PageLayout, ...] = tuple(
            kernels.page_layout(block_size, g.num_kv_heads, g.head_dim, dtype) for g in groups
        )
        self._place = {layer: (g, slot) for g, group in enumerate(groups) for slot, layer in enumerate(group.layers)}
        page_bytes = max(layout.page_bytes for layout in self.layouts)
        num_slots = max(len(g.layers) for g in groups)
        # Zeroed, not empty: slots that were never written may be read by a vector load and must not hold NaN.
        self._slots = [empty((num_blocks, page_bytes), torch.uint8, device).zero_() for _ in range(num_slots)]
        pinned = torch.device(device).type == "cuda"  # the GPU copies pinned memory without the CPU
        self._host = [
            torch.zeros(num_cpu_blocks, page_bytes, dtype=torch.uint8, pin_memory=pinned)
            for _ in range(num_slots if num_cpu_blocks else 0)
        ]

    @staticmethod
    def block_bytes_of(groups: Sequence[KVGroup], *, block_size: int, dtype: torch.dtype, kernels: Ops) -> int:
        """`block_bytes` of a pool that has yet to be made; takes no memory, whatever the block size."""
        layouts = [kernels.page_layout(block_size, g.num_kv_heads, g.head_dim, dtype) for g in groups]
        return max(layout.page_bytes for layout in layouts) * max(len(g.layers) for g in groups)

    def group_of(self, layer: int) -> int:
        return self._place[layer][0]

    def pages(self, layer: int) -> tuple[torch.Tensor, PageLayout]:
        """The layer's pages, uint8 [num_blocks, page_bytes], and how to read them."""
        group, slot = self._place[layer]
        return self._slots[slot], self.layouts[group]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return sum(slot.shape[1] for slot in self._slots)

    @property
    def num_bytes(self) -> int:
        return sum(slot.numel() for slot in self._slots)

    def copy(self, pairs: torch.Tensor) -> None:
        """Copy whole blocks, all layers: `pairs` is int64 [C, 2] of (source, copy)."""
        if len(pairs):
            self.kernels.copy_pages(self._slots, pairs)

    def swap_out(self, pairs: torch.Tensor) -> None:
        """Copy whole blocks to host memory, all layers: `pairs` is int64 [C, 2] of (block, host block), on the CPU. Whatever
        the device does after this call it does when the copies are made."""
        _move_pages(self._slots, self._host, pairs)

    def swap_in(self, pairs: torch.Tensor) -> None:
        """Copy whole blocks back: `pairs` is int64 [C, 2] of (host block, block), on the CPU."""
        _move_pages(self._host, self._slots, pairs)

    def clear(self, block_ids: Sequence[int]) -> None:
        """Zero whole blocks, all layers: what a failed step left there must not reach the next reader's vector loads."""
        ids = torch.as_tensor(list(block_ids), dtype=torch.long)
        for slot in self._slots:
            slot[ids.to(slot.device)] = 0

    def gather(self, layer: int, block_ids: Sequence[int], num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of the first `num_tokens` tokens of a block table, each [tokens, kv_heads, head_dim]."""
        pages, layout = self.pages(layer)
        ids = torch.as_tensor(list(block_ids), dtype=torch.long, device=pages.device)
        k, v = self.kernels.gather_kv(pages, layout, ids)
        return k[:num_tokens], v[:num_tokens]

    def close(self) -> None:
        """Drop the memory now, whoever still holds a reference to this object."""
        self._slots, self._host = [], []


def _move_pages(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], pairs: torch.Tensor) -> None:
    """One by one and in order: a page is one piece of memory on either side, and a GPU queues these copies without waiting."""
    for source, target in zip(sources, targets, strict=True):
        for page, place in pairs.tolist():
            target[place].copy_(source[page], non_blocking=True)
