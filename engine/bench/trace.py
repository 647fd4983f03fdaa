"""Serve a list of requests step by step and keep what was seen: for notebooks and benchmarks that look inside.

A `Job` is a prompt and an output length. Everything is submitted at once, and outputs run to their length, so that two engines
that serve the same jobs do the same work, however they go about it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..engine import Engine
from ..events import Event
from ..outputs import RequestOutput
from ..sampling.params import SamplingParams
from ..snapshot import EngineSnapshot


class Job(NamedTuple):
    """`num_new` tokens after `prompt` (token ids or text)."""

    prompt: Sequence[int] | str
    num_new: int


@dataclass(slots=True)
class Trace:
    """What came out, how long it took in seconds, and every event."""

    outputs: list[RequestOutput]
    seconds: float
    events: list[Event]


def random_jobs(
    count: int, prompt: tuple[int, int], new: tuple[int, int], *, vocab_size: int, seed: int = 0
) -> list[Job]:
    """Prompts of random ids and output lengths, both uniform over their ranges, ends included."""
    draw = random.Random(seed)
    return [
        Job([draw.randrange(vocab_size) for _ in range(draw.randint(*prompt))], draw.randint(*new))
        for _ in range(count)
    ]


def greedy(num_new: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True)


def serve(
    engine: Engine,
    jobs: Sequence[Job],
    each_step: Callable[[EngineSnapshot, list[Event]], None] | None = None,
    *,
    params: Callable[[int], SamplingParams] = greedy,
) -> Trace:
    """Submit all jobs, each with `params(num_new)`, and step until they are done; `each_step` sees the snapshot and the
    events of each step. The engine is left paused or running as it was. Raises what a request raises."""
    was_running = engine.state == "running"
    engine.pause()
    seen = engine.events.next_index
    started, events = time.perf_counter(), []
    handles = [engine.submit(job.prompt, params(job.num_new)) for job in jobs]
    while not all(handle.done for handle in handles):
        engine.step()
        new, seen, _ = engine.events.since(seen)
        events += new
        if each_step:
            each_step(engine.snapshot(), new)
    seconds = time.perf_counter() - started
    if was_running:
        engine.resume()
    return Trace([handle.result() for handle in handles], seconds, events)
