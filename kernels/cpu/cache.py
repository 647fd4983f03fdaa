"""The KV cache's own operations: which order pages have on this machine, storing a step's keys and values, copying pages.

Element types travel as their size: keys and values are moved, never computed with.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numba import int64, prange, uint16, uint32

from ..layout import PageLayout
from .compiler import CPU, array_at, inline, kernel, num_threads

SERIAL_TOKENS = 24  # up to which one thread is faster than waking the others


def page_layout(block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> PageLayout:
    """Order "vnni" where this machine multiplies bfloat16 pairs and the sizes fill whole vectors; "nhd" elsewhere."""
    pairs = dtype == torch.bfloat16 and CPU.avx512_bf16 and block_size % 16 == 0 and head_dim % 16 == 0
    return PageLayout(block_size, num_kv_heads, head_dim, dtype, "vnni" if pairs else "nhd")


@inline
def write_tokens(
    begin, end, k, k_stride, v, v_stride, slot, pages, page_stride, block_size, half_bytes, kv_heads, dim, vnni
):
    size = half_bytes // (block_size * kv_heads * dim)
    halves = kv_heads * dim * size // 2  # of a token's keys, in units of two bytes
    for t in range(begin, end):
        if slot[t] < 0:
            continue
        page, at = pages + slot[t] // block_size * page_stride, slot[t] % block_size
        if not vnni:
            key, value = array_at(k + t * k_stride, halves, uint16), array_at(v + t * v_stride, halves, uint16)
            to = page + at * 2 * halves
            key_to, value_to = array_at(to, halves, uint16), array_at(to + half_bytes, halves, uint16)
            for i in range(halves):
                key_to[i] = key[i]
            for i in range(halves):
                value_to[i] = value[i]
            continue
        for head in range(kv_heads):
            head_at = page + head * block_size * dim * 2
            pair = array_at(k + t * k_stride + head * dim * 2, dim // 2, uint32)
            panel = array_at(head_at + at // 16 * dim * 32, (dim // 2, 16), uint32)
            for i in range(dim // 2):
                panel[i, at % 16] = pair[i]
            row = array_at(v + t * v_stride + head * dim * 2, dim, uint16)
            rows = array_at(head_at + half_bytes + at // 2 * dim * 4, (dim, 2), uint16)
            for i in range(dim):
                rows[i, at % 2] = row[i]


@kernel(f"int64({', '.join(['int64'] * 15)})", parallel=True, name="write_kv")
def _write_kv(
    k,
    k_stride,
    v,
    v_stride,
    slots,
    tokens,
    pages,
    page_stride,
    blocks,
    block_size,
    half_bytes,
    kv_heads,
    dim,
    vnni,
    parts,
):
    """Strides in bytes. Returns 0, or −1 − t for the first token whose slot lies outside the pages."""
    slot = array_at(slots, tokens, int64)
    for t in range(tokens):
        if slot[t] >= blocks * block_size:
            return -1 - t
    if parts == 1:
        write_tokens(
            0, tokens, k, k_stride, v, v_stride, slot, pages, page_stride, block_size, half_bytes, kv_heads, dim, vnni
        )
    else:
        for part in prange(parts):
            begin, end = part * tokens // parts, (part + 1) * tokens // parts
            write_tokens(
                begin, end, k, k_stride, v, v_stride, slot, pages, page_stride, block_size, half_bytes, kv_heads, dim, vnni,
            )  # fmt: skip
    return 0


def write_kv(
    k: torch.Tensor, v: torch.Tensor, pages: torch.Tensor, layout: PageLayout, slot_mapping: torch.Tensor
) -> None:
    tokens, heads, dim = k.shape
    if k.stride(1) != dim or v.stride(1) != dim or k.stride(2) != 1 or v.stride(2) != 1:
        k, v = k.contiguous(), v.contiguous()
    size = layout.dtype.itemsize
    failed = _write_kv(
        k.data_ptr(), k.stride(0) * size, v.data_ptr(), v.stride(0) * size, slot_mapping.data_ptr(), tokens, pages.data_ptr(),
        pages.stride(0), len(pages), layout.block_size, layout.half_bytes, heads, dim, layout.order == "vnni",
        1 if tokens <= SERIAL_TOKENS else num_threads(),
    )  # fmt: skip
    if failed:
        block = int(slot_mapping[-1 - failed]) // layout.block_size
        raise IndexError(f"slot_mapping names block {block}; the pool has blocks 0 to {len(pages) - 1}")


@kernel("int64(int64, int64, int64, int64, int64, int64)", name="copy_pages")
def _copy_pages(slots, num_slots, pairs, num_pairs, blocks, page_bytes):
    """slots: addresses of the layers' pages. Returns 0, or −1 − c for the first pair with an id outside the pages."""
    slot, pair = array_at(slots, num_slots, int64), array_at(pairs, (num_pairs, 2), int64)
    for c in range(num_pairs):
        if min(pair[c, 0], pair[c, 1]) < 0 or max(pair[c, 0], pair[c, 1]) >= blocks:
            return -1 - c
    for s in range(num_slots):
        for c in range(num_pairs):
            source = array_at(slot[s] + pair[c, 0] * page_bytes, page_bytes // 8, int64)
            target = array_at(slot[s] + pair[c, 1] * page_bytes, page_bytes // 8, int64)
            for i in range(page_bytes // 8):
                target[i] = source[i]
    return 0


def copy_pages(slots: Sequence[torch.Tensor], pairs: torch.Tensor) -> None:
    if not slots:
        return
    addresses = np.array([pages.data_ptr() for pages in slots], np.int64)
    blocks, page_bytes = slots[0].shape
    pairs = pairs.contiguous()
    failed = _copy_pages(addresses.ctypes.data, len(slots), pairs.data_ptr(), len(pairs), blocks, page_bytes)
    if failed:
        source, copy = pairs[-1 - failed].tolist()
        raise IndexError(f"copy {source} -> {copy}: the pool has blocks 0 to {blocks - 1}")
