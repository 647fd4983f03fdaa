"""`kvscope bench latency`: decode and prefill of equal prompts, ours against transformers, with the floor beside.

A run with n new tokens minus a run with one is n − 1 decode steps; the run with one is the prefill. The two engines
take turns (A B A B …), also engines of ours with other weights, and the ceilings are measured between them, so that the ratios hold on a noisy machine.
"""

from __future__ import annotations

from functools import partial
from itertools import product

from .contender import Kvscope, decode_seconds, equal_prompts
from .floor import decode_floor, prefill_floor
from .machine import Ceilings, alternate, facts
from .peer_process import transformers_like
from .report import print_table

HEADERS = ["phase", "batch", "weights", "kvscope tok/s", "transformers tok/s", "ratio", "floor tok/s", "share of floor"]
PREFILL_BATCH = 8


def run(options) -> int:
    most = max(*options.batch, PREFILL_BATCH)
    blocks = 1 + most * -(-(options.prompt + options.new) // 16)
    ours = {}  # by name of the weights
    for name, eager in product(options.quantization, (False, True) if options.enforce_eager else (False,)):
        quantization = None if name == "none" else name
        engine = Kvscope(
            options.model,
            dtype=options.dtype,
            quantization=quantization,
            num_blocks=blocks,
            max_num_batched_tokens=1024,
            enforce_eager=eager,
        )
        ours[(quantization or engine.engine.info.dtype) + (", eager" if eager else "")] = engine
    info = next(iter(ours.values())).engine.info
    theirs = transformers_like(next(iter(ours.values())).engine)
    prompts = equal_prompts(most, options.prompt, info.spec.vocab_size)

    def rows_of(phase: str, batch: int, tokens: int, seconds_of, floor_of) -> tuple[list[list], Ceilings]:
        runs = {name: lambda each=each: seconds_of(each) for name, each in (ours | {theirs.name: theirs}).items()}
        seconds, ceilings = alternate(runs, options.repeats, info.spec)
        rows = []
        for name, engine in ours.items():
            taken, floor = seconds[name], floor_of(engine.engine.info.spec, ceilings)
            rows.append([phase, batch, name, tokens / taken, tokens / seconds[theirs.name], seconds[theirs.name] / taken,
                         tokens / floor, f"{floor / taken:.0%}"])  # fmt: skip
        return rows, ceilings

    rows = []
    for batch in options.batch:
        found, _ = rows_of(
            "decode",
            batch,
            batch,
            lambda each, p=prompts[:batch]: decode_seconds(each, p, options.new),
            partial(decode_floor, batch=batch, context=options.prompt + options.new // 2),
        )
        rows += found
    found, ceilings = rows_of(
        "prefill",
        PREFILL_BATCH,
        PREFILL_BATCH * options.prompt,
        lambda each: each.generate(prompts[:PREFILL_BATCH], 1).seconds,
        partial(prefill_floor, batch=PREFILL_BATCH, prompt=options.prompt),
    )
    rows += found
    for each in (*ours.values(), theirs):
        each.close()
    workload = f"{options.prompt}-token prompts, {options.new} new tokens, median of {options.repeats} alternations"
    notes = {f"kvscope, {name}": each.about for name, each in ours.items()} | {theirs.name: theirs.about}
    print_table("kvscope bench latency", facts(info, workload, ceilings) | notes, HEADERS, rows, options.json)
    return 0
