"""Scheduling policies: in which order requests are admitted, scheduled, and robbed of their blocks.

| scheduling_policy | the line | the running | source |
|---|---|---|---|
| fcfs | by arrival | by arrival | |
| priority | by priority (the lowest number first), then arrival; may take the place of whoever runs with a worse one | the same | vLLM |
| sjf | by the length of the prompt, the shortest first | by arrival | |
| lpm | by the longest prefix that is cached now | by arrival | SGLang, arXiv 2312.07104 |
| dfs-weight | depth first through the tree of cached prefixes, where more wait first | by arrival | SGLang |
| prefill-first | by arrival; a step computes prompts, or one token for everybody, never both | by arrival | vLLM of 2023 |
| static | by arrival; nobody joins a batch before all of it have ended | by arrival | transformers |

Whoever was preempted goes before everyone who never ran (with priority: in its place). Victims are taken from the end of the
running order. A policy is a few keys; the rules that all of them obey stand in `scheduler`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..kvcache.prefix_cache import Hit
from ..request import Sequence

MAX_CACHE_AWARE = (
    128  # of a longer line the order of arrival holds: looking everyone up in every step would cost too much
)
UNCACHED = 32  # tokens: who finds no more than this waits while another that starts with the same so many computes them
Key = tuple[int, ...]
Find = Callable[[Sequence], Hit]


def by_arrival(seq: Sequence) -> Key:
    return seq.key


def by_priority(seq: Sequence) -> Key:
    return (seq.request.priority, *seq.key)


def by_prompt_length(seq: Sequence) -> Key:
    return (seq.request.num_prompt_tokens, *seq.key)


def longest_prefix_first(line: Iterable[Sequence], find: Find) -> list[Sequence]:
    """Who finds most of its text in the cache goes first. Of those that find next to nothing and start alike one goes first, and
    the others, which would compute the same at the same time, wait until it is there to be found."""
    waiting = sorted(line, key=by_arrival)
    cached = {seq: find(seq).num_tokens for seq in waiting}
    waiting.sort(key=lambda seq: -cached[seq])
    starts: set[bytes] = set()
    first, later = [], []
    for seq in waiting:
        start = seq.token_ids[:UNCACHED].tobytes()
        duplicate = cached[seq] <= UNCACHED and seq.num_tokens > UNCACHED and start in starts
        (later if duplicate else first).append(seq)
        starts.add(start)
    return first + later


def depth_first_by_weight(line: Iterable[Sequence], find: Find) -> list[Sequence]:
    """Walk the tree of the prefixes that are cached; of two branches the one under which more wait comes first, so that a branch is
    used up before its blocks are needed for another. Equal weights: in order of arrival."""
    hits = [(seq, find(seq)) for seq in sorted(line, key=by_arrival)]
    return _walk([(seq, hit.tables[0] if hit.tables else []) for seq, hit in hits], 0)


def _walk(branch: list[tuple[Sequence, list[int]]], depth: int) -> list[Sequence]:
    """`branch` shares its first `depth` blocks."""
    while True:
        children: dict[int, list[tuple[Sequence, list[int]]]] = {}
        for seq, blocks in branch:
            children.setdefault(blocks[depth] if depth < len(blocks) else -1, []).append((seq, blocks))
        ended = [seq for seq, _ in children.pop(-1, [])]
        if len(children) != 1 or ended:
            break
        depth += 1  # no fork here
    order = [seq for child in sorted(children.values(), key=len, reverse=True) for seq in _walk(child, depth + 1)]
    return order + ended


@dataclass(frozen=True, slots=True)
class Policy:
    """`line_key` orders those that never ran, `run_key` those that run and those that lost their blocks; lower goes first."""

    line_key: Callable[[Sequence], Key] = by_arrival
    run_key: Callable[[Sequence], Key] = by_arrival
    arrange: Callable[[Iterable[Sequence], Find], list[Sequence]] | None = None  # the line's order at each admission
    preempts: bool = False  # does a better place in the line take a worse one's blocks? Then line_key is run_key
    prefill_first: bool = False
    is_static: bool = False


POLICIES = {
    "fcfs": Policy(),
    "priority": Policy(by_priority, by_priority, preempts=True),
    "sjf": Policy(by_prompt_length),
    "lpm": Policy(arrange=longest_prefix_first),
    "dfs-weight": Policy(arrange=depth_first_by_weight),
    "prefill-first": Policy(prefill_first=True),
    "static": Policy(prefill_first=True, is_static=True),
}
