"""Random problems for the kernels: paged sequences whose unwritten memory is poisoned, and how far an answer may be off."""

from dataclasses import dataclass, field

import torch
from kvscope.kernels import reference
from kvscope.kernels.layout import PageLayout

ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}  # half a unit in the last place


@dataclass
class Paged:
    """Sequences in pages, in scattered blocks. Slots never written hold NaN, block 0 (the null block) zeros."""

    lens: list[int]
    q_lens: list[int]
    q_heads: int
    kv_heads: int
    dim: int
    layout: PageLayout
    options: dict = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self):
        g, dtype, size = torch.Generator().manual_seed(self.seed), self.layout.dtype, self.layout.block_size
        used = [-(-n // size) for n in self.lens]
        free = (torch.randperm(sum(used), generator=g) + 1).tolist()
        self.pages = torch.zeros(sum(used) + 1, self.layout.page_bytes + 64, dtype=torch.uint8)
        self.pages[1:].view(dtype).fill_(torch.nan)
        self.block_table = torch.zeros(len(self.lens), max(used) + 1, dtype=torch.int32)
        self.magnitudes = self.pages.clone()  # the same with |v|: the scale on which sums of v are rounded
        for row, n in enumerate(self.lens):
            ids = [free.pop() for _ in range(used[row])]
            self.block_table[row, : used[row]] = torch.tensor(ids)
            k, v = (torch.randn(n, self.kv_heads, self.dim, generator=g).to(dtype) for _ in range(2))
            slots = torch.tensor([ids[t // size] * size + t % size for t in range(n)])
            reference.write_kv(k, v, self.pages, self.layout, slots)
            reference.write_kv(k, v.abs(), self.magnitudes, self.layout, slots)
        qkv = torch.randn(sum(self.q_lens), self.q_heads + 2 * self.kv_heads, self.dim, generator=g).to(dtype)
        self.q = qkv[:, : self.q_heads]  # a strided view, as the model passes it
        self.query_start_loc = torch.tensor([0, *torch.tensor(self.q_lens).cumsum(0).tolist()], dtype=torch.int32)
        self.seq_lens = torch.tensor(self.lens, dtype=torch.int32)
        self.options = {"scale": self.dim**-0.5, **self.options}

    def call(self, attention, pages=None, **changed):
        arguments = {
            "block_table": self.block_table, "query_start_loc": self.query_start_loc, "seq_lens": self.seq_lens,
            **self.options, **changed,
        }  # fmt: skip
        return attention(self.q, self.pages if pages is None else pages, self.layout, **arguments)

    def check(self, got):
        """Fails unless every element is as near to the float64 answer as one rounding of each weight and sum allows."""
        want = self.call(reference.paged_attention).double()
        scale = self.call(reference.paged_attention, self.magnitudes).double()
        assert got.dtype == self.q.dtype and got.shape == self.q.shape
        weights = 2e-6 if self.layout.dtype == torch.float32 else 2.0**-8
        allowed = weights * scale + 2 * ROUNDING[self.layout.dtype] * want.abs()
        off = (got.double() - want).abs()
        assert (off <= allowed).all(), f"off by {(off / allowed).max():.2f} of what is allowed"
