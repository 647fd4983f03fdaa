"""Attention over cached pages: the kernels' entry, and which of the two serves.

| pages | kernel | machine |
|---|---|---|
| "vnni" | bfloat16 dot products on the pages where they lie | `CPU.avx512_bf16` |
| "nhd" | float32 sums over keys and values gathered into panels | any |

Threads take unit after unit from a shared counter; what a unit is, is said in `attention_units`.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from numba import int32, int64, prange

from ..layout import PageLayout
from .attention_rows import KEYS
from .attention_units import BLOCK, FEW, UNIT, finish_split, make_unit, plan, scratch_parts
from .compiler import CPU, array_at, inline, kernel, num_threads
from .shared import scratch, take


def make_attention(panels: bool, warm_up_group: str):
    """The kernel over pages of order "vnni" (`panels`) or "nhd".

    Addresses are int64; strides of q count elements, those of pages and scratch bytes. Returns 0, or −1 − row for a
    row that cannot be served, in which case nothing was computed.
    """
    attend_unit = make_unit(panels)

    def attend_units(
        count, units_at, q, q_stride, out, bf16, pages, page_stride, block_size, half_bytes, kv_heads, group, dim,
        block_table, table_width, query_start_loc, seq_lens, rows, scale, window, softcap, mine, parts_at, states,
    ):  # fmt: skip
        units, parts = array_at(units_at + 64, (count, UNIT), int64), array_at(parts_at, 13, int64)
        starts, lengths = array_at(query_start_loc, rows + 1, int32), array_at(seq_lens, rows, int32)
        u = take(units_at)
        while u < count:
            attend_unit(
                units[u], q, q_stride, out, bf16, pages, page_stride, block_size, half_bytes, kv_heads, group, dim,
                block_table, table_width, starts, lengths, scale, window, softcap, mine, parts, states,
            )  # fmt: skip
            u = take(units_at)

    attend_units.__qualname__ += "_panels" if panels else "_plain"  # compiled functions are linked by this name
    attend_units = inline(attend_units)

    @kernel(
        f"int64({', '.join(['int64'] * 18)}, float32, int64, float32, {', '.join(['int64'] * 7)})",
        parallel=True,
        group=warm_up_group,
        name="attention_panels" if panels else "attention_plain",
    )
    def attention(
        q, q_stride, out, bf16, pages, page_stride, blocks, block_size, half_bytes, kv_heads, group, dim,
        block_table, table_width, query_start_loc, seq_lens, rows, tokens, scale, window, softcap,
        split, threads, scratch, thread_bytes, parts_at, units_at, states,
    ):  # fmt: skip
        count = plan(
            units_at + 64, block_table, table_width, query_start_loc, seq_lens, rows, tokens, blocks, block_size, kv_heads,
            group, window, split,
        )  # fmt: skip
        if count < 0:
            return count
        array_at(units_at, 1, int64)[0] = 0  # the counter from which units are taken
        if threads == 1 or count <= 1:
            attend_units(
                count, units_at, q, q_stride, out, bf16, pages, page_stride, block_size, half_bytes, kv_heads, group, dim,
                block_table, table_width, query_start_loc, seq_lens, rows, scale, window, softcap, scratch, parts_at, states,
            )  # fmt: skip
        else:
            for thread in prange(threads):
                attend_units(
                    count, units_at, q, q_stride, out, bf16, pages, page_stride, block_size, half_bytes, kv_heads, group, dim,
                    block_table, table_width, query_start_loc, seq_lens, rows, scale, window, softcap,
                    scratch + thread * thread_bytes, parts_at, states,
                )  # fmt: skip
        if split:
            units = array_at(units_at + 64, (count, UNIT), int64)
            starts, lengths = array_at(query_start_loc, rows + 1, int32), array_at(seq_lens, rows, int32)
            for u in range(count):
                if units[u, 3] == 0:
                    finish_split(
                        units[u], out, bf16, block_size, kv_heads, group, dim, table_width, starts, lengths, scale, window,
                        softcap, states,
                    )  # fmt: skip
        return 0

    return attention


attention_plain = make_attention(False, "float32" if CPU.avx512_bf16 else "common")
attention_panels = make_attention(True, "bfloat16") if CPU.avx512_bf16 else None


@cache
def _parts(dim: int) -> tuple[np.ndarray, int, int]:
    """`scratch_parts` as an array (kept alive here), its address, and a thread's bytes."""
    parts = np.array(scratch_parts(dim), np.int64)
    return parts, parts.ctypes.data, int(parts[-1])


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
    tokens, q_heads, dim = q.shape
    rows, table_width = block_table.shape
    kv_heads, block_size = layout.num_kv_heads, layout.block_size
    if q.stride(2) != 1 or q.stride(1) != dim:
        q = q.contiguous()
    panels = layout.order == "vnni"
    if panels and (attention_panels is None or dim % 16):
        raise ValueError(f"order='vnni' needs AVX512-BF16 and a head size divisible by 16, not {dim}; use order='nhd'")
    if block_table.stride(1) != 1 or block_table.stride(0) != table_width:
        block_table = block_table.contiguous()
    group = q_heads // kv_heads
    threads = num_threads()
    chunks = -(-table_width * block_size // KEYS)
    split = chunks > 1 and rows * kv_heads * FEW < 256 * threads  # too few rows to keep the threads busy
    _, parts_at, thread_bytes = _parts(dim)
    states_bytes = rows * chunks * FEW * kv_heads * 4 * (dim + 17) if split else 0
    most_units = kv_heads * (tokens * group // BLOCK + rows * (2 + (chunks if split else 0)))
    address = scratch(threads * thread_bytes + states_bytes + 64 + 8 * UNIT * most_units)
    units_at = address + threads * thread_bytes + (states_bytes + 63) // 64 * 64
    out = torch.empty(q.shape, dtype=q.dtype)
    if tokens == 0 or rows == 0:
        return out.zero_()
    failed = (attention_panels if panels else attention_plain)(
        q.data_ptr(), q.stride(0), out.data_ptr(), q.dtype == torch.bfloat16, pages.data_ptr(), pages.stride(0), len(pages),
        block_size, layout.half_bytes, kv_heads, group, dim, block_table.data_ptr(), table_width,
        query_start_loc.data_ptr(), seq_lens.data_ptr(), rows, tokens, scale, window, softcap,
        split, threads, address, thread_bytes, parts_at, units_at, address + threads * thread_bytes,
    )  # fmt: skip
    if failed:
        _refuse(-1 - failed, layout, pages, block_table, query_start_loc, seq_lens, tokens)
    return out


def _refuse(row, layout, pages, block_table, query_start_loc, seq_lens, tokens):
    start, end, length = int(query_start_loc[row]), int(query_start_loc[row + 1]), int(seq_lens[row])
    room = block_table.shape[1] * layout.block_size
    raise IndexError(
        f"row {row} cannot be attended: tokens {start} to {end} of {tokens}, {length} cached of at most {room} in its block "
        f"table {block_table[row].tolist()[:8]}…, whose ids must lie in 0 to {len(pages) - 1}"
    )
