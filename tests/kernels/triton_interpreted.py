"""The Triton kernels against the reference, in Triton's interpreter: `test_triton` runs this file in a process of its own.

The interpreter must be chosen before Triton is imported, and it cuts bfloat16 off where a GPU rounds, so that what is
allowed for it here is twice what the other kernels may be off by.
"""

import importlib.util
import math
import sys
from pathlib import Path

import pytest
import torch
from kvscope.kernels import ops, reference
from kvscope.kernels import triton as kernels
from kvscope.kernels.layout import PageLayout
from kvscope.kernels.triton import attention, launch, teaching
from problems import ROUNDING, Paged

assert launch.INTERPRETED, "this file is run by test_triton.py, with TRITON_INTERPRET=1"
torch.set_num_threads(1)
full = pytest.mark.full
DTYPES = [torch.float32, torch.bfloat16]
NAN, INF = float("nan"), float("inf")


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def near(got, want, sums=2e-6):
    """Within one rounding to the type of `got` (two for 16 bits) and `sums` of float32 arithmetic."""
    off = (got.double() - want).abs()
    rounding = ROUNDING.get(got.dtype, 2.0**-11) * (1 if got.dtype == torch.float32 else 2.02)
    assert (off <= (rounding + sums) * want.abs() + sums).all(), f"off by {off.max():.2e}"


def changed(module, old, new, tmp_path):
    """The module with one piece of its source replaced."""
    source = Path(module.__file__).read_text()
    assert old in source, f"{module.__name__} has no {old!r}"
    file = tmp_path / f"wrong_{abs(hash((old, new)))}.py"
    file.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location(f"{kernels.__name__}.{file.stem}", file)
    wrong = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = wrong
    spec.loader.exec_module(wrong)
    return wrong


# ------------------------------------------------------------------------------------------------ paged attention


def problem(lens, q_lens, heads=(9, 3, 64), dtype=torch.float32, size=16, **options):
    return Paged(lens, q_lens, *heads, PageLayout(size, heads[1], heads[2], dtype), options)


def check(p, run=kernels.paged_attention, **options):
    """As `Paged.check`, twice as wide for bfloat16. Everything else of the pages is poison, which must not come through."""
    got = p.call(run, **options)
    want = p.call(reference.paged_attention).double()
    scale = p.call(reference.paged_attention, p.magnitudes).double()
    weights, rounding = (2e-6, 2.0**-23) if p.layout.dtype == torch.float32 else (2.0**-7, 2.0**-6)
    assert got.dtype == p.q.dtype and got.shape == p.q.shape
    off, allowed = (got.double() - want).abs(), weights * scale + rounding * want.abs()
    assert (off <= allowed).all(), f"off by {(off / allowed).max():.2f} of what is allowed"


MIXED = ([1, 15, 16, 17, 130, 70, 33, 40], [1, 1, 1, 1, 1, 70, 2, 0])  # decodes, a prompt, a piece of one, nothing
DECODES = ([130, 1, 64, 65], [1, 1, 1, 1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("lens", "q_lens"), [MIXED, DECODES], ids=["mixed", "decodes"])
def test_attention(lens, q_lens, dtype):
    check(problem(lens, q_lens, dtype=dtype))


@pytest.mark.parametrize("heads", [(4, 1, 24), (3, 3, 80), (17, 1, 16)], ids=str)
@pytest.mark.parametrize("size", [1, 3])
def test_attention_of_odd_shapes(heads, size):
    check(problem([50, 7, 20, 1], [1, 7, 5, 1], heads, size=size))


@pytest.mark.parametrize(
    "options", [{"window": 37}, {"window": 1}, {"softcap": 2.0}, {"window": 64, "softcap": 5.0, "scale": 0.4}], ids=str
)
def test_window_and_softcap(options):
    check(problem([130, 90, 40, 12], [1, 60, 2, 12], (4, 2, 32), **options))


@full
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(9, 3, 64), (14, 2, 80), (8, 2, 96), (20, 4, 128), (11, 1, 256)], ids=str)
@pytest.mark.parametrize("size", [1, 3, 16, 32])
@pytest.mark.parametrize("options", [{}, {"window": 37}, {"softcap": 2.0}], ids=str)
def test_attention_over_the_grid(options, size, heads, dtype):
    check(problem(*MIXED, heads, dtype, size, **options))
    check(problem(*DECODES, heads, dtype, size, **options))


