"""Compiles every shipped configuration of the Triton kernels for GPUs that are not here, and prints what each one uses.

`python triton_compiled.py [--few]` calls the operations on tensors whose memory is never looked at, catches what they
would launch, and hands exactly that to Triton's compiler: the same constants, alignment and options. `cuobjdump`, which
Triton carries, then tells registers, shared memory and spills of each cubin. Run by test_triton_compile.py.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from kvscope.kernels import triton as kernels
from kvscope.kernels.layout import PageLayout
from kvscope.kernels.triton import teaching
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

CAPABILITIES = (80, 90, 100)
NAMES = {
    torch.float32: "fp32", torch.float64: "fp64", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int8: "i8",
    torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip
SHORT = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
ATTENTION = (  # element type, query heads, KV heads, head size, options; the first two are what small models need
    (torch.bfloat16, 9, 3, 64, {}),
    (torch.bfloat16, 32, 8, 128, {}),
    (torch.bfloat16, 28, 4, 128, {"window": 4096}),
    (torch.bfloat16, 16, 16, 128, {"softcap": 50.0}),
    (torch.bfloat16, 14, 2, 96, {}),
    (torch.bfloat16, 8, 4, 256, {"window": 4096, "softcap": 50.0}),
    (torch.float16, 32, 8, 128, {}),
    (torch.float32, 9, 3, 64, {}),
    (torch.float32, 32, 8, 128, {}),
    (torch.float32, 8, 4, 256, {}),
)
MODULES = ("attention", "cache", "elementwise", "linear", "sampling", "teaching")


def launches(few):
    """{label: (kernel, arguments, constants, options)} of every configuration, or of a few."""
    caught = {}
    label = ""

    def catch(kernel, grid, *arguments, num_warps=4, num_stages=1, **constants):
        options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True}
        phase = {None: "", True: " decode", False: " prefill"}[constants.get("DECODE")]
        caught.setdefault(f"{kernel.fn.__name__.strip('_')}{phase} {label}", (kernel, arguments, constants, options))

    def name(text):
        nonlocal label
        label = text

    for module in MODULES:
        sys.modules[f"{kernels.__name__}.{module}"].launch = catch
    for dtype, q_heads, kv_heads, dim, options in ATTENTION[: 2 if few else None]:
        for q_lens in ((1, 1), (1, 63)):
            label = " ".join(
                [SHORT[dtype], f"{q_heads}/{kv_heads} heads of {dim}", *options, *["mixed"][: q_lens[1] - 1]]
            )
            call_attention(dtype, q_heads, kv_heads, dim, q_lens, options)
    for dtype in (torch.bfloat16,) if few else SHORT:
        call_the_rest(dtype, (576, 2048) if few else (64, 576, 2048, 4096, 8192, 16_384), name)
    return caught


def call_attention(dtype, q_heads, kv_heads, dim, q_lens, options):
    layout = PageLayout(16, kv_heads, dim, dtype)
    pages = torch.empty(512, layout.page_bytes, dtype=torch.uint8)
    q = torch.empty(sum(q_lens), q_heads + 2 * kv_heads, dim, dtype=dtype)[:, :q_heads]
    table, lens = torch.empty(2, 128, dtype=torch.int32), torch.empty(2, dtype=torch.int32)
    starts = torch.empty(3, dtype=torch.int32)
    kernels.paged_attention(q, pages, layout, table, starts, lens, scale=0.125, **options)
    slots = torch.empty(len(q), dtype=torch.int64)
    kernels.write_kv(q[:, :kv_heads], q[:, :kv_heads], pages, layout, slots)
    cos_sin = torch.empty(4096, dim)
    kernels.rotary(q, q[:, :kv_heads], slots, cos_sin)


def call_the_rest(dtype, sizes, name):
    for size in sizes:
        name(f"{SHORT[dtype]} {size}")
        x, residual, weight = torch.empty(32, size, dtype=dtype), torch.empty(32, size), torch.empty(size)
        kernels.rms_norm(residual, weight, 1e-5, out_dtype=dtype)
        name(f"{SHORT[dtype]} {size} add")
        kernels.add_rms_norm(x, residual, weight, 1e-5, out_dtype=dtype)
    packed = kernels.pack_linear(torch.ones(1536, 576), torch.ones(1536), dtype, "int8")
    for tokens in (1, 32, 64, 512):
        name(f"{SHORT[dtype]} {tokens} tokens")
        kernels.linear(torch.empty(tokens, 576, dtype=dtype), packed)
    name(SHORT[dtype])
    kernels.silu_mul(torch.empty(32, 2 * 1536, dtype=dtype))
    q = torch.empty(9, 1024, 64, dtype=dtype)
    teaching.flash_attention_1(q, q, q)
    teaching.flash_attention_2(q, q, q)
    name("")
    kernels.copy_pages([torch.empty(64, 8192, dtype=torch.uint8)], torch.empty(8, 2, dtype=torch.int64))
    logits, options = torch.empty(32, 49_152), torch.empty(32)
    kernels.sample(logits, options, options.int(), options, options, options.double())
    name("greedy")
    kernels.greedy(logits)


def source(kernel, arguments, constants):
    """What a launch compiles: types by argument, 16-byte alignment where it holds, and ones as constants."""
    names = kernel.arg_names
    signature, constexprs, attributes = {}, {}, {}
    for place, (name, value) in enumerate(zip(names, arguments, strict=False)):
        if isinstance(value, torch.Tensor):
            signature[name] = f"*{NAMES[value.dtype]}"
            aligned = value.data_ptr() % 16 == 0
        elif isinstance(value, float):
            signature[name], aligned = "fp32", False
        elif value == 1:
            signature[name], constexprs[(place,)], aligned = "constexpr", 1, False
        else:
            signature[name], aligned = "i32" if abs(value) < 2**31 else "i64", value % 16 == 0
        if aligned:
            attributes[(place,)] = [["tt.divisibility", 16]]
    for name, value in constants.items():
        signature[name], constexprs[(names.index(name),)] = "constexpr", value
    return ASTSource(kernel, {name: signature[name] for name in names}, constexprs, attributes)


def usage(cubin):
    """Registers, shared memory, stack and local memory (spills live there) of a compiled kernel."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = dict(re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", text))
    return {name: int(found[name]) for name in ("REG", "STACK", "SHARED", "LOCAL")}


def main(few):
    compiled = set()
    for label, (kernel, arguments, constants, options) in launches(few).items():
        code = source(kernel, arguments, constants)
        for capability in CAPABILITIES:
            key = (code.hash(), str(options), capability)
            if key not in compiled:
                compiled.add(key)
                made = triton.compile(code, target=GPUTarget("cuda", capability, 32), options=options)
                used = usage(made.asm["cubin"]) | {"DYNAMIC": made.metadata.shared}
                print(
                    json.dumps({"kernel": label, "sm": capability, "warps": options["num_warps"], **used}), flush=True
                )


if __name__ == "__main__":
    main(few="--few" in sys.argv)
