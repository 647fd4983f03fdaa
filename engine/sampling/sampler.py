"""From logits to token ids, for every sample of one step.

In: logits float32 [S, vocab] and one `SampleRow` a sample; several rows may read the same logits (the n samples of a
prompt that has just been computed). Out: one token id a row, log-probabilities for the rows that asked, and the rows
whose logits were not finite. Knows no request, no schedule and no text; keeps no state between calls, so what a row
draws depends on that row alone: not on its neighbours, its place in the batch, or an earlier preemption.

The order of operations for a row is written in `processors`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from kvscope.kernels.ops import Ops

from .logprobs import TopLogprobs
from .params import SamplingParams
from .processors import process
from .random import request_seed, uniforms
from .structured import Matcher


@dataclass(slots=True)
class SampleRow:
    """One token to choose. All fields are filled by the core from the sample's request."""

    logits_row: int  # index into logits; children of a just computed prompt share one
    params: SamplingParams
    request_id: int  # stands in for the seed where params.seed is None
    child: int
    num_output_tokens: int  # tokens this sample already has: the counter of its random stream
    masked_token_ids: Sequence[int] = ()  # may not be chosen: EOS and stop ids while below min_tokens
    token_ids: Sequence[int] = ()  # prompt and output, the last num_output_tokens of them; read, never kept
    matcher: Matcher | None = None  # of the sample's structured_outputs


@dataclass(slots=True)
class Sampled:
    """Aligned with the rows given. A row in `invalid` has token id −1 and no log-probabilities."""

    token_ids: list[int]
    logprobs: list[dict[int, float] | None]  # {token id: log-probability}, best first, the chosen one always inside
    invalid: list[int] = field(default_factory=list)  # rows whose logits held NaN, +inf or nothing but −inf
    exhausted: list[int] = field(default_factory=list)  # those of them for which it was the masks that left nothing


class Sampler:
    """`seed` is the engine's: a request without its own seed draws from (engine seed, request id). `logprobs_mode`:
    "raw_logprobs" | "processed_logprobs"."""

    def __init__(self, kernels: Ops, vocab_size: int, seed: int = 0, logprobs_mode: str = "raw_logprobs"):
        self.kernels = kernels
        self.vocab_size = vocab_size
        self.seed = seed
        self.logprobs_mode = logprobs_mode

    def sample(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> Sampled:
        """Choose one token a row. `logits` float32 [S, vocab] may be overwritten."""
        if not rows:
            return Sampled([], [])
        raw = self.logprobs_mode == "raw_logprobs"
        if raw:
            top = TopLogprobs(logits, rows, [row.logits_row for row in rows])
        logits = _select(logits, rows)
        processed = set(process(logits, rows))
        token_ids = self._choose(logits, rows)
        if not raw:
            top = TopLogprobs(logits, rows, range(len(rows)), token_ids)
        logprobs = top.of(token_ids)
        invalid = [i for i, token_id in enumerate(token_ids) if token_id < 0]
        for i in invalid:
            logprobs[i] = None
        exhausted = [i for i in invalid if i in processed and not logits[i].isnan().any()]
        return Sampled(token_ids, logprobs, invalid, exhausted)

    def _choose(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[int]:
        """One kernel call for all rows: logits float32 [len(rows), vocab] -> ids, −1 where the logits are broken."""
        params = [row.params for row in rows]
        if all(p.greedy for p in params):
            return self.kernels.greedy(logits).tolist()
        uniform = uniforms(
            [request_seed(row.params.seed, self.seed, row.request_id) for row in rows],
            [row.child for row in rows],
            [row.num_output_tokens for row in rows],
        )  # float64 [S]
        device = logits.device
        return self.kernels.sample(
            logits,
            torch.tensor([p.temperature for p in params], dtype=torch.float32, device=device),
            torch.tensor([min(max(p.top_k, 0), self.vocab_size) for p in params], dtype=torch.int32, device=device),
            torch.tensor([p.top_p for p in params], dtype=torch.float32, device=device),
            torch.tensor([p.min_p for p in params], dtype=torch.float32, device=device),
            torch.from_numpy(uniform).to(device),
        ).tolist()


def _select(logits: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """The logits of these rows, [len(rows), vocab]; no copy where they are all rows in order."""
    wanted = [row.logits_row for row in rows]
    if wanted == list(range(logits.shape[0])):
        return logits
    return logits[torch.tensor(wanted, device=logits.device)]
