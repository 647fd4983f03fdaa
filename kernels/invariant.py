"""Operations whose result for a row depends on that row alone, bit for bit: not on the other rows of the call, on how many
there are, or on how a prompt was cut into steps.

| implementation | what its own operations do | here |
|---|---|---|
| "cpu" | rows never meet: tiles add in the order of k alone, attention cuts keys at the same places for every row | the same |
| "reference" | BLAS and torch's vector loops choose their order of additions by shape | one row, one token, at a time |
| "triton" | cuBLAS chooses its kernel by shape | refused |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from .layout import PageLayout
from .ops import Ops


def batch_invariant(ops: Ops) -> Ops:
    """The same implementation, with whatever depends on the batch replaced. ValueError where that is not possible."""
    if ops.name == "cpu":
        return replace(ops, batch_invariant=True)
    if ops.name != "reference":
        raise ValueError(
            f"batch_invariant=True: kernels={ops.name!r} multiply through cuBLAS, which adds in another order for another "
            f"number of tokens; use device='cpu'"
        )
    return replace(
        ops,
        batch_invariant=True,
        linear=row_by_row(ops.linear),
        linear_add=_add_row_by_row(ops.linear_add),
        linear_silu_mul=row_by_row(ops.linear_silu_mul),
        rms_norm=row_by_row(ops.rms_norm),
        silu_mul=row_by_row(ops.silu_mul),
        paged_attention=_token_by_token(ops.paged_attention),
    )


def row_by_row(operation: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`operation(x, …)` on x [T, …], one row a call."""

    def apply(x: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        if len(x) <= 1:
            return operation(x, *rest, **options)
        return torch.cat([operation(row, *rest, **options) for row in x.split(1)])

    return apply


def _add_row_by_row(linear_add: Callable[..., None]) -> Callable[..., None]:
    def apply(x: torch.Tensor, packed: Any, residual: torch.Tensor) -> None:
        for row, stream in zip(x.split(1), residual.split(1), strict=True):
            linear_add(row, packed, stream)

    return apply


def _token_by_token(attention: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Every token becomes a row of its own, with the keys up to itself."""

    def apply(
        q: torch.Tensor,
        pages: torch.Tensor,
        layout: PageLayout,
        block_table: torch.Tensor,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        **options: Any,
    ) -> torch.Tensor:
        query_lens = query_start_loc.diff()  # [R]
        row = torch.repeat_interleave(torch.arange(len(query_lens), device=q.device), query_lens)  # [T]
        tokens = torch.arange(len(q), device=q.device)
        lengths = seq_lens[row] - query_start_loc[1:][row] + tokens + 1
        starts = torch.arange(len(q) + 1, device=q.device)
        return attention(q, pages, layout, block_table[row], starts.int(), lengths.int(), **options)

    return apply
