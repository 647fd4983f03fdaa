"""The GPU implementation: Triton kernels for float32, bfloat16 and float16, over pages of the plain order ("nhd").

Everything that is hot is a kernel here, except the dense product, which is cuBLAS through torch. No call waits for the
device. Values are therefore not checked before use, and nothing raises IndexError as the reference does: a place
outside its memory is neither read nor written, and what would have come from there is NaN, or −1 for a sampled token.
"""

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
