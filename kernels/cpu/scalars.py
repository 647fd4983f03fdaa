"""Numbers and rows of either element type inside a kernel, on any machine, written so that LLVM vectorises the loop around.

A bfloat16 is its 16 bits, as uint16: Numba has no such type. Arithmetic is float32.
"""

from __future__ import annotations

import numpy as np
from numba import float32, int32, uint16, uint32

from .compiler import array_at, inline
from .simd import EXP2_COEFFICIENTS, F32, I32, call, operation

LOG2_E = np.float32(1.4426950408889634)


@operation(uint32, float32)
def bits_of(builder, x):
    """The 32 bits of a float32."""
    return builder.bitcast(x, I32)


@operation(float32, uint32)
def float_of(builder, bits):
    """The float32 of 32 bits."""
    return builder.bitcast(bits, F32)


@inline
def bf16_to_f32(x):
    """The float32 of a bfloat16 given as its uint16 bits."""
    return float_of(uint32(x) << uint32(16))


@inline
def f32_to_bf16(x):
    """The uint16 bits of the bfloat16 nearest to a float32, ties to even; NaN stays NaN."""
    bits = bits_of(x)
    rounded = (bits + uint32(0x7FFF) + ((bits >> uint32(16)) & uint32(1))) >> uint32(16)
    return uint16(rounded) if x == x else uint16((bits >> uint32(16)) | uint32(0x40))


@operation(float32, float32)
def rint_f32(builder, x):
    """The whole number nearest to x, ties to even."""
    return call(builder, "llvm.rint.f32", F32, [x])


@inline
def exp2_f32(x):
    """2^x of a float32 as `exp2`, for x < 127.5 and for loops that LLVM vectorises."""
    clamped = max(x, float32(-127.0))
    whole = rint_f32(clamped)
    f = clamped - whole
    p = float32(EXP2_COEFFICIENTS[0])
    for i in range(1, 6):
        p = p * f + float32(EXP2_COEFFICIENTS[i])
    p = p * f + float32(1.0)
    result = p * float_of(uint32(int32(whole) + int32(127)) << uint32(23))
    return result if x >= float32(-126.0) else (float32(0.0) if x < float32(-126.0) else x)


@inline
def silu(x):
    """x / (1 + e^−x) of a float32, for loops that LLVM vectorises: −0 where e^−x overflows, NaN for NaN and −inf."""
    share = float32(1.0) / (float32(1.0) + exp2_f32(min(-LOG2_E * x, float32(126.0))))
    return x * (float32(0.0) if -LOG2_E * x > float32(126.0) else share)


@inline
def load_row(address, bf16, out, n):
    """Copies n elements at `address`, bfloat16 or float32, to the float32 array `out`."""
    if bf16:
        half = array_at(address, n, uint16)
        for i in range(n):
            out[i] = bf16_to_f32(half[i])
    else:
        full = array_at(address, n, float32)
        for i in range(n):
            out[i] = full[i]


@inline
def store_row(address, bf16, row, n):
    """Writes n elements of the float32 array `row` to `address`, as bfloat16 or float32."""
    if bf16:
        half = array_at(address, n, uint16)
        for i in range(n):
            half[i] = f32_to_bf16(row[i])
    else:
        full = array_at(address, n, float32)
        for i in range(n):
            full[i] = row[i]
