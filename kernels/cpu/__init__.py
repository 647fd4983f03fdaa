"""The CPU implementation: Numba kernels that run without the GIL, on float32 and bfloat16."""

from ..reference import (
    add_rms_norm,
    copy_pages,
    gather_kv,
    greedy,
    linear,
    pack_linear,
    page_layout,
    paged_attention,
    rms_norm,
    rotary,
    sample,
    silu_mul,
    write_kv,
)

__all__ = [
    "add_rms_norm",
    "copy_pages",
    "gather_kv",
    "greedy",
    "linear",
    "pack_linear",
    "page_layout",
    "paged_attention",
    "rms_norm",
    "rotary",
    "sample",
    "silu_mul",
    "write_kv",
]
