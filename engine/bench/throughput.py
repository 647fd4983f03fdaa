"""`kvscope bench throughput`: many requests of mixed lengths, all at once: output tokens per second.

transformers runs the same requests in static batches of equal prompts sorted by length, its fairest setting
without padding errors; continuous batching is the difference that the table shows.
"""

from __future__ import annotations

from functools import partial

import torch

from .contender import Arrival, Contender, Kvscope
from .floor import workload_floor
from .load import Service
from .machine import alternate, facts
from .peer_process import transformers_like
from .report import print_table

HEADERS = ["engine", "requests", "output tokens", "seconds", "output tok/s", "total tok/s", "ratio", "share of floor"]


def run(options) -> int:
    ours = Kvscope(
        options.model, dtype=options.dtype, quantization=options.quantization, max_num_seqs=options.max_num_seqs
    )
    info = ours.engine.info
    spec = info.spec
    theirs = transformers_like(ours.engine)
    requests = make_requests(options.requests, spec.vocab_size, options.seed)
    seconds, ceilings = alternate(
        {
            ours.name: partial(_continuous, ours, requests),
            theirs.name: partial(_static, theirs, requests, options.max_num_seqs),
        },
        options.repeats,
        spec,
    )
    ours.close()
    theirs.close()
    output_tokens = sum(new for _, new in requests)
    total_tokens = output_tokens + sum(len(prompt) for prompt, _ in requests)
    sizes = [(len(prompt), new) for prompt, new in requests]
    least = workload_floor(spec, ceilings, sizes, max_num_seqs=options.max_num_seqs)
    rows: list[list] = [
        [name, len(requests), output_tokens, took, output_tokens / took, total_tokens / took,
         seconds[theirs.name] / took, f"{least / took:.0%}"]
        for name, took in (*seconds.items(), ("floor", least))
    ]  # fmt: skip
    workload = (
        f"prompts of 32 to 256 tokens, 16 to 128 new tokens, seed {options.seed}, at most {options.max_num_seqs} at "
        f"once, median of {options.repeats} alternations"
    )
    notes = {each.name: each.about for each in (ours, theirs)}
    print_table("kvscope bench throughput", facts(info, workload, ceilings) | notes, HEADERS, rows, options.json)
    return 0


def make_requests(count: int, vocab_size: int, seed: int) -> list[tuple[list[int], int]]:
    """(prompt ids, new tokens) with lengths drawn from a few sizes, so that a static batch needs no padding."""
    generator = torch.Generator().manual_seed(seed)
    prompt_sizes, new_sizes = torch.tensor([32, 64, 128, 256]), torch.tensor([16, 32, 64, 128])
    requests = []
    for _ in range(count):
        size = int(prompt_sizes[torch.randint(4, (), generator=generator)])
        new = int(new_sizes[torch.randint(4, (), generator=generator)])
        requests.append((torch.randint(10, vocab_size, (size,), generator=generator).tolist(), new))
    return requests


def _continuous(contender: Contender, requests) -> float:
    """Seconds; all are there from the start."""
    arrivals = [Arrival(0.0, prompt, new) for prompt, new in requests]
    return Service(arrivals, contender.serve(arrivals)).seconds


def _static(contender: Contender, requests, max_num_seqs: int) -> float:
    """Seconds of batches of equal prompt length, each run until its longest output is done: that is what static means."""
    by_size: dict[int, list] = {}
    for prompt, new in requests:
        by_size.setdefault(len(prompt), []).append((prompt, new))
    seconds = 0.0
    for group in by_size.values():
        for start in range(0, len(group), max_num_seqs):
            batch = group[start : start + max_num_seqs]
            seconds += contender.generate([prompt for prompt, _ in batch], max(new for _, new in batch)).seconds
    return seconds
