"""Paged attention on the CPU against float64, over shapes; what it promises about batches and threads; what it refuses."""

from itertools import product

import pytest
import torch
from kvscope.kernels import reference
from kvscope.kernels.cpu import compiler
from kvscope.kernels.cpu.attention import paged_attention
from kvscope.kernels.layout import PageLayout
from problems import Paged

HEADS = [(9, 3, 64), (7, 7, 48), (14, 2, 80), (8, 2, 96), (20, 4, 128), (11, 1, 64)]  # query heads, KV heads, head size
FORMATS = [(torch.float32, "nhd"), (torch.bfloat16, "nhd")]
if compiler.CPU.avx512_bf16:
    FORMATS.append((torch.bfloat16, "vnni"))
PAGES = [(*f, size) for f in FORMATS for size in (1, 3, 16, 32) if f[1] == "nhd" or size % 16 == 0]


def problem(lens, q_lens, heads=(9, 3, 64), pages=(torch.float32, "nhd", 16), seed=0, **options):
    _, kv_heads, dim = heads
    dtype, order, size = pages
    return Paged(lens, q_lens, *heads, PageLayout(size, kv_heads, dim, dtype, order), options, seed)


@pytest.mark.parametrize(("pages", "heads"), [*product(PAGES, HEADS[:2]), *product(FORMATS, HEADS[2:])], ids=str)
def test_mixed_batch(pages, heads):
    pages = pages if len(pages) == 3 else (*pages, 16)
    size = pages[2]
    lens = [1, max(1, size - 1), size, size + 1, 1000, 70, 600, 33]
    q_lens = [1, 1, 1, 1, 1, 70, 45, 2]  # decode, a whole prompt, a chunk of one, and two tokens
    p = problem(lens, q_lens, heads, pages)
    p.check(p.call(paged_attention))


@pytest.mark.parametrize("pages", PAGES, ids=str)
@pytest.mark.parametrize(
    "options", [{"window": 37}, {"window": 1}, {"softcap": 2.0}, {"window": 600, "softcap": 5.0, "scale": 0.4}], ids=str
)
def test_window_and_softcap(pages, options):
    p = problem([1300, 90, 40], [1, 90, 2], pages=pages, **options)
    p.check(p.call(paged_attention))


