"""The KV pool's memory: one tensor of pages per layer slot, and the only owner of the page layout.

Block ids are one space for all groups, and all blocks have equally many bytes. Groups of layers share memory: the j-th layer
of every group uses slot j, so a page belongs to whichever group holds its block. Where a group's pages are smaller, since its
blocks hold fewer tokens, as many of its layers as fit share a slot. Copies move whole pages as bytes; `gather` is the one
way to see plain K and V.

    slot 0   [ page 0 | page 1 | … | page num_blocks − 1 ]   layer 0 of group 0, layers 0 and 1 of group 1, …
    slot 1   [ page 0 | page 1 | … ]                         layer 1 of group 0, layers 2 and 3 of group 1, …

Pages of host memory, where there are any, lie the same way and hold what was swapped out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from kvscope.kernels.huge_pages import empty
from kvscope.kernels.layout import PageLayout
from kvscope.kernels.ops import Ops

from ..models.base import KVGroup, with_block_size


class KVStorage:
    """Pages for `num_blocks` blocks in `dtype`, which hold `block_size` tokens, as in `with_block_size`; `kernels` chooses the
    order inside a page. `groups` are the KV groups with their block sizes."""

    def __init__(
        self,
        groups: Sequence[KVGroup],
        *,
        num_blocks: int,
        block_size: int | Mapping[str, int],
        dtype: torch.dtype,
        device: torch.device | str,
        kernels: Ops,
        num_cpu_blocks: int = 0,
    ):
        self.kernels = kernels
        self.num_blocks = num_blocks
        self.groups = with_block_size(groups, block_size)
        self.layouts = _layouts(self.groups, dtype, kernels)
        page_bytes, num_slots = _shape(self.groups, self.layouts)
        # Zeroed, not empty: slots that were never written may be read by a vector load and must not hold NaN.
        self._slots = [empty((num_blocks, page_bytes), torch.uint8, device).zero_() for _ in range(num_slots)]
        pinned = torch.device(device).type == "cuda"  # the GPU copies pinned memory without the CPU
        self._host = [
            torch.zeros(num_cpu_blocks, page_bytes, dtype=torch.uint8, pin_memory=pinned)
            for _ in range(num_slots if num_cpu_blocks else 0)
        ]
        self._group_of = {layer: g for g, group in enumerate(self.groups) for layer in group.layers}
        self._pages = {}
        for group, layout in zip(self.groups, self.layouts, strict=True):
            for place, layer in enumerate(group.layers):
                slot, part = divmod(place, page_bytes // layout.page_bytes)
                self._pages[layer] = self._slots[slot][:, part * layout.page_bytes :], layout

    @staticmethod
    def block_bytes_of(
        groups: Sequence[KVGroup], *, block_size: int | Mapping[str, int], dtype: torch.dtype, kernels: Ops
    ) -> int:
        """`block_bytes` of a pool that has yet to be made; takes no memory, whatever the block size."""
        groups = with_block_size(groups, block_size)
        page_bytes, num_slots = _shape(groups, _layouts(groups, dtype, kernels))
        return page_bytes * num_slots

    def group_of(self, layer: int) -> int:
        return self._group_of[layer]

    def pages(self, layer: int) -> tuple[torch.Tensor, PageLayout]:
        """The layer's pages, uint8 [num_blocks, ≥ page_bytes], and how to read them."""
        return self._pages[layer]

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
        self._slots, self._host, self._pages = [], [], {}


def _layouts(groups: Sequence[KVGroup], dtype: torch.dtype, kernels: Ops) -> tuple[PageLayout, ...]:
    return tuple(kernels.page_layout(g.block_size, g.num_kv_heads, g.head_dim, dtype) for g in groups)


def _shape(groups: Sequence[KVGroup], layouts: Sequence[PageLayout]) -> tuple[int, int]:
    """(bytes of a slot's page, slots) of a block that any of the groups can use."""
    page_bytes = max(layout.page_bytes for layout in layouts)
    slots = (
        -(-len(group.layers) // (page_bytes // layout.page_bytes))
        for group, layout in zip(groups, layouts, strict=True)
    )
    return page_bytes, max(slots)


def _move_pages(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], pairs: torch.Tensor) -> None:
    """One by one and in order: a page is one piece of memory on either side, and a GPU queues these copies without waiting."""
    for source, target in zip(sources, targets, strict=True):
        for page, place in pairs.tolist():
            target[place].copy_(source[page], non_blocking=True)
