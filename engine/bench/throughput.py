"""`kvscope bench throughput`: many requests of mixed lengths, all at once: output tokens per second.

transformers runs the same requests in static batches of equal prompts sorted by length, its fairest setting
without padding errors; continuous batching is the difference that the table shows.
"""

from __future__ import annotations

import statistics
import time

import torch

from .machine import describe
from .peers import Kvscope, Transformers
from .report import print_table

HEADERS = ["engine", "requests", "output tokens", "seconds", "output tok/s", "total tok/s", "ratio"]


def run(options) -> int:
    ours = Kvscope(options.model, options.dtype, max_num_seqs=options.max_num_seqs)
    spec = ours.engine.info.spec
    theirs = Transformers(options.model, spec.dtype)
    requests = make_requests(options.requests, spec.vocab_size, options.seed)
    runs = {"kvscope": [], "transformers": []}
    for name, call in (("kvscope", _run_ours), ("transformers", _run_static)):
        call(ours if name == "kvscope" else theirs, requests[:4], options.max_num_seqs)  # warm
    for _ in range(options.repeats):
        runs["kvscope"].append(_timed(_run_ours, ours, requests, options.max_num_seqs))
        runs["transformers"].append(_timed(_run_static, theirs, requests, options.max_num_seqs))
    source = ours.engine.info.weights_source
    ours.close()

    prompt_tokens = sum(len(prompt) for prompt, _ in requests)
    output_tokens = sum(new for _, new in requests)
    slowest = statistics.median(runs["transformers"])
    rows = []
    for name, seconds in ((name, statistics.median(values)) for name, values in runs.items()):
        rows.append(
            [name, len(requests), output_tokens, seconds, output_tokens / seconds,
             (prompt_tokens + output_tokens) / seconds, slowest / seconds]
        )  # fmt: skip
    facts = describe() | {
        "model": f"{spec.name}, {str(spec.dtype).removeprefix('torch.')}, from {source}",
        "workload": f"prompts of 32 to 256 tokens, 16 to 128 new tokens, seed {options.seed}, "
        f"at most {options.max_num_seqs} at once, median of {options.repeats} alternations",
    }
    print_table("kvscope bench throughput", facts, HEADERS, rows, options.json)
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


def _run_ours(peer: Kvscope, requests, max_num_seqs: int) -> None:
    from ..sampling.params import SamplingParams

    handles = [
        peer.engine.submit(prompt, SamplingParams(temperature=0, max_tokens=new, ignore_eos=True))
        for prompt, new in requests
    ]
    for handle in handles:
        handle.result()


def _run_static(peer: Transformers, requests, max_num_seqs: int) -> None:
    """Batches of equal prompt length, each run until its longest output is done: that is what static means."""
    by_size: dict[int, list] = {}
    for prompt, new in requests:
        by_size.setdefault(len(prompt), []).append((prompt, new))
    for group in by_size.values():
        for start in range(0, len(group), max_num_seqs):
            batch = group[start : start + max_num_seqs]
            peer.generate([prompt for prompt, _ in batch], max(new for _, new in batch))


def _timed(call, *arguments) -> float:
    start = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - start
