"""`kvscope bench latency`: decode and prefill of equal prompts, ours against transformers, with the floor beside.

A run with n new tokens minus a run with one is n − 1 decode steps; the run with one is the prefill. The two engines
take turns (A B A B …) and the ceilings are measured between them, so that the ratios hold on a noisy machine.
"""

from __future__ import annotations

from .contender import Kvscope, decode_seconds, equal_prompts
from .floor import decode_floor, prefill_floor
from .machine import alternate, facts
from .peer_process import transformers_like
from .report import print_table

HEADERS = ["phase", "batch", "kvscope tok/s", "transformers tok/s", "ratio", "floor tok/s", "share of floor"]
PREFILL_BATCH = 8


def run(options) -> int:
    most = max(*options.batch, PREFILL_BATCH)
    blocks = 1 + most * -(-(options.prompt + options.new) // 16)
    ours = Kvscope(options.model, dtype=options.dtype, num_blocks=blocks, max_num_batched_tokens=1024)
    info = ours.engine.info
    spec = info.spec
    theirs = transformers_like(ours.engine)
    prompts = equal_prompts(most, options.prompt, spec.vocab_size)

    def measured(seconds):
        return alternate({each.name: lambda each=each: seconds(each) for each in (ours, theirs)}, options.repeats, spec)

    rows = []
    for batch in options.batch:
        seconds, ceilings = measured(lambda each, p=prompts[:batch]: decode_seconds(each, p, options.new))
        floor = decode_floor(spec, ceilings, batch=batch, context=options.prompt + options.new // 2)
        rows.append(_row("decode", batch, batch, seconds, floor))
    seconds, ceilings = measured(lambda each: each.generate(prompts[:PREFILL_BATCH], 1).seconds)
    floor = prefill_floor(spec, ceilings, batch=PREFILL_BATCH, prompt=options.prompt)
    rows.append(_row("prefill", PREFILL_BATCH, PREFILL_BATCH * options.prompt, seconds, floor))
    ours.close()
    theirs.close()
    workload = f"{options.prompt}-token prompts, {options.new} new tokens, median of {options.repeats} alternations"
    notes = {each.name: each.about for each in (ours, theirs)}
    print_table("kvscope bench latency", facts(info, workload, ceilings) | notes, HEADERS, rows, options.json)
    return 0


def _row(phase: str, batch: int, tokens: int, seconds: dict[str, float], floor: float) -> list:
    ours, theirs = seconds["kvscope"], seconds["transformers"]
    return [phase, batch, tokens / ours, tokens / theirs, theirs / ours, tokens / floor, f"{floor / ours:.0%}"]
