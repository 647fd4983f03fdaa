"""A register tile of a matrix product, as an intrinsic: the inner loop of attention.

    C[r, 16 v + i] += Σ over segments s and steps k of A[r, s · steps + k] · B_s[k, 16 v + i]

for a fixed number of rows r and vectors v, all of C held in registers. B comes in segments, such as the pages of a
sequence, wherever they lie in memory. One step is 4 bytes of A and 64 bytes of B for each vector:

| element | a step of A | of B | accumulated by |
|---|---|---|---|
| "f32" | one float32 | 16 float32 | multiply-add; any machine |
| "bf16" | two bfloat16 | 16 pairs | `vdpbf16ps`; needs `CPU.avx512_bf16` |

A read ahead runs along: while segment s is multiplied, the same offset of segment s + 1 is prefetched.
"""

from __future__ import annotations

from llvmlite import ir
from numba import int64, types
from numba.core import cgutils

from .simd import (
    BF16X32,
    F32,
    F32X16,
    I32,
    I32X16,
    I64,
    call,
    dot_bf16_ir,
    load,
    operation,
    prefetch_ir,
    splat_ir,
    store,
)


def make_tile(rows: int, vectors: int, element: str, *, prefetch: bool):
    """An intrinsic `tile(a, a_stride, table, segments, offset, steps, b_stride, c, c_stride, fresh)`, all int64.

    a: address of A, rows `a_stride` bytes apart. table: address of the int64 addresses of the segments; with
    `prefetch` it holds one more than `segments`. offset: bytes from such an address to B of the segment, whose steps
    are `b_stride` bytes apart. c: address of C, float32, rows `c_stride` bytes apart. fresh: 1 to overwrite C, 0 to add.
    """

    @operation(types.void, *[int64] * 10)
    def tile(builder, a, a_stride, table, segments, offset, steps, b_stride, c, c_stride, fresh):
        sums = [[cgutils.alloca_once(builder, F32X16) for _ in range(vectors)] for _ in range(rows)]
        c_rows = [builder.add(c, builder.mul(c_stride, I64(r))) for r in range(rows)]
        with builder.if_else(builder.icmp_signed("!=", fresh, I64(0))) as (overwrite, accumulate):
            with overwrite:
                for row in sums:
                    for total in row:
                        builder.store(ir.Constant(F32X16, [0.0] * 16), total)
            with accumulate:
                for row, c_row in zip(sums, c_rows, strict=True):
                    for v, total in enumerate(row):
                        builder.store(load(builder, builder.add(c_row, I64(64 * v)), F32X16), total)
        with cgutils.for_range(builder, segments) as outer:
            entry = builder.add(table, builder.mul(outer.index, I64(8)))
            b = builder.add(load(builder, entry, I64), offset)
            ahead = (
                builder.sub(load(builder, builder.add(entry, I64(8)), I64), load(builder, entry, I64))
                if prefetch
                else None
            )
            a_segment = builder.add(a, builder.mul(builder.mul(outer.index, steps), I64(4)))
            a_rows = [builder.add(a_segment, builder.mul(a_stride, I64(r))) for r in range(rows)]
            with cgutils.for_range(builder, steps) as inner:
                b_step = builder.add(b, builder.mul(inner.index, b_stride))
                loaded = []
                for v in range(vectors):
                    at = builder.add(b_step, I64(64 * v))
                    loaded.append(load(builder, at, F32X16 if element == "f32" else BF16X32))
                    if prefetch:
                        prefetch_ir(builder, builder.add(at, ahead))
                for row, a_row in zip(sums, a_rows, strict=True):
                    at = builder.add(a_row, builder.mul(inner.index, I64(4)))
                    if element == "f32":
                        x = splat_ir(builder, load(builder, at, F32), 16)
                    else:
                        x = builder.bitcast(splat_ir(builder, load(builder, at, I32), 16), BF16X32)
                    for total, y in zip(row, loaded, strict=True):
                        old = builder.load(total)
                        if element == "f32":
                            new = call(builder, "llvm.fmuladd.v16f32", F32X16, [x, y, old])
                        else:
                            new = dot_bf16_ir(builder, old, x, y)
                        builder.store(new, total)
        for row, c_row in zip(sums, c_rows, strict=True):
            for v, total in enumerate(row):
                store(builder, builder.load(total), builder.add(c_row, I64(64 * v)))

    return tile


def make_transpose(element: str):
    """An intrinsic `transpose(table, offset, out)`: 16 elements of each of 16 rows, to float32 [16 elements][16 rows].

    table: address of the int64 addresses of the rows; offset: bytes from these to the elements, "f32" or "bf16".
    Four rounds swap the off-diagonal halves of ever smaller squares (Eklundh 1972).
    """

    @operation(types.void, int64, int64, int64)
    def transpose(builder, table, offset, out):
        rows = []
        for r in range(16):
            at = builder.add(load(builder, builder.add(table, I64(8 * r)), I64), offset)
            if element == "f32":
                rows.append(load(builder, at, F32X16))
            else:
                wide = builder.zext(load(builder, at, ir.VectorType(ir.IntType(16), 16)), I32X16)
                rows.append(builder.bitcast(builder.shl(wide, ir.Constant(I32X16, [16] * 16)), F32X16))
        for half in (8, 4, 2, 1):
            first = [lane if lane // half % 2 == 0 else 16 + lane - half for lane in range(16)]
            second = [lane + half if lane // half % 2 == 0 else 16 + lane for lane in range(16)]
            for r in (r for r in range(16) if r // half % 2 == 0):
                a, b = rows[r], rows[r + half]
                rows[r] = builder.shuffle_vector(a, b, ir.Constant(I32X16, first))
                rows[r + half] = builder.shuffle_vector(a, b, ir.Constant(I32X16, second))
        for r, row in enumerate(rows):
            store(builder, row, builder.add(out, I64(64 * r)))

    return transpose