@pytest.mark.parametrize(
    ("split", "most", "options"), [(32, 32, {}), (32, 3, {}), (32, 32, {"window": 70}), (64, 2, {"softcap": 3.0})]
)
@pytest.mark.parametrize("q_lens", [[1, 1, 1, 1], [1, 1, 3, 1]], ids=["decodes", "mixed"])
def test_long_rows_are_split_and_joined(q_lens, split, most, options, monkeypatch):
    monkeypatch.setattr(attention, "SPLIT", split)
    monkeypatch.setattr(attention, "MAX_SPLITS", most)
    check(problem([130, 128, 65, 1], q_lens, (4, 2, 32), **options))


def test_blocks_outside_the_window_may_be_gone():
    p = problem([130, 120], [1, 9], (4, 2, 16), window=20)
    p.block_table[:, :5] = 0
    check(p)
    want = p.call(kernels.paged_attention)
    p.pages[0].view(torch.float32).fill_(NAN)  # not even read
    assert torch.equal(p.call(kernels.paged_attention), want)


def test_a_row_does_not_depend_on_its_neighbours(monkeypatch):
    """Bit for bit: alone, among others, decodes beside a prompt, split or not."""
    monkeypatch.setattr(attention, "SPLIT", 64)
    p = problem([130, 40, 20, 65], [1, 40, 2, 1], (6, 2, 32))
    together = p.call(kernels.paged_attention)
    for row in range(4):
        begin, end = int(p.query_start_loc[row]), int(p.query_start_loc[row + 1])
        alone = kernels.paged_attention(
            p.q[begin:end], p.pages, p.layout, p.block_table[row : row + 1], torch.tensor([0, end - begin], dtype=torch.int32),
            p.seq_lens[row : row + 1], scale=p.options["scale"],
        )  # fmt: skip
        assert torch.equal(alone, together[begin:end])


@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_nan_is_not_hidden(where):
    p = problem([40, 40], [1, 1], (4, 2, 16))
    if where == "q":
        p.q = p.q.clone()
        p.q[0] = NAN
    else:
        k, v = reference.gather_kv(p.pages, p.layout, p.block_table[0, :1].long())
        (k if where == "k" else v)[3] = NAN
        reference.write_kv(k, v, p.pages, p.layout, int(p.block_table[0, 0]) * 16 + torch.arange(16))
    got = p.call(kernels.paged_attention)
    assert got[0].isnan().all() and got[1].isfinite().all()


@pytest.mark.parametrize("q_lens", [[1, 1], [1, 4], [4, 1]], ids=str)
@pytest.mark.parametrize(
    ("change", "rows"),
    [
        (lambda p: p.block_table.__setitem__((1, 1), 10_000), [1]),
        (lambda p: p.block_table.__setitem__((0, 0), -1), [0]),
        (lambda p: p.seq_lens.__setitem__(1, 4000), [1]),
        (lambda p: p.seq_lens.__setitem__(0, 0), [0]),
    ],
)
def test_what_would_read_outside_the_pool_is_nan_for_its_row_alone(change, rows, q_lens):
    p = problem([40, 40], q_lens, (4, 2, 16))
    change(p)
    got = p.call(kernels.paged_attention)
    for row in range(2):
        tokens = got[int(p.query_start_loc[row]) : int(p.query_start_loc[row + 1])]
        assert tokens.isnan().all() if row in rows else tokens.isfinite().all()


def test_tokens_of_no_row_and_empty_steps():
    p = problem([40, 30], [1, 2], (4, 2, 16))
    p.query_start_loc = torch.tensor([0, 1, 2], dtype=torch.int32)
    p.seq_lens = torch.tensor([40, 29], dtype=torch.int32)
    assert not p.call(kernels.paged_attention)[2:].any()
    p.query_start_loc = torch.tensor([0, 0, 2], dtype=torch.int32)  # as many tokens as rows, but two of one row
    p.q, p.seq_lens = p.q[:2], torch.tensor([40, 30], dtype=torch.int32)
    check(p)
    assert problem([40], [0]).call(kernels.paged_attention).shape == (0, 9, 64)


def test_another_page_order_is_refused():
    p = Paged([5], [1], 2, 1, 16, PageLayout(16, 1, 16, torch.bfloat16, "vnni"))
    with pytest.raises(ValueError, match="order='vnni'"):
        p.call(kernels.paged_attention)


