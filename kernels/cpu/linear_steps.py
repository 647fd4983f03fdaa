"""One step of a tile's inner loop, for every pair of types that a linear multiplies.

The kinds differ in what one step is:

| kind | x | w | a step |
|---|---|---|---|
| "f32" | float32 | float32 [k][COLUMNS] | one k: multiply-add |
| "bf16" | float32 | bfloat16 [k/2][COLUMNS][2] | two k: w widened to float32 (exact), two multiply-adds; any machine |
| "bf16_dot" | bfloat16 | bfloat16 [k/2][COLUMNS][2] | two k: one `vdpbf16ps`; needs `CPU.avx512_bf16` |
| "i8" | float32 | int8 [k/4][COLUMNS][4] | four k: w widened to float32 (exact), four multiply-adds; any machine |
| "i8_bf16" | bfloat16 | int8 [k/4][COLUMNS][4] | four k: w widened to bfloat16 (exact), two `vdpbf16ps`; needs `CPU.avx512_bf16` |
| "i8_dot" | groups of 32 int8 | int8 [k/4][COLUMNS][4] | a group: eight `vpdpbusd` into int32, scaled; needs `CPU.avx512_vnni` |

The kinds of int8 multiply each column's sum by the scale of that output at the end. A group of "i8_dot" is GROUP_BYTES:
its float32 scale, −128 times the sum of its values as int32, and the 32 values. The second is there because `vpdpbusd`
multiplies unsigned bytes by signed ones: w + 128 goes in for w, and what that adds is taken off where the sum begins.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from llvmlite import ir

from .compiler import CPU
from .simd import BF16X32, F32, I32, I64, call, dot_bf16_ir, dot_u8_i8_ir, load, splat_ir

LANES = 16 if CPU.avx512 else 8  # float32 in a vector
COLUMNS = 2 * LANES
MAX_ROWS = 12 if CPU.avx512 else 6
GROUP = 32  # values of x that share a scale
GROUP_BYTES = 8 + GROUP
F32_VECTOR, I32_VECTOR = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)
I8X64 = ir.VectorType(ir.IntType(8), 64)


def _fma(builder, a, b, acc):
    """a b + acc; fused where the machine can, never a call of the C library."""
    return call(builder, f"llvm.fmuladd.v{LANES}f32", F32_VECTOR, [a, b, acc])


def _step_f32(builder, w, x, acc):
    """One k: w and x are addresses of the step; acc is [rows][2] of vectors."""
    columns = [load(builder, builder.add(w, I64(v * 4 * LANES)), F32_VECTOR) for v in range(2)]
    for row, address in enumerate(x):
        value = splat_ir(builder, load(builder, address, F32), LANES)
        for v in range(2):
            acc[row][v] = _fma(builder, value, columns[v], acc[row][v])


def _step_bf16(builder, w, x, acc):
    """Two k: a pair of bfloat16 in 32 bits is widened by a shift (the low one) and by a mask (the high one)."""
    pairs = [load(builder, builder.add(w, I64(v * 4 * LANES)), I32_VECTOR) for v in range(2)]
    sixteen = ir.Constant(I32_VECTOR, [16] * LANES)
    mask = ir.Constant(I32_VECTOR, [0xFFFF0000] * LANES)
    low = [builder.bitcast(builder.shl(p, sixteen), F32_VECTOR) for p in pairs]
    high = [builder.bitcast(builder.and_(p, mask), F32_VECTOR) for p in pairs]
    for half, columns in enumerate((low, high)):
        for row, address in enumerate(x):
            value = splat_ir(builder, load(builder, builder.add(address, I64(4 * half)), F32), LANES)
            for v in range(2):
                acc[row][v] = _fma(builder, value, columns[v], acc[row][v])


def _step_bf16_dot(builder, w, x, acc):
    """Two k in one instruction: a pair of x in all lanes against 16 pairs of w."""
    columns = [load(builder, builder.add(w, I64(v * 64)), BF16X32) for v in range(2)]
    for row, address in enumerate(x):
        pair = builder.bitcast(splat_ir(builder, load(builder, address, I32), LANES), BF16X32)
        for v in range(2):
            acc[row][v] = dot_bf16_ir(builder, acc[row][v], pair, columns[v])


def _widened(builder, words, j: int):
    """Byte j of LANES words of four int8, as float32: moved to the top of its word, and down again with its sign."""
    if j < 3:
        words = builder.shl(words, ir.Constant(I32_VECTOR, [24 - 8 * j] * LANES))
    return builder.sitofp(builder.ashr(words, ir.Constant(I32_VECTOR, [24] * LANES)), F32_VECTOR)


def _step_i8(builder, w, x, acc):
    """Four k: every byte of a word becomes a float32."""
    words = [load(builder, builder.add(w, I64(v * 4 * LANES)), I32_VECTOR) for v in range(2)]
    for j in range(4):
        columns = [_widened(builder, word, j) for word in words]
        for row, address in enumerate(x):
            value = splat_ir(builder, load(builder, builder.add(address, I64(4 * j)), F32), LANES)
            for v in range(2):
                acc[row][v] = _fma(builder, value, columns[v], acc[row][v])


def _step_i8_bf16(builder, w, x, acc):
    """Four k: every byte of a word becomes a bfloat16."""
    words = [load(builder, builder.add(w, I64(v * 64)), I32_VECTOR) for v in range(2)]
    pairs = [(_looked_up if CPU.avx512_vbmi else _shifted)(builder, word) for word in words]
    for j in range(2):
        for row, address in enumerate(x):
            pair = splat_ir(builder, load(builder, builder.add(address, I64(4 * j)), I32), LANES)
            for v in range(2):
                acc[row][v] = dot_bf16_ir(builder, acc[row][v], builder.bitcast(pair, BF16X32), pairs[v][j])


def _shifted(builder, words):
    """Words of four int8 as two vectors of pairs: the upper halves of the float32 of two bytes are a pair of bfloat16."""
    halves = ir.VectorType(ir.IntType(16), 2 * LANES)
    order = [2 * (i // 2) + 1 + i % 2 * 2 * LANES for i in range(2 * LANES)]  # the odd halves of both, in turns
    values = [builder.bitcast(_widened(builder, words, j), halves) for j in range(4)]
    return [_in_order(builder, values[j], values[j + 1], order) for j in (0, 2)]


# Both bytes of the bfloat16 of 0 to 127. One instruction looks up 64 bytes in 128.
_MAGNITUDES = (np.arange(128, dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16)


def _looked_up(builder, words):
    """What `_shifted` gives, in half as many instructions, for bytes from −127 to 127."""
    values = builder.bitcast(words, I8X64)
    magnitudes = call(builder, "llvm.abs.v64i8", I8X64, [values, ir.IntType(1)(0)])
    low, high = (
        call(builder, "llvm.x86.avx512.vpermi2var.qi.512", I8X64, [_bytes(table[:64]), magnitudes, _bytes(table[64:])])
        for table in (_MAGNITUDES & 0xFF, _MAGNITUDES >> 8)
    )
    high = builder.or_(high, builder.and_(values, _bytes([0x80] * 64)))
    return [
        _in_order(builder, low, high, [at + 4 * c + j for c in range(LANES) for j in k for at in (0, 64)])
        for k in ((0, 1), (2, 3))
    ]


def _bytes(values):
    return ir.Constant(I8X64, [int(value) for value in values])


def _in_order(builder, a, b, order):
    """The elements of a and b, side by side, that `order` counts, as pairs of bfloat16."""
    order = ir.Constant(ir.VectorType(I32, len(order)), order)
    return builder.bitcast(builder.shuffle_vector(a, b, order), BF16X32)


def _step_i8_dot(builder, w, x, acc):
    """A group: the sums of its 32 products are exact in int32, in any order. A few rows take them in two chains, because
    one would wait for each product."""
    flip = ir.Constant(I32_VECTOR, [0x80808080] * LANES)  # int8 w to w + 128
    chains = 2 if len(x) <= 4 else 1
    begins = [splat_ir(builder, load(builder, builder.add(address, I64(4)), I32), LANES) for address in x]
    zero = ir.Constant(I32_VECTOR, [0] * LANES)
    sums = [[[begin if chain == 0 else zero] * 2 for chain in range(chains)] for begin in begins]
    for j in range(GROUP // 4):
        columns = [load(builder, builder.add(w, I64((2 * j + v) * 4 * LANES)), I32_VECTOR) for v in range(2)]
        columns = [builder.xor(c, flip) for c in columns]
        for row, address in enumerate(x):
            four = splat_ir(builder, load(builder, builder.add(address, I64(8 + 4 * j)), I32), LANES)
            total = sums[row][j % chains]
            for v in range(2):
                total[v] = dot_u8_i8_ir(builder, total[v], columns[v], four)
    for row, address in enumerate(x):
        scale = splat_ir(builder, load(builder, address, F32), LANES)
        for v in range(2):
            total = sums[row][0][v] if chains == 1 else builder.add(sums[row][0][v], sums[row][1][v])
            acc[row][v] = _fma(builder, scale, builder.sitofp(total, F32_VECTOR), acc[row][v])


@dataclass(frozen=True, slots=True)
class Kind:
    """How a tile multiplies: `step(builder, w, x, acc)` adds one step to acc[row][vector]; w and x are addresses."""

    step: Callable
    words: int  # of 32 bits that a step takes of each output
    x_bytes: int  # that it takes of each row
    chunk: int  # steps that are added up before they go to out
    rows: int = MAX_ROWS  # of a tile at most
    side_by_side: bool = False  # x: one step of all rows after another, rather than one row after another
    scaled: bool = False  # are the sums multiplied by a scale for each output?

    @property
    def w_bytes(self) -> int:
        return self.words * 4 * COLUMNS


KINDS = {
    "f32": Kind(_step_f32, 1, 4, 128),
    "bf16": Kind(_step_bf16, 1, 8, 1024),
    "bf16_dot": Kind(_step_bf16_dot, 1, 4, 1024),
    "i8": Kind(_step_i8, 1, 16, 32, scaled=True),
    "i8_bf16": Kind(_step_i8_bf16, 1, 8, 512, scaled=True),
    "i8_dot": Kind(_step_i8_dot, GROUP // 4, GROUP_BYTES, 128, rows=8, side_by_side=True, scaled=True),
}
