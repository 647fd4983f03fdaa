"""Log-probabilities of tokens that were chosen or given, and of the best alternatives.

| what | of which logits |
|---|---|
| logprobs, logprobs_mode "raw_logprobs" | the model's: before masks, penalties, temperature and filters |
| logprobs, logprobs_mode "processed_logprobs" | what the token was drawn from: after all of them; −inf where filtered |
| prompt_logprobs | the model's, in either mode |

Each is a log-softmax over the vocabulary. Rows that did not ask cost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from kvscope.kernels.reference import kept_tokens

from .params import SamplingParams

if TYPE_CHECKING:
    from .sampler import SampleRow

ROWS_AT_ONCE = 64  # of a prompt: what a softmax over the vocabulary takes stays small beside the logits


class TopLogprobs:
    """Takes what it needs from logits at once, float32 [any, vocab], `where[i]` those of `rows[i]`; they may be
    overwritten afterwards. With `chosen`, one token id a row, they are of what temperature and filters leave. The chosen
    token is always among it: a kernel may round the last bit of an edge to its other side."""

    def __init__(
        self, logits: torch.Tensor, rows: Sequence[SampleRow], where: Sequence[int], chosen: Sequence[int] | None = None
    ):
        self._num_rows = len(rows)
        self._asked = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
        if not self._asked:
            return
        self._counts = [rows[i].params.logprobs or 0 for i in self._asked]
        own = logits[torch.tensor([where[i] for i in self._asked], device=logits.device)]
        if chosen is not None:
            for values, i in zip(own, self._asked, strict=True):
                _filter(values, rows[i].params, chosen[i])
        self._logprobs = torch.log_softmax(own, dim=-1)  # [asked, vocab]

    def of(self, token_ids: Sequence[int]) -> list[dict[int, float] | None]:
        """One {token id: log-probability} a row that asked: its top N best first, then the chosen token if it is not
        among them; None for the others."""
        result: list[dict[int, float] | None] = [None] * self._num_rows
        if self._asked:
            best = best_and_own(self._logprobs, [max(token_ids[i], 0) for i in self._asked], self._counts)
            for i, top in zip(self._asked, best, strict=True):
                result[i] = top
        return result


def best_and_own(logprobs: torch.Tensor, token_ids: Sequence[int], counts: Sequence[int]) -> list[dict[int, float]]:
    """Of each row of `logprobs` float32 [A, vocab], A > 0: its `counts` best ids, best first, then its own id if it is
    not among them."""
    counts = [min(count, logprobs.shape[1]) for count in counts]
    best, ids = logprobs.topk(max(counts), dim=-1)  # [A, most]
    own = logprobs.gather(1, torch.tensor(token_ids, device=logprobs.device)[:, None])[:, 0]  # [A]
    result = []
    for values, top, token_id, logprob, count in zip(
        best.tolist(), ids.tolist(), token_ids, own.tolist(), counts, strict=True
    ):
        row = dict(zip(top[:count], values[:count], strict=True))
        row.setdefault(token_id, logprob)
        result.append(row)
    return result


def of_prompt(logits: torch.Tensor, token_ids: Sequence[int], count: int) -> list[dict[int, float]]:
    """Log-probabilities of `token_ids` and of the `count` best, row by row of `logits` float32 [len(token_ids), vocab]."""
    result: list[dict[int, float]] = []
    for start in range(0, len(token_ids), ROWS_AT_ONCE):
        logprobs = torch.log_softmax(logits[start : start + ROWS_AT_ONCE], dim=-1)
        ids = token_ids[start : start + ROWS_AT_ONCE]
        result += best_and_own(logprobs, ids, [count] * len(ids))
    return result


def _filter(logits: torch.Tensor, params: SamplingParams, chosen: int) -> None:
    """Temperature and filters for one row, float32 [vocab], in place. One that could not be sampled stays as it is."""
    if params.greedy or chosen < 0:
        return
    kept, _ = kept_tokens(logits, params.temperature, params.top_k, params.top_p, params.min_p)
    kept = torch.cat([kept, kept.new_tensor([chosen])])
    values = logits[kept] / params.temperature
    logits[:] = -torch.inf
    logits[kept] = values