WRONG_ATTENTION = [
    ("n[None, :] > at[:, None]", "n[None, :] > at[:, None] + 1"),
    ("n[None, :] <= at[:, None] - WINDOW", "n[None, :] < at[:, None] - WINDOW"),
    ("m % GROUP\n", "0 * m\n"),
    ("values * shrink[:, None]", "values"),
    ("begin += split * keys", "begin += split * keys + BLOCK_N"),
    ("(at_first + 1) // BLOCK_N * BLOCK_N", "(at_first + 1 + BLOCK_N) // BLOCK_N * BLOCK_N"),
    ("tl.sum(weight * total, 0)", "tl.sum(total, 0)"),
    ("n % BLOCK_SIZE * TOKEN_STRIDE", "n % BLOCK_SIZE * HEAD_DIM"),
]


@pytest.mark.parametrize(("old", "new"), WRONG_ATTENTION, ids=[old for old, _ in WRONG_ATTENTION])
def test_a_wrong_attention_kernel_fails(old, new, tmp_path):
    wrong = changed(attention, old, new, tmp_path)
    wrong.SPLIT = 64
    p = problem([130, 120], [1, 34], (4, 2, 32), window=90)
    with pytest.raises(AssertionError, match="off by"):
        check(p, wrong.paged_attention)


# ---------------------------------------------------------------------------------------------------------- pages


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
def test_written_pages_are_the_references(dtype):
    layout = PageLayout(3, 3, 24, dtype)
    qkv = random(5, 9, 24).to(dtype)
    slots = torch.tensor([4, -1, 0, 11, 7])
    got, want = (torch.zeros(4, layout.page_bytes + 64, dtype=torch.uint8) for _ in range(2))
    reference.write_kv(qkv[:, 3:6], qkv[:, 6:], want, layout, slots)
    slots[1] = 12  # outside the pool: left out, like −1
    kernels.write_kv(qkv[:, 3:6], qkv[:, 6:], got, layout, slots)
    assert torch.equal(got, want)


@pytest.mark.parametrize("num_bytes", [64, 100, 9000])
def test_pages_are_copied_in_order(num_bytes):
    pairs = torch.tensor([[0, 1], [1, 2], [3, 0], [2, 5]])  # a copy of a copy, and a source written after it was read
    slots = [torch.randint(0, 256, (6, num_bytes), dtype=torch.uint8) for _ in range(3)]
    want = [pages.clone() for pages in slots]
    reference.copy_pages(want, pairs)
    kernels.copy_pages(slots, torch.cat([pairs, torch.tensor([[0, 6], [-1, 2]])]))  # those outside are left out
    assert all(torch.equal(a, b) for a, b in zip(slots, want, strict=True))


# --------------------------------------------------------------------------------------------------- element-wise


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 576), (5, 1), (33, 17), (2, 2050)], ids=str)
def test_norms(shape, out_dtype):
    x = random(shape[0], 2 * shape[1]).to(out_dtype)[:, : shape[1]]  # rows with a stride
    weight, residual = random(shape[1], seed=1), random(*shape, seed=2)

    def want(x):
        return weight.double() * x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt()

    near(kernels.rms_norm(x, weight, 1e-5, out_dtype=out_dtype), want(x))
    total = residual + x.float()
    near(kernels.add_rms_norm(x, residual, weight, 1e-5, out_dtype=out_dtype), want(total))
    assert torch.equal(residual, total)


def test_rows_that_would_not_fit_in_registers_are_refused():
    with pytest.raises(ValueError, match="rows of 16385 elements; kernels='triton' norms at most 16384"):
        kernels.rms_norm(torch.zeros(1, 16_385), torch.ones(16_385), 1e-5, out_dtype=torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "dim", "turned"), [((9, 3), 64, 64), ((2, 1), 80, 32), ((1, 1), 6, 6)])
