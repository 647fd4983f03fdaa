"""Beam search: of all continuations of the k likeliest texts so far, the k likeliest go on.

    beams            best continuations (beam, token)          the next beams
    0  the cat       0 sat  −3.1                               0  the cat sat     keeps beam 0's table
    1  the dog       0 ran  −3.4   ── the best that go on ──▶  1  the cat ran     forked from beam 0
                     1 </s> −3.9   ── ended: a hypothesis          (beam 1 has no child: its blocks are freed)

A step gathers k · V log-probabilities and looks at the best (1 + number of end ids, at least 2) · k of them, so that k
remain that go on. Those that end among the best k become hypotheses, scored logprob / length ** length_penalty, the
end token counted in both; the best k hypotheses are kept. At max_tokens every continuation ends. Equal continuations:
the lower beam, then the lower token id. The search is over when no beam can become one of k hypotheses any more:

| early_stopping | the best that beam 0 can still become | also over when |
|---|---|---|
| False | its logprob so far / its length so far ** length_penalty, a guess | |
| "never" | the same; with a positive length penalty / max_tokens ** length_penalty, a bound | |
| True | as False | there are k hypotheses |

Definitions and results are those of transformers' `generate(num_beams=k, do_sample=False)` with the model's logits divided by
`temperature`. Knows no blocks and no schedule; what forks and what is freed is carried out by `lifecycle`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch

from ..events import Cause
from .params import MAX_SAMPLES, SamplingParams, _integer, _real, _require

MAX_LENGTH_PENALTY = 40.0  # length ** penalty stays a float of any length that a model has
# What it shares with sampling. Anything else would change the search, and is refused rather than ignored.
_SHARED = (
    "n", "temperature", "max_tokens", "ignore_eos", "stop_token_ids", "include_stop_str_in_output", "prompt_logprobs",
    "detokenize", "skip_special_tokens", "spaces_between_special_tokens",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class BeamSearchParams(SamplingParams):
    """How one request is searched. The outputs are the `beam_width` best hypotheses, best first.

    beam_width          texts kept in every step, from 1 to 64
    temperature         logits are divided by it before they become log-probabilities, those that come out included; 0 and 1
                        leave them as they are. Nothing is drawn at any temperature
    length_penalty      a hypothesis is scored logprob / length ** length_penalty: above 0 favours long texts, below 0
                        short ones; from -40 to 40
    early_stopping      True | False | "never", as transformers defines them; see the module

    max_tokens, ignore_eos, stop_token_ids, include_stop_str_in_output (which shows the text of the id that ended a
    hypothesis), prompt_logprobs, detokenize, skip_special_tokens and spaces_between_special_tokens as in `SamplingParams`;
    its other fields have no meaning here and are refused.
    """

    beam_width: int
    temperature: float = 0.0
    length_penalty: float = 1.0
    early_stopping: bool | str = False

    def __post_init__(self) -> None:
        limit = f"an integer from 1 to {MAX_SAMPLES}"
        self._set("beam_width", _integer("beam_width", self.beam_width, 1, limit))
        _require(self.beam_width <= MAX_SAMPLES, "beam_width", self.beam_width, limit)
        limit = f"a number from {-MAX_LENGTH_PENALTY:g} to {MAX_LENGTH_PENALTY:g}"
        penalty = _real("length_penalty", self.length_penalty, lambda value: abs(value) <= MAX_LENGTH_PENALTY, limit)
        self._set("length_penalty", penalty)
        fine = isinstance(self.early_stopping, bool) or self.early_stopping == "never"
        _require(fine, "early_stopping", self.early_stopping, "True, False or 'never'")
        _require(self.n in (1, self.beam_width), "n", self.n, "left out: beam_width says how many texts come out")
        for field in fields(SamplingParams):
            value = getattr(self, field.name)
            limit = "left out: beam search takes the likeliest texts as they are"
            _require(field.name in _SHARED or value == field.default, field.name, value, limit)
        self._set("n", 1)  # that many samples at temperature 0 would be the same; beams are not
        super().__post_init__()
        self._set("n", self.beam_width)


class Continuation(NamedTuple):
    """One beam of the next step."""

    beam: int  # that it goes on from
    token_id: int
    logprob: float  # of the whole output


class Hypothesis(NamedTuple):
    score: float
    logprob: float
    output: list[int]
    cause: Cause  # EOS | STOP_TOKEN | LENGTH


class BeamSearch:
    """The search of one request. `logprobs[i]` belongs to beam i, the request's child i.

    While the request has lost its KV, `suspended` holds the beams' whole texts: what they have in common is computed again
    first, once, and then they fork from it.
    """

    def __init__(self, params: BeamSearchParams, max_tokens: int, eos_token_ids: frozenset[int]):
        self.width, self.length_penalty = params.beam_width, params.length_penalty
        self.temperature = params.temperature or 1.0
        self.early_stopping = params.early_stopping
        self.max_tokens = max_tokens
        self.stop_token_ids = frozenset(params.stop_token_ids)
        self.eos_token_ids = frozenset() if params.ignore_eos else eos_token_ids
        self.logprobs = [0.0]
        self.hypotheses: list[Hypothesis] = []  # best first
        self.suspended: list[array] = []
        self.done = False

    def rank(self, logits: torch.Tensor) -> list[Continuation]:
        """The best continuations, best first, of logits float32 [beams, vocab]. FloatingPointError where they are broken."""
        if not bool(logits.amax(-1).isfinite().all()):
            raise FloatingPointError("the logits of the step are not finite (NaN or infinity)")
        vocab_size = logits.shape[1]
        so_far = torch.tensor(self.logprobs, dtype=torch.float32, device=logits.device)
        scores = (self._log_probabilities(logits) + so_far[:, None]).flatten()  # [beams · vocab]
        count = max(2, 1 + len(self.stop_token_ids | self.eos_token_ids)) * self.width
        edge = scores.topk(min(count, len(scores))).values[-1]
        places = ((scores >= edge) & (scores > -torch.inf)).nonzero()[:, 0]  # ascending; equal scores all in
        best = sorted(zip(scores[places].tolist(), places.tolist(), strict=True), key=lambda c: (-c[0], c[1]))
        return [Continuation(place // vocab_size, place % vocab_size, logprob) for logprob, place in best[:count]]

    def _log_probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """Float32 [beams, vocab]. No temperature is so low that a quotient is not a number."""
        if self.temperature != 1:
            logits = ((logits - logits.amax(-1, keepdim=True)).double() / self.temperature).float()
        return torch.log_softmax(logits, dim=-1)

    def advance(self, ranked: Sequence[Continuation], outputs: Sequence[list[int]]) -> list[Continuation]:
        """Take the ranked continuations of beams with these outputs; the beams that go on, best first. Sets `done`."""
        length = len(outputs[0]) + 1
        going_on: list[Continuation] = []
        takes_more = not (self.early_stopping is True and self._is_full)
        for rank, step in enumerate(ranked):
            cause = self._end(step.token_id, length)
            if cause is Cause.NONE:
                if len(going_on) < self.width:
                    going_on.append(step)
            elif rank < self.width and takes_more:
                score = step.logprob / length**self.length_penalty
                self.hypotheses.append(Hypothesis(score, step.logprob, [*outputs[step.beam], step.token_id], cause))
        self.hypotheses.sort(key=lambda hypothesis: -hypothesis.score)  # stable: the earlier of equals stays ahead
        del self.hypotheses[self.width :]
        self.done = not going_on or not self._can_improve(going_on[0].logprob, length)
        return going_on

    @property
    def _is_full(self) -> bool:
        return len(self.hypotheses) == self.width

    def _end(self, token_id: int, length: int) -> Cause:
        if token_id in self.eos_token_ids:
            return Cause.EOS
        if token_id in self.stop_token_ids:
            return Cause.STOP_TOKEN
        return Cause.LENGTH if length >= self.max_tokens else Cause.NONE

    def _can_improve(self, best: float, length: int) -> bool:
        if not self._is_full:
            return True
        if self.early_stopping is True:
            return False
        if self.early_stopping == "never" and self.length_penalty > 0:
            length = self.max_tokens
        return best / length**self.length_penalty > self.hypotheses[-1].score


def common_prefix(texts: Sequence[array]) -> int:
    """How many tokens all texts begin with."""
    first, last = min(texts), max(texts)
    return next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
