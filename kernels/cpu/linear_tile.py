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

What a step is differs from kind to kind: see `linear_steps`.

A tile is one LLVM function for each number of rows, and the intrinsic that `make_tile` returns chooses among them.
"""

from __future__ import annotations

from llvmlite import ir
from numba import int64, types
from numba.core import cgutils

from .linear_steps import F32_VECTOR, I32_VECTOR, KINDS, LANES
from .simd import I64, load, operation, prefetch_ir, store

LINE = 64  # bytes of a cache line

PARAMETERS = [
    "x",
    "x_stride",
    "w",
    "steps",
    "init",
    "init_stride",
    "scale",
    "out",
    "out_stride",
    "ahead",
    "ahead_step",
]


def _tile_function(module, kind: str, rows: int):
    """The LLVM function of one tile, written into `module` if it is not there yet.

    for start in 0, chunk, 2 chunk … < steps:                 block "chunk"
        sums = 0
        for k in start … min(start + chunk, steps):           block "loop"
            step
        out = (init if start == 0 else out) + scale · sums    block "add"
    """
    of = KINDS[kind]
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
    row_bytes, step_bytes = (
        (arg["x_stride"], I64(of.x_bytes)) if not of.side_by_side else (I64(of.x_bytes), arg["x_stride"])
    )
    x_rows = [builder.add(arg["x"], builder.mul(row_bytes, I64(r))) for r in range(rows)]
    builder.branch(chunk)

    builder.position_at_end(chunk)
    start = builder.phi(I64)
    start.add_incoming(I64(0), entry)
    stop = builder.add(start, I64(of.chunk))
    stop = builder.select(builder.icmp_signed("<", stop, arg["steps"]), stop, arg["steps"])
    w_start = builder.add(arg["w"], builder.mul(I64(of.w_bytes), start))
    builder.branch(loop)

    builder.position_at_end(loop)
    k, w = builder.phi(I64), builder.phi(I64)
    sums = [[builder.phi(F32_VECTOR) for _ in range(2)] for _ in range(rows)]
    acc = [list(row) for row in sums]
    coming = builder.add(arg["ahead"], builder.mul(k, arg["ahead_step"]))
    for line in range(0, of.w_bytes, LINE):
        prefetch_ir(builder, builder.add(coming, I64(line)))
    x_offset = builder.mul(k, step_bytes)
    of.step(builder, w, [builder.add(row, x_offset) for row in x_rows], acc)
    next_k, next_w = builder.add(k, I64(1)), builder.add(w, I64(of.w_bytes))
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
    if of.scaled:
        scales = [load(builder, builder.add(arg["scale"], I64(v * 4 * LANES)), F32_VECTOR) for v in range(2)]
        acc = [[builder.fmul(total, scale) for total, scale in zip(row, scales, strict=True)] for row in acc]
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
    """Makes the intrinsic `tile(rows, x, x_stride, w, steps, init, init_stride, scale, out, out_stride, ahead, ahead_step)`.

    All are int64: addresses, and strides in bytes from row to row. rows: 1 to the kind's most. steps: at least 1, as the kind
    counts. scale: address of COLUMNS float32, for the kinds of int8. `init` and `out` are float32 rows of COLUMNS and may be the same; a stride of 0 starts every row
    from one init, such as a bias. Each step prefetches a row's bytes of w from `ahead` + step × `ahead_step`, which may
    lie anywhere: further down in w, or in what is multiplied next.
    """

    @operation(types.void, int64, *[int64] * len(PARAMETERS))
    def tile(builder, rows, x, x_stride, w, steps, init, init_stride, scale, out, out_stride, ahead, ahead_step):
        arguments = [x, x_stride, w, steps, init, init_stride, scale, out, out_stride, ahead, ahead_step]
        done = builder.append_basic_block("done")
        choice = builder.switch(rows, done)
        for n in range(1, KINDS[kind].rows + 1):
            block = builder.append_basic_block(f"rows_{n}")
            choice.add_case(I64(n), block)
            builder.position_at_end(block)
            builder.call(_tile_function(builder.module, kind, n), arguments)
            builder.branch(done)
        builder.position_at_end(done)

    return tile


@operation(types.void, int64, int64)
def copy_lanes(builder, source, to):
    """LANES float32 from address to address."""
    store(builder, load(builder, source, F32_VECTOR), to)


@operation(types.void, int64, int64)
def round_lanes(builder, source, to):
    """LANES float32 at `source` as bfloat16 at `to`: to nearest, ties to even, NaN stays NaN. On any CPU."""
    values = load(builder, source, F32_VECTOR)
    bits = builder.bitcast(values, I32_VECTOR)
    sixteen = ir.Constant(I32_VECTOR, [16] * LANES)
    odd = builder.and_(builder.lshr(bits, sixteen), ir.Constant(I32_VECTOR, [1] * LANES))
    rounded = builder.add(bits, builder.add(odd, ir.Constant(I32_VECTOR, [0x7FFF] * LANES)))
    nan = builder.or_(bits, ir.Constant(I32_VECTOR, [0x400000] * LANES))
    rounded = builder.select(builder.fcmp_unordered("uno", values, values), nan, rounded)
    store(builder, builder.trunc(builder.lshr(rounded, sixteen), ir.VectorType(ir.IntType(16), LANES)), to)
