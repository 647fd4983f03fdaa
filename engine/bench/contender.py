"""Who takes part in a comparison: `Kvscope`, in this process, and `peer_process.PeerProcess`, asked in the same words.

A contender has a `name`, `about` (how it is configured, in words), `generate(prompts, new_tokens)` for equal prompts that are
all there, `serve(arrivals)` for those that come at their times, and `close()`. Both are greedy and run to their length.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from ..engine import Engine
from .trace import greedy


class Arrival(NamedTuple):
    """`num_new` tokens after `prompt`, asked for `at` seconds after the start."""

    at: float
    prompt: list[int]
    num_new: int


class Generated(NamedTuple):
    tokens: list[list[int]]
    seconds: float


class Contender(Protocol):
    name: str
    about: str

    def generate(self, prompts: Sequence[list[int]], new_tokens: int) -> Generated: ...
    def serve(self, arrivals: Sequence[Arrival]) -> list[list[float]]: ...
    def close(self) -> None: ...


class Kvscope:
    """Our engine through its public API, prefix caching off so that no prompt is skipped."""

    name = "kvscope"

    def __init__(self, model: str, **options: Any):
        self.engine = Engine(model, **{"enable_prefix_caching": False} | options)
        config, info = self.engine.config, self.engine.info
        self.about = (
            f"{info.precision}, kernels {info.kernels!r}, {info.num_threads} threads, {info.num_blocks} blocks of {info.block_words} "
            f"tokens, at most {config.max_num_seqs} sequences and {config.max_num_batched_tokens} tokens a step, "
            f"{'a' if config.enable_prefix_caching else 'no'} prefix cache"
        )

    def generate(self, prompts: Sequence[list[int]], new_tokens: int) -> Generated:
        start = time.perf_counter()
        outputs = self.engine.generate(list(prompts), greedy(new_tokens))
        return Generated([output.outputs[0].token_ids for output in outputs], time.perf_counter() - start)

    def serve(self, arrivals: Sequence[Arrival]) -> list[list[float]]:
        """Open loop: each is submitted at its time, whatever the engine is doing. This thread sleeps in between and while it
        waits for the ends; when a token came stands in the outputs, so nobody is woken for it."""
        start = time.monotonic()
        handles = []
        for arrival in arrivals:
            time.sleep(max(0.0, start + arrival.at - time.monotonic()))
            handles.append(self.engine.submit(arrival.prompt, greedy(arrival.num_new)))
        outputs = [handle.result() for handle in handles]
        return [[moment - start for moment in output.outputs[0].token_times] for output in outputs]

    def close(self) -> None:
        self.engine.close()


def equal_prompts(count: int, length: int, vocab_size: int) -> list[list[int]]:
    """The same ones in every run, of random ids."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(min(10, vocab_size - 1), vocab_size, (count, length), generator=generator).tolist()


def decode_seconds(contender: Contender, prompts: Sequence[list[int]], new_tokens: int) -> float:
    """Seconds of one decode step: a run with n new tokens minus a run with one is n − 1 of them."""
    alone = contender.generate(prompts, 1).seconds
    return (contender.generate(prompts, new_tokens).seconds - alone) / (new_tokens - 1)
