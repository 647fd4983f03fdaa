"""`kvscope bench latency`: decode and prefill of equal prompts, ours against transformers, with the floor beside.

A run with n new tokens minus a run with one is n − 1 decode steps; the run with one is the prefill. The two engines
take turns (A B A B …) and the ceilings are measured between them, so that the ratios hold on a noisy machine.
"""

from __future__ import annotations

from functools import partial

import torch

from .floor import decode_floor, prefill_floor
from .machine import alternate, facts, seconds_of
from .peers import Kvscope, Transformers
from .report import print_table

HEADERS = ["phase", "batch", "kvscope tok/s", "transformers tok/s", "ratio", "floor tok/s", "share of floor"]
PREFILL_BATCH = 8


def run(options) -> int:
    most = max(*options.batch, PREFILL_BATCH)
    blocks = 1 + most * -(-(options.prompt + options.new) // 16)
    ours = Kvscope(options.model, options.dtype, num_blocks=blocks, max_num_batched_tokens=1024)
    info = ours.engine.info
    spec = info.spec
    peers = (ours, Transformers(options.model, spec.dtype))
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(10, spec.vocab_size, (most, options.prompt), generator=generator).tolist()

    def measured(seconds, *arguments):
        return alternate({peer.name: partial(seconds, peer, *arguments) for peer in peers}, options.repeats, spec)

    rows = []
    for batch in options.batch:
        seconds, ceilings = measured(_decode_seconds, prompts[:batch], options.new)
        floor = decode_floor(spec, ceilings, batch=batch, context=options.prompt + options.new // 2)
        rows.append(_row("decode", batch, batch, seconds, floor))
    seconds, ceilings = measured(_seconds, prompts[:PREFILL_BATCH], 1)
    floor = prefill_floor(spec, ceilings, batch=PREFILL_BATCH, prompt=options.prompt)
    rows.append(_row("prefill", PREFILL_BATCH, PREFILL_BATCH * options.prompt, seconds, floor))
    ours.close()
    workload = f"{options.prompt}-token prompts, {options.new} new tokens, median of {options.repeats} alternations"
    print_table("kvscope bench latency", facts(info, workload, ceilings), HEADERS, rows, options.json)
    return 0


def _decode_seconds(peer, prompts, new_tokens: int) -> float:
    """Seconds of one decode step."""
    return (_seconds(peer, prompts, new_tokens) - _seconds(peer, prompts, 1)) / (new_tokens - 1)


def _seconds(peer, prompts, new_tokens: int) -> float:
    made: list[list[int]] = []
    seconds = seconds_of(lambda: made.extend(peer.generate(prompts, new_tokens)))
    assert [len(ids) for ids in made] == [new_tokens] * len(prompts), "a peer stopped early: the ratio would be false"
    return seconds


def _row(phase: str, batch: int, tokens: int, seconds: dict[str, float], floor: float) -> list:
    ours, theirs = seconds["kvscope"], seconds["transformers"]
    return [phase, batch, tokens / ours, tokens / theirs, theirs / ours, tokens / floor, f"{floor / ours:.0%}"]
