"""Log-probabilities of the tokens that were chosen, and of the best alternatives.

They are log-softmax of the raw logits: before masks, temperature and filters, so that they say what the model thought
and not how it was asked to choose. Rows that did not ask cost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .sampler import SampleRow


class TopLogprobs:
    """Takes what it needs from `logits` float32 [S, vocab] at once; the logits may be overwritten afterwards."""

    def __init__(self, logits: torch.Tensor, rows: Sequence[SampleRow]):
        self._num_rows = len(rows)
        self._asked = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
        if not self._asked:
            return
        self._counts = [min(rows[i].params.logprobs or 0, logits.shape[1]) for i in self._asked]
        where = torch.tensor([rows[i].logits_row for i in self._asked], device=logits.device)
        self._logprobs = torch.log_softmax(logits[where], dim=-1)  # [asked, vocab]
        values, ids = self._logprobs.topk(max(self._counts), dim=-1)  # [asked, most], best first
        self._top = list(zip(ids.tolist(), values.tolist(), strict=True))

    def of(self, token_ids: Sequence[int]) -> list[dict[int, float] | None]:
        """One {token id: log-probability} a row that asked: its top N best first, then the chosen token if it is not
        among them; None for the others."""
        result: list[dict[int, float] | None] = [None] * self._num_rows
        if not self._asked:
            return result
        chosen = torch.tensor([max(token_ids[i], 0) for i in self._asked], device=self._logprobs.device)
        own = self._logprobs.gather(1, chosen[:, None])[:, 0].tolist()
        for i, count, (ids, values), logprob in zip(self._asked, self._counts, self._top, own, strict=True):
            top = dict(zip(ids[:count], values[:count], strict=True))
            top.setdefault(token_ids[i], logprob)
            result[i] = top
        return result
