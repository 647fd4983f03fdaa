"""How every kernel here is launched: the one place that knows Triton's own options and the current device.

Kernels never wait for the device and the host never looks at what is on it. So nothing here can raise for a value, as
the reference does; what would read or write outside its memory is left out instead, and what depends on it is NaN, by
which the engine knows the request that it must fail.

In Triton's interpreter (TRITON_INTERPRET=1, set before Triton is imported) the same kernels run on CPU tensors.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs

INTERPRETED: bool = knobs.runtime.interpret
WIDEN_DOTS = tl.constexpr(INTERPRETED)  # the interpreter has no 16-bit products: it gets the same numbers as float32


def launch(
    kernel: Any, grid: tuple[int, ...], *arguments: Any, num_warps: int = 4, num_stages: int = 1, **constants: Any
) -> None:
    """Queue `kernel` on the device of its first argument; an empty grid is no launch.

    Multiplications and additions may be fused, whatever the default of the Triton release is: every error bound that
    the tests state holds with and without, and it is faster.
    """
    if 0 in grid:
        return
    device = arguments[0].device
    elsewhere = device.type == "cuda" and device.index != torch.cuda.current_device()
    with torch.cuda.device(device) if elsewhere else nullcontext():
        kernel[grid](*arguments, num_warps=num_warps, num_stages=num_stages, enable_fp_fusion=True, **constants)


def power_of_2(n: int) -> int:
    """The smallest power of two that is at least n."""
    return triton.next_power_of_2(n)


@triton.jit
def dot(a, b, acc):
    """acc + a·b: 16-bit products summed in float32, float32 products in full precision (never TF32)."""
    if WIDEN_DOTS:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")
