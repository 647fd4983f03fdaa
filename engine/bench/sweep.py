"""`kvscope bench sweep`: the time of a decode step over batch × context × dtype × block size.

The prompts of a batch are computed once and stay in the prefix cache, so that each run is decode steps and little else. The time
of a step is from the tokens of the one before to its own, everything in between included; the median of a run's steps.
"""

from __future__ import annotations

import math
import statistics
from itertools import pairwise

from ..engine import Engine
from ..events import EventKind
from .floor import decode_floor
from .machine import alternate, facts
from .report import print_table
from .trace import greedy, random_jobs

HEADERS = ["dtype", "block size", "batch", "context", "ms a step", "tok/s", "floor ms", "share of floor"]


def run(options) -> int:
    rows = []
    for dtype in options.dtype:
        for block_size in options.block_size:
            most = 1 + max(options.batch) * (2 + -(-(max(options.context) + options.new) // block_size))
            with Engine(
                options.model, dtype=dtype, block_size=block_size, num_blocks=most, max_num_seqs=max(options.batch)
            ) as engine:
                cells, ceilings = _cells(engine, options)
                info = engine.info
            for (batch, context), seconds in cells.items():
                least = decode_floor(info.spec, ceilings, batch=batch, context=context)
                rows.append([info.dtype, block_size, batch, context, 1e3 * seconds, batch / seconds, 1e3 * least,
                             f"{least / seconds:.0%}"])  # fmt: skip
    workload = (
        f"{options.new} decode steps after a cached prompt, the context is that of the middle one; median of a run's steps, "
        f"median of {options.repeats} alternations; model, threads and ceilings are those of the last dtype"
    )
    print_table("kvscope bench sweep", facts(info, workload, ceilings), HEADERS, rows, options.json)
    return 0


def _cells(engine: Engine, options):
    """({(batch, context): seconds of a step}, ceilings)"""
    longest = max(options.context)
    jobs = random_jobs(max(options.batch), (longest, longest), (1, 1), vocab_size=engine.info.spec.vocab_size)
    texts = [list(job.prompt) for job in jobs]
    runs = {
        f"{batch} × {context}": lambda b=batch, c=context: step_seconds(engine, [t[:c] for t in texts[:b]], options.new)
        for context in options.context
        for batch in options.batch
    }
    seconds, ceilings = alternate(runs, options.repeats, engine.info.spec)
    return {tuple(map(int, name.split(" × "))): value for name, value in seconds.items()}, ceilings


def step_seconds(engine: Engine, texts: list[list[int]], new_tokens: int) -> float:
    """Median seconds from one decode step to the next while each of `texts` has about so many tokens in the cache. NaN where
    some were done before the last had begun, as happens while prompts are not cached yet."""
    seen = engine.events.next_index
    prompts = [text[: max(1, len(text) - new_tokens // 2)] for text in texts]
    engine.generate(prompts, greedy(new_tokens + 2))
    events, _, lost = engine.events.since(seen)
    assert not lost, "the ring of events is too small for this run"
    steps = [event for event in events if event.kind is EventKind.STEP]
    taken = [
        step.time - before.time
        for before, step in pairwise(steps)
        if step.numbers["decode_tokens"] == len(texts) and not step.numbers["prefill_tokens"]
    ]
    return statistics.median(taken) if taken else math.nan
