"""The inner loop of every matrix product: a tile of sums that stays in registers.

    out[r, c] = init[r, c] + sum over k of x[r, k] w[k, c]        r < rows (at most MAX_ROWS), c < COLUMNS

One step of the loop loads one row of `w` (COLUMNS values, two vectors), then for each row of `x` copies one value into
all lanes and multiplies and adds it to that row's two vectors of sums:

              w[k]   | vector 0 | vector 1 |
    x[0, k] -------> | sum 0,0  | sum 0,1  |      12 rows × 2 vectors are 24 sums, 2 of w and 1 of x:
    x[1, k] -------> | sum 1,0  | sum 1,1  |      27 of the 32 registers of AVX-512. With AVX2, which has 16,
      ...            |   ...    |   ...    |      6 rows × 2 vectors are 12 + 2 + 1.
    x[11,k] -------> | sum 11,0 | sum 11,1 |

That is 14 loads for 24 multiplications, so the multipliers are the limit and not the loads; and at one row it reads `w`
once from start to end, so the memory is.

Adding thousands of products to one float32 loses digits: the error grows with their number. So a sum starts from zero
again after every chunk of steps, and chunks are added to `out`, which makes float32 as exact as a BLAS. The order of
additions depends on k alone: **a row's result is the same, bit for bit, whatever rows stand beside it**.

The three kinds differ in what one step is:

| kind | x | w | a step |
|---|---|---|---|
| "f32" | float32 | float32 [k][COLUMNS] | one k: multiply-add |
| "bf16" | float32 | bfloat16 [k/2][COLUMNS][2] | two k: w widened to float32 (exact), two multiply-adds; any machine |
| "bf16_dot" | bfloat16 | bfloat16 [k/2][COLUMNS][2] | two k: one `vdpbf16ps`; needs `CPU.avx512_bf16` |

A tile is one LLVM function for each number of rows, and the intrinsic that `make_tile` returns chooses among them.
"""

from __future__ import annotations

from llvmlite import ir
from numba import int64, types
from numba.core import cgutils

from .compiler import CPU
from .simd import BF16X32, F32, I32, I64, call, dot_bf16_ir, load, operation, prefetch_ir, splat_ir, store

LANES = 16 if CPU.avx512 else 8  # float32 in a vector
COLUMNS = 2 * LANES
MAX_ROWS = 12 if CPU.avx512 else 6
LINE = 64  # bytes of a cache line

PARAMETERS = [
    "x",
    "x_stride",
    "w",
    "w_stride",
    "steps",
    "init",
    "init_stride",
    "out",
    "out_stride",
    "ahead",
    "ahead_step",
]
F32_VECTOR, I32_VECTOR = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)


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


KINDS = {  # the step, the bytes of x it takes, and the steps of a chunk
    "f32": (_step_f32, 4, 128),
    "bf16": (_step_bf16, 8, 1024),
    "bf16_dot": (_step_bf16_dot, 4, 1024),
}


