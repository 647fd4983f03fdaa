"""The least time a step can take: the sum over its operations of max(bytes / bandwidth, FLOPs / rate).

All linears of a model do 2 FLOPs per weight and row, so they are one operation here, the head another because it has fewer
rows; attention is the third. What a step must do besides (norms, sampling, scheduling) is small and left out: the floor stays
below the truth.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..models.base import ModelSpec
from .machine import Ceilings


class Work(NamedTuple):
    """What an operation cannot do without."""

    num_bytes: float
    num_flops: float
    num_int8: float = 0.0  # operations on int8, which have a rate of their own


def floor(work: Iterable[Work], ceilings: Ceilings) -> float:
    """Seconds, one operation after the other."""
    return sum(
        max(
            w.num_bytes / ceilings.bytes_per_second,
            w.num_flops / ceilings.flops_per_second + w.num_int8 / ceilings.int8_per_second,
        )
        for w in work
    )


def decode_work(spec: ModelSpec, *, batch: int, context: int) -> list[Work]:
    """One token for each of `batch` sequences that have `context` tokens in the cache."""
    attention = _attention(spec, read_tokens=batch * context, pairs=batch * context)
    return [*_linears(spec, rows=batch, head_rows=batch), attention]


def prefill_work(spec: ModelSpec, *, batch: int, prompt: int) -> list[Work]:
    """`batch` prompts of `prompt` tokens, logits for the last token of each."""
    attention = _attention(spec, read_tokens=batch * prompt, pairs=batch * prompt * (prompt + 1) // 2)
    return [*_linears(spec, rows=batch * prompt, head_rows=batch), attention]


def decode_floor(spec: ModelSpec, ceilings: Ceilings, *, batch: int, context: int) -> float:
    """Seconds of `decode_work`."""
    return floor(decode_work(spec, batch=batch, context=context), ceilings)


def prefill_floor(spec: ModelSpec, ceilings: Ceilings, *, batch: int, prompt: int) -> float:
    """Seconds of `prefill_work`."""
    return floor(prefill_work(spec, batch=batch, prompt=prompt), ceilings)


def workload_floor(
    spec: ModelSpec, ceilings: Ceilings, requests: Sequence[tuple[int, int]], *, max_num_seqs: int
) -> float:
    """Seconds in which no schedule can serve `requests`, (prompt tokens, new tokens) each, all there from the start.

    A step samples one token of each of at most `max_num_seqs` sequences, so there are at least as many steps as the
    longest output has tokens, and as all outputs need; each reads the weights once. Prompts may share those steps.
    """
    outputs = [new for _, new in requests]
    steps = max(*outputs, -(-sum(outputs) // max_num_seqs))
    computed = [prompt + new - 1 for prompt, new in requests]  # the last token is not fed back
    read = sum(new * prompt + new * (new - 1) // 2 for prompt, new in requests)
    pairs = sum(length * (length + 1) // 2 for length in computed)
    linears = _linears(spec, rows=sum(computed), head_rows=sum(outputs), passes=steps)
    return floor([*linears, _attention(spec, read_tokens=read, pairs=pairs)], ceilings)


def _linears(spec: ModelSpec, *, rows: int, head_rows: int, passes: int = 1) -> list[Work]:
    """Body and head; `passes`: how often the weights are read."""
    head = spec.vocab_size * spec.hidden_size
    body = spec.num_parameters - head * (1 if spec.tied_embeddings else 2)
    work = []
    for weights, used_rows in ((body, rows), (head, head_rows)):
        num_bytes, operations = passes * weights * spec.bytes_per_weight, 2 * weights * used_rows
        work.append(
            Work(num_bytes, 0, operations) if spec.quantization == "int8-dynamic" else Work(num_bytes, operations)
        )
    return work


def _attention(spec: ModelSpec, *, read_tokens: int, pairs: int) -> Work:
    """`pairs` counts (query, key) pairs of one head; QKᵀ and PV are 2 FLOPs per element each."""
    flops = 4 * pairs * spec.num_heads * spec.head_dim * spec.num_layers
    return Work(read_tokens * spec.kv_bytes_per_token, flops)
