"""How one KV page is laid out in memory.

A page holds the keys and values of `block_size` tokens of one layer as one run of bytes: first all of K, then all
of V, then padding to 64 bytes. Copies move whole pages and never look inside; only the kernels and
`engine.kvcache.storage` do, through this description.

| order | K | V | for |
|---|---|---|---|
| "nhd" | [block_size][kv_heads][head_dim] | the same | the plain order: any dtype, any block size, every kernel |
| "vnni" | [kv_heads][block_size/16][head_dim/2][16][2] | [kv_heads][block_size/2][head_dim][2] | bfloat16 pairs side by side, as the CPU's dot-product instruction wants them |
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class PageLayout:
    """Describes pages stored as a uint8 tensor [num_blocks, page_bytes] per layer."""

    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    order: str = "nhd"

    def __post_init__(self):
        if self.order not in ("nhd", "vnni"):
            raise ValueError(f"order={self.order!r}: a page is laid out as 'nhd' or 'vnni'")
        if self.order == "vnni" and (self.dtype != torch.bfloat16 or self.block_size % 16 or self.head_dim % 2):
            raise ValueError(
                f"order='vnni' needs bfloat16, a block size divisible by 16 and an even head size, "
                f"not {self.dtype}, {self.block_size} and {self.head_dim}"
            )

    @property
    def half_bytes(self) -> int:
        """Bytes of K, and of V, in one page."""
        return self.block_size * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, padded to a cache line of 64."""
        return -(-2 * self.half_bytes // 64) * 64
