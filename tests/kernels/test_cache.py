"""Writing, gathering and copying pages: byte for byte what the reference does, and bounds that hold."""

import pytest
import torch
from kvscope.kernels import ops
from kvscope.kernels.cpu import cache, compiler
from kvscope.kernels.layout import PageLayout

DTYPES = [torch.float32, torch.bfloat16]
reference = ops.resolve("reference")


def layouts():
    for dtype in DTYPES:
        for size, heads, dim in ((1, 3, 64), (3, 1, 48), (16, 2, 80), (32, 3, 128), (4, 2, 5)):
            yield PageLayout(size, heads, dim, dtype)
            if dtype == torch.bfloat16 and size % 16 == 0:
                yield PageLayout(size, heads, dim, dtype, "vnni")


@pytest.mark.parametrize(
    "layout", list(layouts()), ids=lambda p: f"{p.order}-{p.block_size}x{p.num_kv_heads}x{p.head_dim}-{p.dtype}"
)
@pytest.mark.parametrize("tokens", [1, 7, 200])
def test_write_then_gather(layout, tokens):
    g = torch.Generator().manual_seed(tokens)
    blocks = -(-2 * tokens // layout.block_size) + 1
    slots = torch.randperm(blocks * layout.block_size, generator=g)[:tokens]
    slots[tokens // 3] = -1
    qkv = torch.randn(tokens, 4 * layout.num_kv_heads, layout.head_dim, generator=g).to(layout.dtype)
    k, v = qkv[:, 2 * layout.num_kv_heads :].chunk(2, dim=1)  # strided views
    ours, theirs = (torch.full((blocks, layout.page_bytes + 64), 7, dtype=torch.uint8) for _ in range(2))
    cache.write_kv(k, v, ours, layout, slots)
    reference.write_kv(k, v, theirs, layout, slots)
    assert torch.equal(ours, theirs)
    k_back, v_back = reference.gather_kv(ours, layout, torch.arange(blocks))
    kept = slots >= 0
    assert torch.equal(k_back[slots[kept]], k[kept]) and torch.equal(v_back[slots[kept]], v[kept])


def test_heads_that_are_not_side_by_side():
    layout = PageLayout(4, 2, 8, torch.float32)
    k, v = torch.randn(2, 2, 5, 8).transpose(1, 2)  # [tokens, heads, dim] with the tokens innermost of the heads
    ours, theirs = torch.zeros(2, 3, layout.page_bytes, dtype=torch.uint8)
    cache.write_kv(k, v, ours, layout, torch.arange(5))
    reference.write_kv(k, v, theirs, layout, torch.arange(5))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("implementation", ["reference", "cpu"])
@pytest.mark.parametrize("bad", [12, 10**12])
def test_a_slot_outside_the_pool_is_refused(implementation, bad):
    layout = PageLayout(4, 2, 8, torch.float32)
    pages = torch.zeros(3, layout.page_bytes, dtype=torch.uint8)
    k = torch.ones(2, 2, 8)
    with pytest.raises(IndexError, match=f"block {bad // 4}; the pool has blocks 0 to 2"):
        ops.resolve(implementation).write_kv(k, k, pages, layout, torch.tensor([0, bad]))
    assert implementation == "reference" or not pages.any()


@pytest.mark.parametrize("implementation", ["reference", "cpu"])
def test_pages_are_copied_in_order_in_every_slot(implementation):
    k = ops.resolve(implementation)
    slots = [torch.arange(5 * 128, dtype=torch.int64).add(i).to(torch.uint8).reshape(5, 128) for i in range(3)]
    before = [pages.clone() for pages in slots]
    k.copy_pages(slots, torch.tensor([[1, 2], [2, 4], [0, 1]]))
    for pages, old in zip(slots, before, strict=True):
        assert torch.equal(pages, old[[0, 0, 1, 3, 1]])
    k.copy_pages(slots, torch.empty(0, 2, dtype=torch.long))
    k.copy_pages([], torch.tensor([[0, 1]]))
    for pair in ([0, 5], [-1, 0]):
        with pytest.raises(IndexError, match="the pool has blocks 0 to 4"):
            k.copy_pages(slots, torch.tensor([pair]))


def test_the_layout_of_this_machine():
    assert cache.page_layout(16, 3, 64, torch.float32).order == "nhd"
    for size, dim in ((3, 64), (1, 64), (16, 40)):
        assert cache.page_layout(size, 3, dim, torch.bfloat16).order == "nhd"
    assert cache.page_layout(32, 3, 64, torch.bfloat16).order == ("vnni" if compiler.CPU.avx512_bf16 else "nhd")
    with pytest.raises(ValueError, match="divisible by 16"):
        PageLayout(3, 3, 64, torch.bfloat16, "vnni")