def test_rotary(heads, dim, turned, dtype):
    qkv = random(7, sum(heads), dim).to(dtype)
    want = qkv.double()
    angles = random(50, turned // 2, seed=1).double()
    cos_sin = torch.cat([angles.cos(), angles.sin()], 1).float()
    positions = torch.tensor([0, 49, 3, 3, 17, 20, 1])
    reference.rotary(*want.split(heads, 1), positions, cos_sin)
    kernels.rotary(*qkv.split(heads, 1), positions, cos_sin)
    near(qkv, want)
    qkv = random(2, sum(heads), dim).to(dtype)
    kernels.rotary(*qkv.split(heads, 1), torch.tensor([50, 2]), cos_sin)
    assert qkv[0, :, :turned].isnan().all() and qkv[1].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_silu_mul(dtype):
    gate_up = (random(3, 2 * 1300) * 20).to(dtype)
    gate, up = gate_up.double().chunk(2, -1)
    near(kernels.silu_mul(gate_up), torch.nn.functional.silu(gate) * up)


def test_a_wrong_elementwise_kernel_fails(tmp_path):
    from kvscope.kernels.triton import elementwise

    wrong = changed(elementwise, "b * cos + a * sin", "b * cos - a * sin", tmp_path)
    monkey = pytest.MonkeyPatch()
    with monkey.context() as patch, pytest.raises(AssertionError, match="off by"):
        patch.setattr(kernels, "rotary", wrong.rotary)
        test_rotary((9, 3), 64, 64, torch.float32)
    wrong = changed(elementwise, "mean + eps", "mean", tmp_path)
    with monkey.context() as patch, pytest.raises(AssertionError, match="off by"):
        patch.setattr(kernels, "rms_norm", wrong.rms_norm)
        test_norms((3, 576), torch.float32)


# --------------------------------------------------------------------------------------------------------- linear


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "n", "k", "bias"), [(1, 70, 100, True), (20, 33, 64, False), (130, 40, 130, True)])
def test_int8_linear(tokens, n, k, bias, dtype):
    weight, x = random(n, k, seed=1), random(tokens, 2 * k).to(dtype)[:, :k]
    weight[3] = 0
    packed = kernels.pack_linear(weight, random(n, seed=2) if bias else None, dtype, "int8")
    assert packed.num_bytes == n * k + 4 * n + (n * dtype.itemsize if bias else 0)
    rounded = packed.weight.double() * packed.scale.double()[:, None]
    assert ((rounded - weight).abs() <= packed.scale[:, None] * 0.5001).all()
    near(packed.rows(torch.tensor([3, 0])), rounded[[3, 0]])
    want = x.double() @ rounded.T + (0 if packed.bias is None else packed.bias.double())
    for out_dtype in (None, torch.float32):
        got = kernels.linear(x, packed, out_dtype=out_dtype)
        assert got.dtype == (out_dtype or dtype)
        near(got, want, 1e-5 * math.sqrt(k))


def test_dense_linear_is_torchs():
    packed = kernels.pack_linear(random(30, 20), random(30, seed=1), torch.float32)
    x = random(4, 20, seed=2)
    assert torch.equal(kernels.linear(x, packed), reference.linear(x, packed))
    packed, x = kernels.pack_linear(random(30, 20), random(30, seed=1), torch.bfloat16), x.bfloat16()
    assert kernels.linear(x, packed).dtype == torch.bfloat16
    want = x.double() @ packed.weight.double().T + packed.bias.double()
    near(kernels.linear(x, packed, out_dtype=torch.float32), want)  # sums are not rounded on their way


# ------------------------------------------------------------------------------------------------------- sampling

SETTINGS = [
    {}, {"top_k": 1}, {"top_k": 7, "top_p": 0.8}, {"top_p": 0.3, "temperature": 0.7}, {"min_p": 0.1},
    {"top_k": 250, "top_p": 0.7, "min_p": 0.01}, {"top_p": 0.999}, {"top_p": 0.0}, {"top_k": 100_000},
]  # fmt: skip


