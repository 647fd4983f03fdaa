"""Vectors of 16 float32 and 32 bfloat16 as values inside a kernel: what Numba's own loops cannot say.

Numba vectorises plain loops well as long as they are float32 and element by element. It has no bfloat16, and so no
way to the instruction that multiplies 32 pairs of them and adds to 16 float32 sums. Here each operation is a small
`intrinsic` that writes LLVM IR:

    acc = zeros()
    for k in range(pairs):
        acc = dot_bf16(acc, broadcast_pair(x + 4 * k), load_bf16(w + 64 * k))
    store_f32(out, acc)

Addresses are int64 and need no alignment. `f32x16` and `bf16x32` live in registers, can be variables and loop-carried,
and cannot cross a kernel's boundary. **All functions on vectors need `CPU.avx512_bf16`**: check it where the kernel is
chosen, since LLVM aborts the process on an instruction that the target lacks. `scalars` runs anywhere.
"""

from __future__ import annotations

import inspect

from llvmlite import ir
from numba import float32, int64, types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

I32, I64, F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()


class BFloat(ir.Type):
    """The LLVM type `bfloat`, which llvmlite does not have."""

    intrinsic_name = "bf16"

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other) -> bool:
        return isinstance(other, BFloat)

    def __hash__(self) -> int:
        return hash(BFloat)


BF16 = BFloat()
F32X16, I32X16 = ir.VectorType(F32, 16), ir.VectorType(I32, 16)
BF16X16, BF16X32 = ir.VectorType(BF16, 16), ir.VectorType(BF16, 32)


class Vector(types.Type):
    """Numba's type of a register: `f32x16` or `bf16x32`."""

    def __init__(self, name: str, llvm_type: ir.Type):
        super().__init__(name=name)
        self.llvm_type = llvm_type


@register_model(Vector)
class VectorModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, fe_type.llvm_type)


f32x16 = Vector("f32x16", F32X16)
bf16x32 = Vector("bf16x32", BF16X32)


# ------------------------------------------------------------------------------------- pieces of IR, for generators


def load(builder, address, llvm_type):
    """Loads one `llvm_type` from an i64 address of any alignment."""
    loaded = builder.load(builder.inttoptr(address, llvm_type.as_pointer()))
    loaded.align = 1
    return loaded


def store(builder, value, address):
    """Stores a value at an i64 address of any alignment."""
    builder.store(value, builder.inttoptr(address, value.type.as_pointer())).align = 1


def splat_ir(builder, scalar, lanes: int):
    """A vector with `scalar` in every lane."""
    vector = ir.VectorType(scalar.type, lanes)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, I32(0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(I32, lanes), [0] * lanes))


def call(builder, name: str, result, args, constants=()):
    """Calls the LLVM intrinsic `name`; `constants` are i32 immediates that follow the arguments."""
    args = [*args, *(I32(c) for c in constants)]
    function_type = ir.FunctionType(result, [a.type for a in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), args)


def prefetch_ir(builder, address):
    """Asks for the cache line at an i64 address, for reading, into L2: L1 has too few lines on the way at once to keep up with
    memory, and too little room for a panel of a weight."""
    byte = builder.inttoptr(address, ir.IntType(8).as_pointer())
    call(builder, "llvm.prefetch.p0", ir.VoidType(), [byte], constants=(0, 2, 1))


def dot_bf16_ir(builder, acc, a, b):
    """acc[i] + a[2i] b[2i] + a[2i+1] b[2i+1]: `vdpbf16ps`."""
    return call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", F32X16, [acc, a, b])


def dot_u8_i8_ir(builder, acc, a, b):
    """acc[i] + a[4i] b[4i] + … + a[4i+3] b[4i+3] in int32, a unsigned and b signed bytes: `vpdpbusd`."""
    return call(builder, "llvm.x86.avx512.vpdpbusd.512", I32X16, [acc, a, b])


def operation(result, *parameters):
    """Makes `emit(builder, *values)` callable in kernels: it takes Numba types `parameters` and returns `result`.

    Integers and floats given are converted to the declared type, as in C.
    """

    def decorate(emit):
        def typer(typingctx, *args):
            return result(*parameters), lambda context, builder, signature, values: emit(builder, *values)

        typer.__name__, typer.__doc__ = emit.__name__, emit.__doc__
        typer.__signature__ = inspect.signature(emit)  # Numba matches the arguments of a call by these names
        return intrinsic(typer)

    return decorate


# ------------------------------------------------------------------------------------------ memory and registers


@operation(types.void, int64)
def prefetch(builder, address):
    """Asks for the cache line at `address`; any address is allowed, also one that is not mapped."""
    prefetch_ir(builder, address)


