"""The least time a step can take: the sum over its operations of max(bytes / bandwidth, FLOPs / rate).

All linears of a model do 2 FLOPs per weight and row, so they are one operation here; attention is the other. What
a step must do besides (norms, sampling, scheduling) is small and left out: the floor stays below the truth.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..models.base import ModelSpec
from .machine import Ceilings


def decode_floor(spec: ModelSpec, ceilings: Ceilings, *, batch: int, context: int) -> float:
    """Seconds for one token of each of `batch` sequences that have `context` tokens in the cache."""
    return _linears(spec, ceilings, rows=batch, head_rows=batch) + _attention(
        spec, ceilings, read_tokens=batch * context, pairs=batch * context
    )


def prefill_floor(spec: ModelSpec, ceilings: Ceilings, *, batch: int, prompt: int) -> float:
    """Seconds to compute `batch` prompts of `prompt` tokens, logits for the last token of each."""
    return _linears(spec, ceilings, rows=batch * prompt, head_rows=batch) + _attention(
        spec, ceilings, read_tokens=batch * prompt, pairs=batch * prompt * (prompt + 1) // 2
    )


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
    linears = _linears(spec, ceilings, rows=sum(computed), head_rows=sum(outputs), passes=steps)
    return linears + _attention(spec, ceilings, read_tokens=read, pairs=pairs)


def _linears(spec: ModelSpec, ceilings: Ceilings, *, rows: int, head_rows: int, passes: int = 1) -> float:
    """`passes`: how often the weights are read."""
    head = spec.vocab_size * spec.hidden_size
    body = spec.num_parameters - head * (1 if spec.tied_embeddings else 2)
    seconds = 0.0
    for weights, used_rows in ((body, rows), (head, head_rows)):
        seconds += max(
            passes * weights * spec.dtype.itemsize / ceilings.bytes_per_second,
            2 * weights * used_rows / ceilings.flops_per_second,
        )
    return seconds


def _attention(spec: ModelSpec, ceilings: Ceilings, *, read_tokens: int, pairs: int) -> float:
    """`pairs` counts (query, key) pairs of one head; QKᵀ and PV are 2 FLOPs per element each."""
    flops = 4 * pairs * spec.num_heads * spec.head_dim * spec.num_layers
    return max(read_tokens * spec.kv_bytes_per_token / ceilings.bytes_per_second, flops / ceilings.flops_per_second)