def draw(logits, uniform, module=kernels, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    n = len(logits)
    t, p, least = (torch.full((n,), float(value)) for value in (temperature, top_p, min_p))
    return module.sample(logits, t, torch.full((n,), top_k, dtype=torch.int32), p, least, uniform)


def rows_of(size):
    """Plain logits, with a masked stretch; full of ties; nothing but ties; zeros of both signs."""
    logits = random(4, size, seed=size) * 2
    logits[0, size // 3 : size // 2] = -INF
    logits[1] = (logits[1] * 4).round() / 4
    logits[2] = 0.5
    logits[3] = torch.where(torch.arange(size) % 2 == 0, 0.0, -0.0)
    return logits, torch.rand(4, generator=torch.Generator().manual_seed(size), dtype=torch.float64)


def compare(size, options, module=kernels):
    logits, uniform = rows_of(size)
    assert torch.equal(module.greedy(logits), reference.greedy(logits))
    for u in (uniform, torch.zeros(4, dtype=torch.float64), torch.full((4,), 1 - 2.0**-53, dtype=torch.float64)):
        assert torch.equal(draw(logits, u, module, **options), draw(logits, u, reference, **options))


@pytest.mark.parametrize("options", SETTINGS, ids=str)
@pytest.mark.parametrize("size", [1, 17, 300])
def test_the_same_token_as_the_reference(size, options):
    compare(size, options)


@full
@pytest.mark.parametrize("options", [*SETTINGS, {"temperature": 8.0, "top_p": 0.99}], ids=str)
@pytest.mark.parametrize("size", [64, 4096, 4097, 9000, 49_152])
def test_the_same_token_as_the_reference_over_blocks(size, options):
    compare(size, options)


def test_the_same_token_over_two_blocks():
    compare(5000, {"top_k": 40, "top_p": 0.9})


def test_rows_have_settings_of_their_own():
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(7, 300, generator=g)[:, :200]  # strided rows
    arguments = (
        torch.tensor([1.0, 0.0, 0.7, 1.0, 1e-38, 1.0, 1e-44]), torch.tensor([0, 5, 40, 100, 0, 0, 1], dtype=torch.int32),
        torch.tensor([1.0, 0.5, 0.9, 0.8, 0.7, 1.0, 1.0]), torch.tensor([0.0, 0.0, 0.05, 0.0, 0.0, 0.2, 0.0]),
        torch.rand(7, generator=g, dtype=torch.float64),
    )  # fmt: skip
    assert torch.equal(kernels.sample(logits, *arguments), reference.sample(logits, *arguments))


def test_rows_without_a_finite_maximum_are_marked():
    logits = torch.zeros(5, 200)
    logits[0, 150], logits[1], logits[2, 3], logits[3, 0] = NAN, -INF, INF, -INF
    assert kernels.greedy(logits).tolist() == [-1, -1, -1, 1, 0]
    for options in ({}, {"top_k": 3, "top_p": 0.5}, {"temperature": 0.0}):
        assert draw(logits, torch.zeros(5, dtype=torch.float64), **options).tolist() == [-1, -1, -1, 1, 0]


WRONG_SAMPLING = [
    ("ties = k - above.to(tl.int32)", "ties = k"),
    ("<= ties)", "< ties)"),
    ("bits ^ 0x7FFFFFFF", "bits"),
    ("> goal, ids", ">= goal, ids"),
    ("tl.where(logits == 0, 0.0, logits)", "logits"),
    ("goal = tl.maximum(tl.ceil(p * whole", "goal = tl.maximum(tl.ceil(0.97 * p * whole"),
]


@pytest.mark.parametrize(("old", "new"), WRONG_SAMPLING, ids=[old for old, _ in WRONG_SAMPLING])
def test_a_wrong_sampling_kernel_fails(old, new, tmp_path):
    from kvscope.kernels.triton import sampling

    wrong = changed(sampling, old, new, tmp_path)
    with pytest.raises(AssertionError):
        for options in ({"top_k": 60}, {"top_k": 150}, {"top_p": 0.95}):
            compare(200, options, wrong)


# ------------------------------------------------------------------------------------------------------- teaching


@pytest.mark.parametrize("causal", [False, True])
def test_both_flash_attentions_are_attention_and_count_what_they_move(causal):
    heads, length, dim, tile = 2, 100, 16, 32
    q, k, v = (random(heads, length, dim, seed=s) for s in range(3))
    scores = q.double() @ k.double().transpose(1, 2) * dim**-0.5
    if causal:
        scores.masked_fill_(torch.ones(length, length).triu(1).bool(), -INF)
    want = scores.softmax(-1) @ v.double()
    tiles, row = -(-length // tile), dim * 4
    moved = {}
    for name, run in (("1", teaching.flash_attention_1), ("2", teaching.flash_attention_2)):
        out, moved[name] = run(q, k, v, causal=causal, tile=tile)
        near(out, want, 4e-6)
    pairs = [(i, j) for j in range(tiles) for i in range(tiles) if not causal or i >= j]
    size = [min(tile, length - tile * i) for i in range(tiles)]
    # K/V outside: K and V once; for every pair Q is read, and O, sum and maximum are read and written.
    assert moved["1"] == heads * (2 * length * row + sum(size[i] * (row + 2 * (row + 8)) for i, _ in pairs))
    # Q outside: Q once and O once, with the log-sum-exp; for every pair K and V are read.
    assert moved["2"] == heads * (2 * length * row + 4 * length + sum(size[j] * 2 * row for _, j in pairs))


# ------------------------------------------------------------------------------------------------- in the table


def test_the_interpreter_serves_the_cpu_when_asked_by_name():
    assert ops.resolve("triton", "cpu", torch.bfloat16).name == "triton"
    assert ops.resolve("auto", "cpu", torch.float32).name == "cpu"
    assert ops.resolve("auto", "cpu", torch.float16).name == "reference"
    x = random(2, 8)
    with ops.using("triton"):
        near(ops.silu_mul(x), reference.silu_mul(x).double())
