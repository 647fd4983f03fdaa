"""What `kvscope bench kernels` runs: every operation on operands of a model's shape, as its steps give them.

A layer's operands are out of the caches when its turn comes again, and so they are here: each call takes those of the next layer.
A case says how many bytes and FLOPs the operation cannot do without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import cycle

import torch
import torch.nn.functional as F
from kvscope.kernels import reference
from kvscope.kernels.layout import PageLayout
from kvscope.kernels.ops import Ops

from ..models.base import ModelSpec
from ..models.hub import resolve

BLOCK = 16  # tokens a page
Runs = dict[str, Callable[[], object]]


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    shape: str
    num_bytes: int
    num_flops: int
    runs: Runs  # "reference", "cpu" and perhaps "torch": one call each


@dataclass(frozen=True, slots=True)
class Shapes:
    """`decode` rows with `context` tokens each; `prefill` tokens of one prompt."""

    spec: ModelSpec
    intermediate: int
    decode: int
    context: int
    prefill: int

    @classmethod
    def of(cls, spec: ModelSpec, model: str, tokens: tuple[int, int, int]) -> Shapes:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(resolve(model).folder).get_text_config()
        return cls(spec, getattr(config, "intermediate_size", None) or 4 * spec.hidden_size, *tokens)


def cases(kernels: dict[str, Ops], shapes: Shapes) -> Iterator[Case]:
    """One after the other, so that only one holds its memory."""
    torch.manual_seed(0)
    for make in (_norms, _rotary, _silu, _pages, attention_cases, _linears, _epilogues, _sampling):
        yield from make(kernels, shapes)


def in_turn(call: Callable, operands: Iterable) -> Callable[[], object]:
    """Each call takes the operands of the next layer."""
    turn = cycle(operands)
    return lambda: call(next(turn))


def _each_layer(kernels: dict[str, Ops], operands: list, call: Callable) -> Runs:
    """call(implementation, operands of the next layer) for each implementation."""
    return {name: in_turn(partial(call, k), operands) for name, k in kernels.items()}


def _norms(kernels, s):
    spec, weight = s.spec, torch.randn(s.spec.hidden_size)
    like = weight.to(spec.dtype)
    for tokens in (s.decode, s.prefill):
        x = [torch.randn(tokens, spec.hidden_size).to(spec.dtype) for _ in range(spec.num_layers)]
        both = [(each, torch.randn(tokens, spec.hidden_size)) for each in x]
        size, shape = x[0].numel(), f"{tokens} × {spec.hidden_size}"
        runs = _each_layer(kernels, x, lambda k, x: k.rms_norm(x, weight, 1e-5, out_dtype=spec.dtype))
        runs["torch"] = in_turn(lambda x: F.rms_norm(x, like.shape, like, 1e-5), x)
        yield Case("rms_norm", shape, 2 * x[0].nbytes, 0, runs)
        runs = _each_layer(kernels, both, lambda k, xr: k.add_rms_norm(*xr, weight, 1e-5, out_dtype=spec.dtype))
        yield Case("add_rms_norm", shape, 2 * x[0].nbytes + 8 * size, 0, runs)


def _rotary(kernels, s):
    spec = s.spec
    angles = torch.rand(s.context, spec.head_dim // 2) * 6.28
    cos_sin = torch.cat([angles.cos(), angles.sin()], 1)
    for tokens in (s.decode, s.prefill):
        heads = (spec.num_heads, spec.num_kv_heads)
        qk = [torch.randn(tokens, sum(heads), spec.head_dim).to(spec.dtype) for _ in range(spec.num_layers)]
        positions = torch.randint(0, s.context, (tokens,))
        runs = _each_layer(kernels, qk, lambda k, x, h=heads, p=positions: k.rotary(*x.split(h, 1), p, cos_sin))
        yield Case("rotary", f"{tokens} × {heads[0]}+{heads[1]} × {spec.head_dim}", 2 * qk[0].nbytes, 0, runs)


def _silu(kernels, s):
    for tokens in (s.decode, s.prefill):
        gate_up = [torch.randn(tokens, 2 * s.intermediate).to(s.spec.dtype) for _ in range(s.spec.num_layers)]
        runs = _each_layer(kernels, gate_up, lambda k, x: k.silu_mul(x))
        runs["torch"] = in_turn(_plain_silu_mul, gate_up)
        yield Case("silu_mul", f"{tokens} × {s.intermediate}", gate_up[0].nbytes * 3 // 2, 0, runs)


def _plain_silu_mul(gate_up):
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def _pool(kernels, s, blocks: int) -> tuple[PageLayout, list[torch.Tensor]]:
    """Pages of every layer, in the layout that the CPU kernels want."""
    layout = kernels["cpu"].page_layout(BLOCK, s.spec.num_kv_heads, s.spec.head_dim, s.spec.dtype)
    layers = [torch.empty(blocks, layout.page_bytes, dtype=torch.uint8) for _ in range(s.spec.num_layers)]
    for pages in layers:
        pages.view(s.spec.dtype).normal_()
    return layout, layers


def _pages(kernels, s):
    spec, blocks = s.spec, -(-s.context // BLOCK)
    in_pool = 8 * max(blocks, -(-max(s.decode, s.prefill) // BLOCK))
    layout, layers = _pool(kernels, s, in_pool)
    token = 2 * spec.num_kv_heads * spec.head_dim * spec.dtype.itemsize
    for tokens in (s.decode, s.prefill):
        kv = torch.randn(2, tokens, spec.num_kv_heads, spec.head_dim).to(spec.dtype)
        slots = torch.randperm(in_pool * BLOCK)[:tokens]
        runs = _each_layer(kernels, layers, lambda k, pages, kv=kv, at=slots: k.write_kv(*kv, pages, layout, at))
        yield Case("write_kv", f"{tokens} tokens", 2 * tokens * token, 0, runs)
    ids = torch.randperm(in_pool)[:blocks]
    runs = _each_layer(kernels, layers, lambda k, pages: k.gather_kv(pages, layout, ids))
    yield Case("gather_kv", f"{blocks} pages", 2 * blocks * layout.page_bytes, 0, runs)
    pairs = torch.randperm(in_pool)[: 2 * min(8, blocks)].view(-1, 2).contiguous()
    runs = _each_layer(kernels, [layers], lambda k, all_layers: k.copy_pages(all_layers, pairs))
    moved = 2 * len(pairs) * layout.page_bytes * len(layers)
    yield Case("copy_pages", f"{len(pairs)} × {len(layers)} layers", moved, 0, runs)


def attention_cases(kernels: dict[str, Ops], s: Shapes) -> Iterator[Case]:
    """Decode: one query a row over scattered pages. Prefill: all queries of one prompt."""
    spec = s.spec
    scale = spec.head_dim**-0.5
    for rows, length, q_len in ((1, s.context, 1), (s.decode, s.context, 1), (1, s.prefill, s.prefill)):
        blocks = -(-length // BLOCK)
        layout, layers = _pool(kernels, s, 1 + rows * blocks)
        table = (1 + torch.randperm(rows * blocks)).to(torch.int32).view(rows, blocks)
        starts = torch.arange(0, rows * q_len + 1, q_len, dtype=torch.int32)
        where = (table, starts, torch.full((rows,), length, dtype=torch.int32))
        q = torch.randn(rows * q_len, spec.num_heads, spec.head_dim).to(spec.dtype)
        runs = _each_layer(
            kernels,
            layers,
            lambda k, pages, q=q, where=where, of=layout: k.paged_attention(q, pages, of, *where, scale=scale),
        )
        runs["torch"] = in_turn(partial(_gather_and_attend, s, q, table.long(), length), layers)
        pairs = rows * (length if q_len == 1 else q_len * (q_len + 1) // 2)
        kv = rows * length * 2 * spec.num_kv_heads * spec.head_dim * spec.dtype.itemsize
        kind = "decode" if q_len == 1 else "prefill"
        yield Case(f"paged_attention, {kind}", f"{rows} × {length}", kv + 2 * q.nbytes,
                   4 * pairs * spec.num_heads * spec.head_dim, runs)  # fmt: skip


def _gather_and_attend(s, q: torch.Tensor, table: torch.Tensor, length: int, pages: torch.Tensor) -> torch.Tensor:
    """What torch offers: pages in their plain order are gathered into [rows, heads, length, d], then SDPA."""
    plain = PageLayout(BLOCK, s.spec.num_kv_heads, s.spec.head_dim, s.spec.dtype)
    heads = q.view(len(table), -1, *q.shape[1:]).transpose(1, 2)  # [rows, Hq, queries, d]
    kv = [part[table].flatten(1, 2)[:, :length].transpose(1, 2) for part in reference.page_views(pages, plain)]
    return F.scaled_dot_product_attention(heads, *kv, is_causal=heads.shape[2] > 1, enable_gqa=True)


def _linears(kernels, s):
    spec = s.spec
    qkv = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    layer = {
        "qkv": (qkv, spec.hidden_size), "gate and up": (2 * s.intermediate, spec.hidden_size),
        "down": (spec.hidden_size, s.intermediate),
    }  # fmt: skip
    for name, (n, k) in layer.items():
        yield from _linear(kernels, s, name, n, k, spec.num_layers, sorted({1, s.decode, s.prefill}))
    yield from _linear(kernels, s, "head", spec.vocab_size, spec.hidden_size, 1, sorted({1, s.decode}))


def _linear(kernels, s, name, n, k, layers, all_rows):
    dtype = s.spec.dtype
    weights = [(torch.randn(n, k) * k**-0.5).to(dtype) for _ in range(layers)]
    packed = {which: [each.pack_linear(w, None, dtype) for w in weights] for which, each in kernels.items()}
    for rows in all_rows:
        x = torch.randn(rows, k).to(dtype)
        runs = {which: in_turn(partial(each.linear, x), packed[which]) for which, each in kernels.items()}
        runs["torch"] = in_turn(partial(F.linear, x), weights)
        moved = weights[0].nbytes + x.nbytes + rows * n * dtype.itemsize
        yield Case(f"linear, {name}", f"{rows} × {k} → {n}", moved, 2 * rows * n * k, runs)


def _epilogues(kernels, s):
    """The two products of a layer that end otherwise than as a product."""
    dtype, hidden, inner, layers = s.spec.dtype, s.spec.hidden_size, s.intermediate, range(s.spec.num_layers)
    down = [torch.randn(hidden, inner).to(dtype) for _ in layers]
    both = [torch.randn(2 * inner, hidden).to(dtype) for _ in layers]
    packed = {which: [k.pack_linear(w, None, dtype) for w in down] for which, k in kernels.items()}
    gated = {which: [k.pack_linear(w, None, dtype, gated=True) for w in both] for which, k in kernels.items()}
    for rows in sorted({1, s.decode, s.prefill}):
        x, residual = torch.randn(rows, inner).to(dtype), torch.zeros(rows, hidden)
        runs = {which: in_turn(partial(_add, k.linear_add, x, residual), packed[which]) for which, k in kernels.items()}
        runs["torch"] = in_turn(lambda w, x=x, to=residual: to.add_(F.linear(x, w)), down)
        moved = down[0].nbytes + x.nbytes + 2 * residual.nbytes
        yield Case("linear_add, down", f"{rows} × {inner} → {hidden}", moved, 2 * rows * inner * hidden, runs)
        x = torch.randn(rows, hidden).to(dtype)
        runs = {which: in_turn(partial(k.linear_silu_mul, x), gated[which]) for which, k in kernels.items()}
        runs["torch"] = in_turn(lambda w, x=x: _plain_silu_mul(F.linear(x, w)), both)
        moved = both[0].nbytes + x.nbytes + rows * inner * dtype.itemsize
        yield Case(
            "linear_silu_mul, gate and up", f"{rows} × {hidden} → {inner}", moved, 4 * rows * inner * hidden, runs
        )


def _add(linear_add, x, residual, packed):
    linear_add(x, packed, residual)


def _sampling(kernels, s):
    rows, vocab = s.decode, s.spec.vocab_size
    logits = torch.randn(rows, vocab) * 3
    every, uniform = torch.ones(rows), torch.rand(rows, dtype=torch.float64)
    off = torch.zeros(rows, dtype=torch.int32)
    runs = _each_layer(kernels, [logits], lambda k, x: k.greedy(x)) | {"torch": lambda: logits.argmax(-1)}
    yield Case("greedy", f"{rows} × {vocab}", logits.nbytes, 0, runs)
    settings = {
        "temperature": (off, every),
        "top_k 50, top_p 0.9": (off + 50, 0.9 * every),
        "top_p 0.9": (off, 0.9 * every),
    }
    for name, filters in settings.items():
        arguments = (0.8 * every, *filters, 0 * every, uniform)
        runs = _each_layer(kernels, [logits], lambda k, x, a=arguments: k.sample(x, *a))
        if name == "temperature":
            runs["torch"] = lambda: torch.multinomial((logits / 0.8).softmax(-1), 1)
        yield Case(f"sample, {name}", f"{rows} × {vocab}", logits.nbytes, 0, runs)
