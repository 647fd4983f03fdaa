"""`kvscope bench latency`: decode and prefill of equal prompts, ours against transformers, with the floor beside.

A run with n new tokens minus a run with one is n − 1 decode steps; the run with one is the prefill. The two engines
take turns (A B A B …) and the ceilings are measured between them, so that the ratios hold on a noisy machine.
"""

from __future__ import annotations

import statistics
import time

import torch

from .floor import decode_floor, prefill_floor
from .machine import buffer_like, describe, measure_ceilings
from .peers import Kvscope, Transformers
from .report import print_table

HEADERS = ["phase", "batch", "kvscope tok/s", "transformers tok/s", "ratio", "floor tok/s", "share of floor"]


def run(options) -> int:
    most = max(options.batch)
    blocks = 1 + max(most, 8) * -(-(options.prompt + options.new) // 16)
    ours = Kvscope(options.model, options.dtype, num_blocks=blocks, max_num_batched_tokens=1024)
    spec = ours.engine.info.spec
    theirs = Transformers(options.model, spec.dtype)
    buffer = buffer_like(spec.weight_bytes)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(10, spec.vocab_size, (max(most, 8), options.prompt), generator=generator).tolist()

    rows = []
    for batch in options.batch:
        seconds, ceilings = _alternate(
            options, buffer, spec, lambda peer, b=batch: _decode_seconds(peer, prompts[:b], options.new), ours, theirs
        )
        floor = decode_floor(spec, ceilings, batch=batch, context=options.prompt + options.new // 2)
        rows.append(_row("decode", batch, batch, seconds, floor))
    seconds, ceilings = _alternate(options, buffer, spec, lambda peer: _seconds(peer, prompts[:8], 1), ours, theirs)
    floor = prefill_floor(spec, ceilings, batch=8, prompt=options.prompt)
    rows.append(_row("prefill", 8, 8 * options.prompt, seconds, floor))
    info = ours.engine.info
    ours.close()

    facts = describe() | {
        "model": f"{spec.name}, {str(spec.dtype).removeprefix('torch.')}, from {info.weights_source}",
        "workload": f"{options.prompt}-token prompts, {options.new} new tokens, median of {options.repeats} alternations",
        "ceilings": f"{ceilings.bytes_per_second / 1e9:.0f} GB/s, {ceilings.flops_per_second / 1e12:.2f} TFLOP/s (last)",
    }
    print_table("kvscope bench latency", facts, HEADERS, rows, options.json)
    return 0


def _alternate(options, buffer, spec, measure, ours, theirs):
    """Median seconds of each, taken in turns, and the median ceilings measured between the turns."""
    measure(ours), measure(theirs)  # warm
    taken: dict[str, list[float]] = {ours.name: [], theirs.name: []}
    ceilings = []
    for _ in range(options.repeats):
        for peer in (ours, theirs):
            taken[peer.name].append(measure(peer))
        ceilings.append(measure_ceilings(spec.dtype, buffer))
    ceilings.sort(key=lambda c: c.bytes_per_second)
    return {name: statistics.median(values) for name, values in taken.items()}, ceilings[len(ceilings) // 2]


def _decode_seconds(peer, prompts, new_tokens: int) -> float:
    """Seconds of one decode step."""
    return (_seconds(peer, prompts, new_tokens) - _seconds(peer, prompts, 1)) / (new_tokens - 1)


def _seconds(peer, prompts, new_tokens: int) -> float:
    start = time.perf_counter()
    made = peer.generate(prompts, new_tokens)
    seconds = time.perf_counter() - start
    assert [len(ids) for ids in made] == [new_tokens] * len(prompts), "a peer stopped early: the ratio would be false"
    return seconds


def _row(phase: str, batch: int, tokens: int, seconds: dict[str, float], floor: float) -> list:
    ours, theirs = seconds["kvscope"], seconds["transformers"]
    return [phase, batch, tokens / ours, tokens / theirs, theirs / ours, tokens / floor, f"{floor / ours:.0%}"]