@operation(f32x16)
def zeros(builder):
    return ir.Constant(F32X16, [0.0] * 16)


@operation(f32x16, float32)
def splat(builder, x):
    """`x` in all 16 lanes."""
    return splat_ir(builder, x, 16)


@operation(f32x16, int64)
def load_f32(builder, address):
    return load(builder, address, F32X16)


@operation(types.void, int64, f32x16)
def store_f32(builder, address, vector):
    store(builder, vector, address)


@operation(bf16x32, int64)
def load_bf16(builder, address):
    """32 bfloat16, which is 16 pairs for `dot_bf16`."""
    return load(builder, address, BF16X32)


@operation(bf16x32, int64)
def broadcast_pair(builder, address):
    """The two bfloat16 at `address`, 16 times."""
    return builder.bitcast(splat_ir(builder, load(builder, address, I32), 16), BF16X32)


@operation(types.void, int64, f32x16)
def store_as_bf16(builder, address, vector):
    """Rounds 16 float32 to the nearest bfloat16, ties to even, and stores them."""
    store(builder, builder.fptrunc(vector, BF16X16), address)


# ------------------------------------------------------------------------------------------------------ arithmetic


@operation(f32x16, f32x16, bf16x32, bf16x32)
def dot_bf16(builder, acc, a, b):
    """acc[i] + a[2i] b[2i] + a[2i+1] b[2i+1], accumulated in float32; denormals count as zero."""
    return dot_bf16_ir(builder, acc, a, b)


@operation(f32x16, f32x16, f32x16)
def add(builder, a, b):
    return builder.fadd(a, b)


@operation(f32x16, f32x16, f32x16)
def sub(builder, a, b):
    return builder.fsub(a, b)


@operation(f32x16, f32x16, f32x16)
def mul(builder, a, b):
    return builder.fmul(a, b)


@operation(f32x16, f32x16, f32x16, f32x16)
def fma(builder, a, b, c):
    """a b + c, rounded once."""
    return call(builder, "llvm.fma.v16f32", F32X16, [a, b, c])


@operation(f32x16, f32x16, f32x16)
def maximum(builder, a, b):
    """The larger of each lane; a lane of `b` where either is NaN."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


@operation(float32, f32x16)
def sum_of(builder, vector):
    """The sum of the 16 lanes, added as a tree."""
    return builder.call(
        cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(F32, [F32, F32X16]), "llvm.vector.reduce.fadd.v16f32"
        ),
        [F32(-0.0), vector],
        fastmath=("reassoc",),
    )


@operation(float32, f32x16)
def max_of(builder, vector):
    """The largest of the 16 lanes; NaN lanes are ignored."""
    return call(builder, "llvm.vector.reduce.fmax.v16f32", F32, [vector])


# Cephes' exp2f: 2^f - 1 = f P(f) for |f| <= 1/2, relative error 2e-7 (S. Moshier, Cephes library, exp2f.c)
EXP2_COEFFICIENTS = (
    1.535336188319500e-4,
    1.339887440266574e-3,
    9.618437357674640e-3,
    5.550332471162809e-2,
    2.402264791363012e-1,
    6.931472028550421e-1,
)


@operation(f32x16, f32x16)
def exp2(builder, x):
    """2^x with a relative error under 3e-7; 0 below -126 (also for -inf), inf from 128 on, NaN for NaN."""
    whole = call(builder, "llvm.rint.v16f32", F32X16, [x])
    f = builder.fsub(x, whole)
    p = ir.Constant(F32X16, [EXP2_COEFFICIENTS[0]] * 16)
    for coefficient in (*EXP2_COEFFICIENTS[1:], 1.0):
        p = call(builder, "llvm.fma.v16f32", F32X16, [p, f, ir.Constant(F32X16, [coefficient] * 16)])
    # scalef multiplies by 2^whole and saturates to 0 and inf by itself; f is NaN for infinite x, hence the select
    all_lanes = ir.Constant(ir.IntType(16), -1)
    args = [p, whole, ir.Constant(F32X16, [0.0] * 16), all_lanes, I32(4)]
    scaled = call(builder, "llvm.x86.avx512.mask.scalef.ps.512", F32X16, args)
    low = builder.fcmp_ordered("<", x, ir.Constant(F32X16, [-126.0] * 16))
    scaled = builder.select(low, ir.Constant(F32X16, [0.0] * 16), scaled)
    high = builder.fcmp_ordered(">=", x, ir.Constant(F32X16, [128.0] * 16))
    return builder.select(high, ir.Constant(F32X16, [float("inf")] * 16), scaled)
