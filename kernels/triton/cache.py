"""The KV pages on a GPU: the plain order, writing a step's keys and values, copying whole pages."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl

from ..layout import PageLayout
from .launch import launch, power_of_2

COPY_BYTES = 4096  # of a page that one program copies


def page_layout(block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> PageLayout:
    return PageLayout(block_size, num_kv_heads, head_dim, dtype)


def halves(pages: torch.Tensor, layout: PageLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of all pages as elements: two [B, block_size · Hk · d] views, rows a page apart.

    Raises ValueError for pages in another order than "nhd": these kernels read no other.
    """
    if layout.order != "nhd":
        raise ValueError(f"order={layout.order!r}: kernels='triton' reads pages of order 'nhd' only")
    half = layout.half_bytes
    return pages[:, :half].view(layout.dtype), pages[:, half : 2 * half].view(layout.dtype)


@triton.jit
def _write(
    k, v, k_pages, v_pages, slot_mapping, num_slots, page_stride, k_token_stride, k_head_stride, v_token_stride,
    v_head_stride, BLOCK_SIZE: tl.constexpr, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """All heads of one token. A slot outside the pages, −1 among them, is left out."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot < 0 or slot >= num_slots:
        return
    element = tl.arange(0, BLOCK)
    inside = element < NUM_HEADS * HEAD_DIM
    head, d = element // HEAD_DIM, element % HEAD_DIM
    place = slot // BLOCK_SIZE * page_stride + slot % BLOCK_SIZE * (NUM_HEADS * HEAD_DIM) + element
    keys = tl.load(k + token * k_token_stride + head * k_head_stride + d, mask=inside)
    values = tl.load(v + token * v_token_stride + head * v_head_stride + d, mask=inside)
    tl.store(k_pages + place, keys, mask=inside)
    tl.store(v_pages + place, values, mask=inside)


def write_kv(
    k: torch.Tensor, v: torch.Tensor, pages: torch.Tensor, layout: PageLayout, slot_mapping: torch.Tensor
) -> None:
    k_pages, v_pages = halves(pages, layout)
    num_tokens, num_heads, dim = k.shape
    launch(
        _write, (num_tokens,), k, v, k_pages, v_pages, slot_mapping, len(pages) * layout.block_size,
        k_pages.stride(0), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        BLOCK_SIZE=layout.block_size, NUM_HEADS=num_heads, HEAD_DIM=dim, BLOCK=power_of_2(num_heads * dim),
    )  # fmt: skip


@triton.jit
def _copy(addresses, pairs, num_pairs, num_blocks, page_words, stride_words, WORD: tl.constexpr, BLOCK: tl.constexpr):
    """One piece of every page that is copied, in one slot: pair after pair, since a copy may be copied again."""
    slot = tl.program_id(1)
    base = tl.load(addresses + slot).to(tl.pointer_type(WORD))
    word = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    for pair in range(num_pairs):
        source, copy = tl.load(pairs + 2 * pair), tl.load(pairs + 2 * pair + 1)
        exist = (source >= 0) & (source < num_blocks) & (copy >= 0) & (copy < num_blocks)
        inside = word < tl.where(exist, page_words, 0)
        words = tl.load(base + source * stride_words + word, mask=inside)
        tl.debug_barrier()
        tl.store(base + copy * stride_words + word, words, mask=inside)
        tl.debug_barrier()


@lru_cache(maxsize=64)
def _on_device(addresses: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """The numbers themselves, on the device; a pool asks for the same ones in every step."""
    return torch.tensor(addresses, dtype=torch.int64, device=device)


_WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}


def copy_pages(slots: Sequence[torch.Tensor], pairs: torch.Tensor) -> None:
    """One launch for every shape of slot, each with the addresses of its slots in a table."""
    alike: dict[tuple[int, int, int], list[int]] = {}
    for pages in slots:
        alike.setdefault((len(pages), pages.shape[1], pages.stride(0)), []).append(pages.data_ptr())
    for (num_blocks, num_bytes, stride), addresses in alike.items():
        width = next(w for w in _WORDS if all(n % w == 0 for n in (num_bytes, stride, *addresses)))
        block = COPY_BYTES // width
        launch(
            _copy, (-(-num_bytes // COPY_BYTES), len(addresses)), _on_device(tuple(addresses), pairs.device), pairs,
            len(pairs), num_blocks, num_bytes // width, stride // width, WORD=_WORDS[width], BLOCK=block,
        )  # fmt: skip
