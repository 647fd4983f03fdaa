"""Rows of x as int8 with a scale for each group of 32: what `linear` multiplies by under "int8-dynamic".

`reference.quantize_groups` says which numbers. They come in two forms: the records that the tile "i8_dot" reads, and, for
CPUs without `vpdpbusd`, float32 values that went through int8 and back.
"""

from __future__ import annotations

import numpy as np
import torch
from llvmlite import ir
from numba import float32, int32, int64, prange, types

from .compiler import array_at, inline, kernel, num_threads
from .linear_steps import GROUP, GROUP_BYTES
from .scalars import bits_of, float_of, load_row, rint_f32
from .simd import F32, F32X16, I32, I32X16, I64, call, load, operation, splat_ir, store

LEAST_LARGEST = np.float32(2.0**-100)  # of a group that is not all zeros
PARALLEL_VALUES = 1 << 16  # from here on all threads quantize: to wake them takes about as long as that many values


def num_parts(values: int) -> int:
    return 1 if values < PARALLEL_VALUES else num_threads()


def make_quantize(element: str):
    """An intrinsic `quantize(x, record)`: the 32 values at x, "f32" or "bf16", to the record of a group. Needs AVX-512.

    Magnitudes are compared as integers: they are in the same order, and NaN is the largest.
    """

    @operation(types.void, int64, int64)
    def quantize(builder, x, record):
        halves = []
        for half in range(2):
            if element == "f32":
                halves.append(load(builder, builder.add(x, I64(64 * half)), F32X16))
            else:
                words = load(builder, builder.add(x, I64(32 * half)), ir.VectorType(ir.IntType(16), 16))
                shifted = builder.shl(builder.zext(words, I32X16), ir.Constant(I32X16, [16] * 16))
                halves.append(builder.bitcast(shifted, F32X16))
        sign_off = ir.Constant(I32X16, [0x7FFFFFFF] * 16)
        a, b = (builder.and_(builder.bitcast(half, I32X16), sign_off) for half in halves)
        larger = builder.select(builder.icmp_unsigned(">", a, b), a, b)
        largest = builder.bitcast(call(builder, "llvm.vector.reduce.umax.v16i32", I32, [larger]), F32)
        inverse = builder.fdiv(F32(127.0), largest)
        is_zero = builder.fcmp_ordered("<", largest, F32(float(LEAST_LARGEST)))
        inverse = splat_ir(builder, builder.select(is_zero, F32(0.0), inverse), 16)
        whole = [call(builder, "llvm.rint.v16f32", F32X16, [builder.fmul(half, inverse)]) for half in halves]
        whole = [builder.fptosi(half, I32X16) for half in whole]
        total = call(builder, "llvm.vector.reduce.add.v16i32", I32, [builder.add(*whole)])
        store(builder, builder.fdiv(largest, F32(127.0)), record)
        store(builder, builder.mul(total, I32(-128)), builder.add(record, I64(4)))
        for half, values in enumerate(whole):
            to = builder.add(record, I64(8 + 16 * half))
            store(builder, builder.trunc(values, ir.VectorType(ir.IntType(8), 16)), to)

    return quantize


quantize_f32, quantize_bf16 = make_quantize("f32"), make_quantize("bf16")


@inline
def quantize_rows(begin, end, x, x_stride, x_bf16, records, rows, groups):
    """Rows begin … end of x [rows, 32 · groups] as records [groups][rows]: those of a tile's rows lie side by side."""
    for r in range(begin, end):
        for g in range(groups):
            record = records + (g * rows + r) * GROUP_BYTES
            if x_bf16:
                quantize_bf16(x + r * x_stride + g * 2 * GROUP, record)
            else:
                quantize_f32(x + r * x_stride + g * 4 * GROUP, record)


@kernel("void(int64, int64, int64, int64, int64, int64, int64)", parallel=True, group="int8")
def through_int8(out, x, x_stride, x_bf16, rows, k, parts):
    """out float32 [rows, k] = x, rounded to int8 in groups and multiplied by their scales again. On any CPU."""
    for part in prange(parts):
        row = np.empty(k, np.float32)
        for r in range(part * rows // parts, (part + 1) * rows // parts):
            load_row(x + r * x_stride, x_bf16, row, k)
            to = array_at(out + 4 * r * k, k, float32)
            for begin in range(0, k, GROUP):
                end = min(k, begin + GROUP)
                bits = int32(0)
                for i in range(begin, end):
                    bits = max(bits, int32(bits_of(row[i]) & 0x7FFFFFFF))
                largest = float_of(bits)
                inverse = float32(0.0) if largest < LEAST_LARGEST else float32(127.0) / largest
                scale = largest / float32(127.0)
                for i in range(begin, end):
                    to[i] = rint_f32(row[i] * inverse) * scale


def rounded_rows(x: torch.Tensor) -> torch.Tensor:
    """x [T, K], rows possibly strided, through int8 and back: float32 [T, K]."""
    out = torch.empty(x.shape, dtype=torch.float32)
    rows, k = x.shape
    through_int8(
        out.data_ptr(), x.data_ptr(), x.stride(0) * x.itemsize, x.dtype is torch.bfloat16, rows, k, num_parts(rows * k)
    )
    return out