def _tile_function(module, kind: str, rows: int):
    """The LLVM function of one tile, written into `module` if it is not there yet.

    for start in 0, chunk, 2 chunk … < steps:                 block "chunk"
        sums = 0
        for k in start … min(start + chunk, steps):           block "loop"
            step
        out = (init if start == 0 else out) + sums            block "add"
    """
    step, x_bytes, chunk_steps = KINDS[kind]
    name = f"kvscope_tile_{kind}_{rows}"
    function = cgutils.get_or_insert_function(module, ir.FunctionType(ir.VoidType(), [I64] * len(PARAMETERS)), name)
    if function.blocks:
        return function
    function.linkage = "linkonce_odr"
    function.attributes.add("noinline")
    arg = dict(zip(PARAMETERS, function.args, strict=True))
    entry, chunk, loop, add, end = (function.append_basic_block(n) for n in ("entry", "chunk", "loop", "add", "end"))
    zero = ir.Constant(F32_VECTOR, [0.0] * LANES)

    builder = ir.IRBuilder(entry)
    x_rows = [builder.add(arg["x"], builder.mul(arg["x_stride"], I64(r))) for r in range(rows)]
    builder.branch(chunk)

    builder.position_at_end(chunk)
    start = builder.phi(I64)
    start.add_incoming(I64(0), entry)
    stop = builder.add(start, I64(chunk_steps))
    stop = builder.select(builder.icmp_signed("<", stop, arg["steps"]), stop, arg["steps"])
    w_start = builder.add(arg["w"], builder.mul(arg["w_stride"], start))
    builder.branch(loop)

    builder.position_at_end(loop)
    k, w = builder.phi(I64), builder.phi(I64)
    sums = [[builder.phi(F32_VECTOR) for _ in range(2)] for _ in range(rows)]
    acc = [list(row) for row in sums]
    coming = builder.add(arg["ahead"], builder.mul(k, arg["ahead_step"]))
    for line in range(0, 4 * COLUMNS, LINE):
        prefetch_ir(builder, builder.add(coming, I64(line)))
    x_offset = builder.mul(k, I64(x_bytes))
    step(builder, w, [builder.add(row, x_offset) for row in x_rows], acc)
    next_k, next_w = builder.add(k, I64(1)), builder.add(w, arg["w_stride"])
    phis = [k, w, *(phi for row in sums for phi in row)]
    before = [start, w_start, *[zero] * (2 * rows)]
    after = [next_k, next_w, *(value for row in acc for value in row)]
    for phi, first, following in zip(phis, before, after, strict=True):
        phi.add_incoming(first, chunk)
        phi.add_incoming(following, loop)
    builder.cbranch(builder.icmp_signed("<", next_k, stop), loop, add)

    builder.position_at_end(add)
    is_first = builder.icmp_signed("==", start, I64(0))
    base = builder.select(is_first, arg["init"], arg["out"])
    base_stride = builder.select(is_first, arg["init_stride"], arg["out_stride"])
    for r in range(rows):
        for v in range(2):
            column = I64(v * 4 * LANES)
            base_at = builder.add(builder.add(base, builder.mul(base_stride, I64(r))), column)
            out_at = builder.add(builder.add(arg["out"], builder.mul(arg["out_stride"], I64(r))), column)
            store(builder, builder.fadd(load(builder, base_at, F32_VECTOR), acc[r][v]), out_at)
    start.add_incoming(stop, add)
    builder.cbranch(builder.icmp_signed("<", stop, arg["steps"]), chunk, end)

    builder.position_at_end(end)
    builder.ret_void()
    return function


def make_tile(kind: str):
    """Makes the intrinsic `tile(rows, x, x_stride, w, w_stride, steps, init, init_stride, out, out_stride, ahead, ahead_step)`.

    All are int64: addresses, and strides in bytes from row to row. rows: 1 … MAX_ROWS. steps: at least 1; k or k/2,
    as the kind counts. `init` and `out` are float32 rows of COLUMNS and may be the same; a stride of 0 starts every row
    from one init, such as a bias. Each step prefetches a row's bytes of w from `ahead` + step × `ahead_step`, which may
    lie anywhere: further down in w, or in what is multiplied next.
    """

    @operation(types.void, int64, *[int64] * len(PARAMETERS))
    def tile(builder, rows, x, x_stride, w, w_stride, steps, init, init_stride, out, out_stride, ahead, ahead_step):
        arguments = [x, x_stride, w, w_stride, steps, init, init_stride, out, out_stride, ahead, ahead_step]
        done = builder.append_basic_block("done")
        choice = builder.switch(rows, done)
        for n in range(1, MAX_ROWS + 1):
            block = builder.append_basic_block(f"rows_{n}")
            choice.add_case(I64(n), block)
            builder.position_at_end(block)
            builder.call(_tile_function(builder.module, kind, n), arguments)
            builder.branch(done)
        builder.position_at_end(done)

    return tile
