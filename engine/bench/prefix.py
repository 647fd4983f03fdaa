"""`kvscope bench prefix`: what a prefix cache saves, and what the order of the line does to it.

Chat: users share a system prompt and send their whole conversation again in every turn. The baseline computes all of it every
time. Tree: prompts that share their starts like the branches of a tree arrive in random order, and the pool is too small to keep
them all; the baseline is the order of arrival. All engines share one copy of the weights and take turns.
"""

from __future__ import annotations

import random
from functools import partial
from typing import Any

from ..engine import Engine
from ..outputs import RequestOutput
from .machine import alternate, facts
from .report import print_table
from .trace import Job, serve

CHAT = {
    "no cache": {"enable_prefix_caching": False},
    "hash chain": {"prefix_cache": "hash"},
    "radix tree": {"prefix_cache": "radix"},
}
TREE = {
    f"{name}, {policy}": options | {"scheduling_policy": policy, "num_blocks": 48, "max_num_seqs": 2}
    for name, options in CHAT.items()
    if name != "no cache"
    for policy in ("fcfs", "lpm")
}
HEADERS = ["workload", "engine", "seconds", "baseline / it", "prompt tokens", "found", "share found"]


def run(options) -> int:
    rows: list[list[Any]] = []
    with Engine(options.model, dtype=options.dtype, num_blocks=2) as weights:
        info = weights.info
        workloads = {
            "chat": (CHAT, partial(_chat, options.users, options.turns, options.system, options.new)),
            "tree": (TREE, _tree),
        }
        for workload, (engines, play) in workloads.items():
            outputs: dict[str, list[RequestOutput]] = {}
            runs = {
                name: partial(_play, play, outputs, name, options.model, {"dtype": options.dtype} | engine)
                for name, engine in engines.items()
            }
            seconds, ceilings = alternate(runs, options.repeats, info.spec)
            baseline = next(iter(seconds.values()))
            for name, took in seconds.items():
                prompts = sum(len(output.prompt_token_ids) for output in outputs[name])
                found = sum(output.num_cached_tokens for output in outputs[name])
                rows.append([workload, name, took, baseline / took, prompts, found, f"{found / prompts:.0%}"])
    workload = (
        f"chat: {options.users} users, {options.turns} turns, a system prompt of {options.system} tokens, {options.new} new tokens "
        f"a turn; tree: 27 prompts of 260 tokens in a pool of 47 blocks, 2 at once; median of {options.repeats} alternations"
    )
    print_table("kvscope bench prefix", facts(info, workload, ceilings), HEADERS, rows, options.json)
    return 0


def _play(play, outputs: dict[str, list[RequestOutput]], name: str, model: str, options: dict[str, Any]) -> float:
    """Seconds that the engine served; what came out goes to `outputs`."""
    with Engine(model, **{"num_blocks": 2000} | options) as engine:
        seconds, outputs[name] = play(engine)
    return seconds


def _chat(
    num_users: int, num_turns: int, system_tokens: int, num_new: int, engine: Engine
) -> tuple[float, list[RequestOutput]]:
    text = Words(engine, seed=1)
    system = text(system_tokens)
    talks = [system + text(20) for _ in range(num_users)]
    seconds, outputs = 0.0, []
    for _ in range(num_turns):
        trace = serve(engine, [Job(talk, num_new) for talk in talks])
        seconds += trace.seconds
        outputs += trace.outputs
        answers = [output.outputs[0].token_ids for output in trace.outputs]
        talks = [talk + answer + text(12) for talk, answer in zip(talks, answers, strict=True)]
    return seconds, outputs


def _tree(engine: Engine) -> tuple[float, list[RequestOutput]]:
    """Three topics of 150 tokens, three ideas of 80 under each, three thoughts of 30 under each of these."""
    text = Words(engine, seed=3)
    jobs = []
    for _ in range(3):
        topic = text(150)
        for _ in range(3):
            idea = topic + text(80)
            jobs += [Job(idea + text(30), 8) for _ in range(3)]
    text.draw.shuffle(jobs)
    trace = serve(engine, jobs)
    return trace.seconds, trace.outputs


class Words:
    """Texts of random tokens that nobody has seen before."""

    def __init__(self, engine: Engine, seed: int):
        self.draw = random.Random(seed)
        self.vocab_size = engine.info.spec.vocab_size

    def __call__(self, length: int) -> list[int]:
        return [self.draw.randrange(self.vocab_size) for _ in range(length)]
