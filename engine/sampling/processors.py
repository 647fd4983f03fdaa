"""What a request may do to its logits before temperature and filters: masks, biases, penalties.

In: logits float32 [S, vocab], row i those of `rows[i]`, changed in place. The order of operations for one token, vLLM's:

    1  log-probabilities to report, where logprobs_mode is "raw_logprobs"
    2  structured_outputs      ids that the text cannot go on with get −inf; EOS where it cannot end
    3  allowed_token_ids       every other id gets −inf
    4  bad_words               the last id of a sequence gets −inf where the output ends with the ids before it
    5  min_tokens              EOS and stop ids get −inf while the output is shorter, unless 2 leaves nothing but EOS
    6  logit_bias              added
    7  repetition_penalty r    ids in prompt or output: l / r where l > 0, else l · r
    8  frequency_penalty       ids in the output: l − penalty · times
    9  presence_penalty        ids in the output: l − penalty
    10 temperature, top_k, top_p, min_p and the draw, by the one rule of `kernels.sample`; temperature 0 takes the
       largest logit, the lowest id of equals
    11 log-probabilities to report, where logprobs_mode is "processed_logprobs": of what was left after 10's filters
       (temperature 0: after 9)

This file is 2 to 9, one function each. A function works on all rows that use it at once, and nothing is kept between
steps: what the output holds is counted from its ids, so a preempted sample goes on counting where it stopped (the
matcher of a structure reads the ids that are new to it). Rows
that use none of it cost one test of two attributes. A mask never hides logits that are not finite, and where the masks
of a row leave no id to choose its logits are all −inf.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch

if TYPE_CHECKING:
    from .sampler import SampleRow

Users: TypeAlias = "Sequence[tuple[int, SampleRow]]"  # (row of the logits, what is to be chosen there)


def process(logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[int]:
    """Apply 2 to 9 to `logits` float32 [len(rows), vocab], in place. Returns the rows that used any of it."""
    users = [(i, row) for i, row in enumerate(rows) if row.masked_token_ids or row.params.shapes_logits]
    if not users:
        return []
    used = [i for i, _ in users]
    where = torch.tensor(used, device=logits.device)
    broken = where[~logits[where].amax(-1).isfinite()]  # NaN, +inf or nothing but −inf
    for processor in PROCESSORS:
        processor(logits, users)
    logits[broken] = torch.nan
    return used


def follow_structure(logits: torch.Tensor, users: Users) -> None:
    """structured_outputs"""
    for i, row in users:
        if row.matcher is not None:
            output = row.token_ids[len(row.token_ids) - row.num_output_tokens :]
            allowed = torch.from_numpy(row.matcher.allowed(output)).to(logits.device)
            logits[i].masked_fill_(~allowed, -torch.inf)


def allow(logits: torch.Tensor, users: Users) -> None:
    """allowed_token_ids"""
    pairs = [(i, t) for i, row in users if row.params.allowed_token_ids for t in row.params.allowed_token_ids]
    if not pairs:
        return
    where, ids = _columns(pairs, logits.device)
    kept = logits[where, ids]
    logits[where] = -torch.inf
    logits[where, ids] = kept


def forbid_words(logits: torch.Tensor, users: Users) -> None:
    """bad_words"""
    _forbid(logits, [(i, t) for i, row in users if row.params.bad_words for t in _last_ids(row)])


def forbid_ends(logits: torch.Tensor, users: Users) -> None:
    """min_tokens"""
    unfinished = [(i, row) for i, row in users if row.matcher is None or not row.matcher.is_complete]
    _forbid(logits, [(i, t) for i, row in unfinished for t in row.masked_token_ids])


def bias(logits: torch.Tensor, users: Users) -> None:
    """logit_bias"""
    biased = [(i, t, b) for i, row in users if row.params.logit_bias for t, b in row.params.logit_bias.items()]
    if biased:
        where, ids = _columns([(i, t) for i, t, _ in biased], logits.device)
        logits[where, ids] += _values([b for _, _, b in biased], logits.device)


def penalize(logits: torch.Tensor, users: Users) -> None:
    """repetition_penalty, frequency_penalty, presence_penalty: each id that occurs is read and written once a row."""
    penalized = [(i, row) for i, row in users if row.params.has_penalties]
    if not penalized:
        return
    vocab_size, device = logits.shape[1], logits.device
    texts = [np.array(row.token_ids, dtype=np.int64) for _, row in penalized]
    owner = np.repeat(np.arange(len(texts)), [len(text) for text in texts])  # [all tokens]; index into penalized
    in_output = np.concatenate(
        [
            np.arange(len(text)) >= len(text) - row.num_output_tokens
            for text, (_, row) in zip(texts, penalized, strict=True)
        ]
    )
    keys, group = np.unique(
        owner * vocab_size + np.concatenate(texts), return_inverse=True
    )  # [occurring], [all tokens]
    owner, ids = np.divmod(keys, vocab_size)
    times = torch.from_numpy(np.bincount(group, weights=in_output, minlength=len(keys)).astype(np.float32)).to(device)
    params = [row.params for _, row in penalized]
    of = torch.from_numpy(owner).to(device)
    where = torch.tensor([i for i, _ in penalized], device=device)[of]
    ids = torch.from_numpy(ids).to(device)
    repetition = _values([p.repetition_penalty for p in params], device)[of]
    frequency = _values([p.frequency_penalty for p in params], device)[of]
    presence = _values([p.presence_penalty for p in params], device)[of]
    values = logits[where, ids]
    values = torch.where(values > 0, values / repetition, values * repetition)
    logits[where, ids] = values - frequency * times - presence * (times > 0)


PROCESSORS: tuple[Callable[[torch.Tensor, Users], None], ...] = (
    follow_structure,
    allow,
    forbid_words,
    forbid_ends,
    bias,
    penalize,
)


def _last_ids(row: SampleRow) -> list[int]:
    """The ids that would complete a bad word now. Only the output counts: a word may begin in the prompt."""
    ids, num_output = row.token_ids, row.num_output_tokens
    words = [word for word in row.params.bad_words if len(word) <= num_output + 1]
    return [word[-1] for word in words if tuple(ids[len(ids) + 1 - len(word) :]) == word[:-1]]


def _forbid(logits: torch.Tensor, pairs: list[tuple[int, int]]) -> None:
    if pairs:
        where, ids = _columns(pairs, logits.device)
        logits[where, ids] = -torch.inf


def _columns(pairs: list[tuple[int, int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    where, ids = torch.tensor(pairs, device=device).unbind(1)
    return where, ids


def _values(values: list[float], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)
