"""The kernels of `kvscope bench gpu`: what each is run on, how far it may be from float64, and what it moves.

A case holds one call on data large enough that the caches do not help, with the bytes and FLOPs that it cannot do
without, and a check of the same kernel on a smaller problem: the largest error as a share of what is allowed, where
1 is the limit. What is allowed is said in `_error`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from kvscope.kernels import reference
from kvscope.kernels.layout import PageLayout
from kvscope.kernels.ops import Ops

ROUNDING = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    shape: str
    run: Callable[[], object]
    num_bytes: int
    num_flops: int
    check: Callable[[], float]


@dataclass(frozen=True, slots=True)
class Sizes:
    """The data: `full` is for a GPU, `tiny` for trying the bench itself where there is none."""

    tokens: int
    hidden: int
    vocab: int
    decode: tuple[tuple[int, int], ...]  # (rows, context)
    prefill: tuple[int, int]  # (prompts, tokens of each)
    heads: tuple[int, int, int]
    checked: int  # tokens in a check

    @classmethod
    def full(cls) -> Sizes:
        return cls(16_384, 4096, 128_256, ((1, 32_768), (32, 8192), (256, 1024)), (4, 4096), (32, 8, 128), 700)

    @classmethod
    def tiny(cls) -> Sizes:
        return cls(4, 64, 300, ((2, 40),), (1, 20), (4, 2, 16), 20)


def cases(k: Ops, dtype: torch.dtype, device: torch.device, sizes: Sizes) -> Iterator[Case]:
    """One after the other, so that only one holds its memory."""
    torch.manual_seed(0)
    for make in (_norm, _rotary, _silu, _write, _copy, _decode, _prefill, _dense, _int8, _sampling):
        yield from make(k, dtype, device, sizes)


def _error(got: torch.Tensor, want: torch.Tensor, scale: torch.Tensor | None = None) -> float:
    """Largest error / allowed: two roundings of the result, and one of every term of the sum that `scale` bounds."""
    rounding = ROUNDING[got.dtype]
    terms = want.abs() if scale is None else scale
    allowed = rounding * want.abs() + max(rounding, 4e-6) * terms + 1e-6
    return float(((got.double() - want).abs() / allowed).max())


def _norm(k, dtype, device, s):
    x, residual = (
        torch.randn(s.tokens, s.hidden, device=device, dtype=dtype),
        torch.randn(s.tokens, s.hidden, device=device),
    )
    weight = torch.randn(s.hidden, device=device)

    def check():
        rows = residual[: s.checked].clone()
        got = k.add_rms_norm(x[: s.checked], rows, weight, 1e-5, out_dtype=dtype)
        exact = rows.double()
        return _error(got, weight.double() * exact / (exact.square().mean(-1, keepdim=True) + 1e-5).sqrt())

    moved = x.nbytes * 2 + residual.nbytes * 2
    yield Case("add_rms_norm", f"{s.tokens} × {s.hidden}", lambda: k.add_rms_norm(x, residual, weight, 1e-5, out_dtype=dtype),
               moved, 0, check)  # fmt: skip


def _rotary(k, dtype, device, s):
    q_heads, kv_heads, dim = s.heads
    qk = torch.randn(s.tokens, q_heads + kv_heads, dim, device=device, dtype=dtype)
    angles = torch.rand(4096, dim // 2, device=device) * 6.28
    cos_sin = torch.cat([angles.cos(), angles.sin()], 1)
    positions = torch.randint(0, 4096, (s.tokens,), device=device)

    def check():
        got, want = qk[: s.checked].clone(), qk[: s.checked].double()
        scale = want.norm(dim=-1, keepdim=True).expand_as(want)
        for kernels, heads in ((k, got), (reference, want)):
            kernels.rotary(*heads.split((q_heads, kv_heads), 1), positions[: s.checked], cos_sin)
        return _error(got, want, scale * 2e-7 / ROUNDING[dtype])

    run = lambda: k.rotary(*qk.split((q_heads, kv_heads), 1), positions, cos_sin)  # noqa: E731
    yield Case("rotary", f"{s.tokens} × {q_heads}+{kv_heads} × {dim}", run, 2 * qk.nbytes, 0, check)


def _silu(k, dtype, device, s):
    gate_up = torch.randn(s.tokens, 2 * s.hidden, device=device, dtype=dtype)

    def check():
        gate, up = gate_up[: s.checked].double().chunk(2, -1)
        return _error(k.silu_mul(gate_up[: s.checked]), torch.nn.functional.silu(gate) * up)

    yield Case("silu_mul", f"{s.tokens} × {s.hidden}", lambda: k.silu_mul(gate_up), gate_up.nbytes * 3 // 2, 0, check)


def _pool(dtype, device, heads, num_blocks, block_size=16):
    layout = PageLayout(block_size, heads[1], heads[2], dtype)
    pages = torch.empty(num_blocks, layout.page_bytes, dtype=torch.uint8, device=device)
    pages.view(dtype).normal_()
    return layout, pages


def _write(k, dtype, device, s):
    layout, pages = _pool(dtype, device, s.heads, s.tokens // 4 + 1)
    kv = torch.randn(2, s.tokens, *s.heads[1:], device=device, dtype=dtype)
    slots = torch.randperm(len(pages) * layout.block_size, device=device)[: s.tokens]

    def check():
        got, want = pages.clone(), pages.clone()
        k.write_kv(*kv, got, layout, slots)
        reference.write_kv(*kv, want, layout, slots)
        return 0.0 if torch.equal(got, want) else float("inf")

    yield Case("write_kv", f"{s.tokens} tokens", lambda: k.write_kv(*kv, pages, layout, slots), 2 * kv.nbytes, 0, check)


def _copy(k, dtype, device, s):
    _, pages = _pool(dtype, device, s.heads, s.tokens // 8 + 8)
    pairs = torch.randperm(len(pages), device=device)[: len(pages) // 2 * 2].view(-1, 2).contiguous()

    def check():
        got, want = pages.clone(), pages.clone()
        k.copy_pages([got], pairs[:50])
        reference.copy_pages([want], pairs[:50])
        return 0.0 if torch.equal(got, want) else float("inf")

    moved = 2 * len(pairs) * pages.shape[1]
    yield Case("copy_pages", f"{len(pairs)} pages", lambda: k.copy_pages([pages], pairs), moved, 0, check)


def _problem(dtype, device, heads, lens, q_lens):
    """Arguments of `paged_attention` for sequences in scattered blocks."""
    used = [-(-n // 16) for n in lens]
    layout, pages = _pool(dtype, device, heads, sum(used) + 1)
    ids = torch.randperm(sum(used), dtype=torch.int32) + 1
    table = torch.zeros(len(lens), max(used), dtype=torch.int32)
    for row, blocks in enumerate(ids.split(used)):
        table[row, : len(blocks)] = blocks
    q = torch.randn(sum(q_lens), heads[0], heads[2], device=device, dtype=dtype)
    starts = torch.tensor([0, *torch.tensor(q_lens).cumsum(0).tolist()], dtype=torch.int32)
    where = (table.to(device), starts.to(device), torch.tensor(lens, dtype=torch.int32, device=device))
    return (q, pages, layout, *where), {"scale": heads[2] ** -0.5}


def _check_attention(k, dtype, device, s, q_lens):
    lens = [max(n, length) for n, length in zip(q_lens, (s.checked, s.checked // 2, 17, s.checked - 3), strict=True)]
    worst = 0.0
    for options in ({}, {"window": s.checked // 3}, {"softcap": 20.0}):
        arguments, scale = _problem(dtype, device, s.heads, lens, q_lens)
        got = k.paged_attention(*arguments, **scale, **options)
        want = reference.paged_attention(*arguments, **scale, **options).double()
        bound = torch.full_like(want, 4.0)  # weights add up to 1, and |v| of a normal variable is rarely above 4
        worst = max(worst, _error(got, want, bound))
    return worst


def _decode(k, dtype, device, s):
    for rows, context in s.decode:
        arguments, scale = _problem(dtype, device, s.heads, [context] * rows, [1] * rows)
        moved = rows * context * 2 * s.heads[1] * s.heads[2] * dtype.itemsize
        yield Case("attention, decode", f"{rows} × {context}", lambda a=arguments, o=scale: k.paged_attention(*a, **o),
                   moved, 0, lambda: _check_attention(k, dtype, device, s, [1, 1, 1, 1]))  # fmt: skip


def _prefill(k, dtype, device, s):
    prompts, tokens = s.prefill
    arguments, scale = _problem(dtype, device, s.heads, [tokens] * prompts, [tokens] * prompts)
    flops = 4 * prompts * tokens * (tokens + 1) // 2 * s.heads[0] * s.heads[2]
    yield Case("attention, prefill", f"{prompts} × {tokens}", lambda: k.paged_attention(*arguments, **scale), 0, flops,
               lambda: _check_attention(k, dtype, device, s, [s.checked // 2, 1, 5, s.checked - 3]))  # fmt: skip


def _linears(name, pack, k, dtype, device, s, bytes_of_weight):
    weight = torch.randn(2 * s.hidden, s.hidden, device=device, dtype=dtype)
    packed = pack(weight, None, dtype)
    scale = getattr(packed, "scale", torch.ones(len(weight), device=device))
    exact = packed.weight.double() * scale.double()[:, None]
    for tokens in sorted({1, min(32, s.tokens), min(4096, s.tokens)}):
        x = torch.randn(tokens, s.hidden, device=device, dtype=dtype)

        def check(x=x):
            few = x[:64]
            want, terms = few.double() @ exact.T, few.double().abs() @ exact.abs().T
            return max(_error(k.linear(few, packed, out_dtype=out), want, terms) for out in (None, torch.float32))

        yield Case(name, f"{tokens} × {s.hidden} → {2 * s.hidden}", lambda x=x: k.linear(x, packed),
                   bytes_of_weight(weight) + x.nbytes * 3, 2 * tokens * weight.numel(), check)  # fmt: skip


def _dense(k, dtype, device, s):
    yield from _linears("linear (cuBLAS)", k.pack_linear, k, dtype, device, s, lambda w: w.nbytes)


def _int8(k, dtype, device, s):
    pack = partial(k.pack_linear, quantization="int8")
    yield from _linears("linear, int8", pack, k, dtype, device, s, torch.Tensor.numel)


def _sampling(k, dtype, device, s):
    rows = min(256, s.tokens)
    logits = torch.randn(rows, s.vocab, device=device) * 3
    fill = lambda value: torch.full((rows,), value, device=device)  # noqa: E731
    uniform = torch.rand(rows, dtype=torch.float64, device=device)
    off, least = torch.zeros(rows, dtype=torch.int32, device=device), fill(0.0)
    settings = {
        "greedy": (fill(0.0), off, fill(1.0), least),
        "temperature": (fill(0.8), off, fill(1.0), least),
        "top_k 50": (fill(0.8), off + 50, fill(1.0), least),
        "top_k 50, top_p 0.9": (fill(0.8), off + 50, fill(0.9), least),
        "top_p 0.9": (fill(0.8), off, fill(0.9), least),
    }
    for name, arguments in settings.items():

        def check(a=arguments):
            few = [t[:16] for t in (logits, *a, uniform)]
            return 0.0 if torch.equal(k.sample(*few), reference.sample(*few)) else float("inf")

        yield Case("sample", f"{rows} × {s.vocab}, {name}", lambda a=arguments: k.sample(logits, *a, uniform),
                   logits.nbytes, 0, check)  # fmt: skip
