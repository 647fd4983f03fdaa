"""The CPU implementation: Numba kernels that run without the GIL, on float32 and bfloat16."""

from ..reference import gather_kv
from .attention import paged_attention
from .cache import copy_pages, page_layout, write_kv
from .elementwise import add_rms_norm, rms_norm, rotary, silu_mul
from .linear import linear, linear_add, linear_silu_mul, pack_linear
from .sampling import greedy, sample

__all__ = [
    "add_rms_norm",
    "copy_pages",
    "gather_kv",
    "greedy",
    "linear",
    "linear_add",
    "linear_silu_mul",
    "pack_linear",
    "page_layout",
    "paged_attention",
    "rms_norm",
    "rotary",
    "sample",
    "silu_mul",
    "write_kv",
]