@pytest.mark.parametrize("pages", PAGES, ids=str)
def test_blocks_outside_the_window_may_be_gone(pages):
    """Blocks that no query can see any more are replaced by the null block."""
    p = problem([700], [1], pages=pages, window=50)
    want = p.call(reference.paged_attention)
    p.block_table[0, : (700 - 50) // p.layout.block_size] = 0
    assert torch.equal(p.call(reference.paged_attention), want)
    p.check(p.call(paged_attention))


@pytest.mark.parametrize("pages", FORMATS, ids=str)
@pytest.mark.parametrize("length", [511, 512, 513, 1025, 2049])
def test_around_the_chunk(pages, length):
    p = problem([length, length], [1, 30], pages=(*pages, 16))
    p.check(p.call(paged_attention))


def test_float32_equals_a_float64_softmax_to_a_millionth():
    p = problem([1000, 300], [1, 300], seed=5)
    got, want = p.call(paged_attention).double(), p.call(reference.paged_attention).double()
    assert (got - want).norm() <= 3e-7 * want.norm()


@pytest.mark.parametrize("dim", [1, 24, 37])
def test_head_sizes_that_fill_no_vector(dim):
    p = problem([50, 20], [50, 1], (4, 2, dim), (torch.float32, "nhd", 4))
    p.check(p.call(paged_attention))


def test_a_wrong_kernel_fails_the_same_check():
    p = problem([100, 40], [1, 40], window=30, softcap=5.0)
    p.check(p.call(paged_attention))
    shifted = p.query_start_loc.clone()
    shifted[1] += 1
    other_block = p.block_table.clone()
    other_block[0, 5] = other_block[0, 4]
    for wrong in (
        {"window": 29}, {"window": 31}, {"window": 0}, {"softcap": 0.0}, {"softcap": 5.05}, {"scale": 0.126},
        {"seq_lens": p.seq_lens - torch.tensor([1, 0], dtype=torch.int32)}, {"query_start_loc": shifted}, {"block_table": other_block},
    ):  # fmt: skip
        with pytest.raises(AssertionError, match="off by"):
            p.check(p.call(paged_attention, **wrong))


@pytest.mark.parametrize("pages", FORMATS, ids=str)
def test_a_row_does_not_depend_on_its_neighbours_or_on_threads(pages):
    """Bit for bit: alone, among others, on one thread and on all, cut into chunks or not."""
    lens, q_lens = [1700, 40, 700, 1, 129] + [200] * 40, [1, 40, 2, 1, 129] + [1] * 40
    p = problem(lens, q_lens, pages=(*pages, 16))
    together = p.call(paged_attention)
    before = compiler.num_threads()
    try:
        compiler.set_num_threads(1)
        assert torch.equal(p.call(paged_attention), together)
    finally:
        compiler.set_num_threads(before)
    for row in range(5):
        begin, end = int(p.query_start_loc[row]), int(p.query_start_loc[row + 1])
        alone = paged_attention(
            p.q[begin:end], p.pages, p.layout, p.block_table[row : row + 1], torch.tensor([0, end - begin], dtype=torch.int32),
            p.seq_lens[row : row + 1], scale=p.options["scale"],
        )  # fmt: skip
        assert torch.equal(alone, together[begin:end])


@pytest.mark.parametrize("pages", FORMATS, ids=str)
@pytest.mark.parametrize("window", [0, 1, 37, 300, 700])
def test_a_token_does_not_depend_on_how_its_prompt_was_cut(pages, window):
    """Bit for bit: the whole prompt in one step, in chunks of any size, and token by token."""
    length = 1300
    p = problem([length], [length], pages=(*pages, 16), window=window)
    whole = p.call(paged_attention)
    for chunk in (1, 2, 7, 100, 513):
        for start in range(0 if chunk > 2 else 480, length, chunk if chunk > 2 else 37):
            end = min(start + chunk, length)
            piece = paged_attention(
                p.q[start:end], p.pages, p.layout, p.block_table, torch.tensor([0, end - start], dtype=torch.int32),
                torch.tensor([end], dtype=torch.int32), **p.options,
            )  # fmt: skip
            assert torch.equal(piece, whole[start:end])


@pytest.mark.parametrize("pages", FORMATS, ids=str)
@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_nan_is_not_hidden(pages, where):
    """The engine fails a request by the NaN in its logits: the row that has one must show it, and no other row may."""
    p = problem([40, 40], [1, 1], pages=(*pages, 16))
    if where == "q":
        p.q = p.q.clone()
        p.q[0] = torch.nan
    else:
        k, v = reference.gather_kv(p.pages, p.layout, p.block_table[0, :1].long())
        (k if where == "k" else v)[3] = torch.nan
        slots = int(p.block_table[0, 0]) * 16 + torch.arange(16)
        reference.write_kv(k, v, p.pages, p.layout, slots)
    got = p.call(paged_attention)
    assert got[0].isnan().all() and got[1].isfinite().all()


def test_empty_rows_and_steps():
    p = problem([40, 40, 40], [1, 0, 3])
    p.check(p.call(paged_attention))
    p = problem([40], [0])
    assert p.call(paged_attention).shape == (0, 9, 64)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda p: p.block_table.__setitem__((1, 1), 10_000), "row 1"),
        (lambda p: p.block_table.__setitem__((0, 0), -1), "row 0"),
        (lambda p: p.seq_lens.__setitem__(1, 4000), "row 1"),
        (lambda p: p.seq_lens.__setitem__(0, 0), "row 0"),
        (lambda p: p.query_start_loc.__setitem__(2, 90), "row 1"),
    ],
)
def test_what_would_read_outside_the_pool_is_refused(change, found):
    p = problem([40, 40], [1, 4])
    change(p)
    with pytest.raises(IndexError, match=found):
        p.call(paged_attention)


def test_pairs_need_whole_vectors():
    p = Paged([5], [1], 2, 1, 24, PageLayout(16, 1, 24, torch.bfloat16, "vnni"))
    with pytest.raises(ValueError, match="not 24"):
        p.call(paged_attention)
