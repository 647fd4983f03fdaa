"""Scheduling policies: in which order requests are admitted, scheduled, and robbed of their blocks.

| scheduling_policy | the line | the running | source |
|---|---|---|---|
| fcfs | by arrival | by arrival | |
| priority | by priority (the lowest number first), then arrival; may take the place of whoever runs with a worse one | the same | vLLM |
| sjf | by the length of the prompt, the shortest first | by arrival | |
| lpm | by the longest prefix that is cached now | by arrival | SGLang, arXiv 2312.07104 |
| dfs-weight | depth first through the tree of cached prefixes, where more wait first | by arrival | SGLang |
| prefill-first | by arrival; a step computes prompts, or one token for everybody, never both | by arrival | vLLM of 2023 |
| static | by arrival; nobody joins a batch before all of it have ended, and rows are padded to the longest | by arrival | transformers |

With lpm and dfs-weight, of several that wait with a long uncached prefix in common one goes first and warms the cache.
Whoever was preempted goes before everyone who never ran (with priority: in its place). Victims are taken from the end of the
running order. A policy is a few keys; the rules that all of them obey stand in `scheduler`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..events import Cause
from ..kvcache.prefix_cache import ExtraKeys, Hit
from ..request import Blocked, Sequence

MAX_CACHE_AWARE = 128  # of a longer line the order of arrival holds: to look everyone up in every step costs too much
WORTH_WAITING = 32  # tokens of a common prefix
Key = tuple[int, ...]
Find = Callable[[Sequence], Hit]
Hits = dict[Sequence, Hit]  # of those that never ran, by arrival


def by_arrival(seq: Sequence) -> Key:
    return seq.key


def by_priority(seq: Sequence) -> Key:
    return (seq.request.priority, *seq.key)


def by_prompt_length(seq: Sequence) -> Key:
    return (seq.request.num_prompt_tokens, *seq.key)


def longest_prefix_first(hits: Hits, block_size: int) -> list[Sequence]:
    """Who finds most of its text in the cache goes first; equal ones in order of arrival."""
    return sorted(hits, key=lambda seq: -hits[seq].num_tokens)


def depth_first_by_weight(hits: Hits, block_size: int) -> list[Sequence]:
    """Walk the tree of the prefixes that are cached, block by block; of two branches the one under which more wait comes first, so
    that a branch is used up before its blocks are needed for another. Equal weights: in order of arrival."""
    return _walk(list(hits), hits, 0, block_size)


def _walk(branch: list[Sequence], hits: Hits, depth: int, size: int) -> list[Sequence]:
    """`branch` has its first `depth` tokens in common. Equal text may be found in several blocks: text is compared."""
    while True:
        children: dict[tuple[ExtraKeys, bytes], list[Sequence]] = {}
        ended = []
        for seq in branch:
            if depth + size > hits[seq].num_tokens:
                ended.append(seq)
                continue
            key = (seq.request.extra_keys, seq.token_ids[depth : depth + size].tobytes())
            children.setdefault(key, []).append(seq)
        if len(children) != 1 or ended:
            break
        depth += size  # no fork here
    heaviest = sorted(children.values(), key=len, reverse=True)
    return [seq for child in heaviest for seq in _walk(child, hits, depth + size, size)] + ended


def held_back(order: list[Sequence], hits: Hits, running: list[Sequence], block_size: int) -> dict[Sequence, Blocked]:
    """Who waits because another, ahead of it or in its prefill now, computes a prefix that both have: at least the next
    `WORTH_WAITING` tokens that it does not find. One warms the cache, the others find it."""
    held: dict[Sequence, Blocked] = {}
    leaders: dict[tuple[ExtraKeys, bytes], Sequence] = {}
    prefills = [seq for seq in running if seq.is_prefill]
    for seq in order:
        found, keys = hits[seq].num_tokens, seq.request.extra_keys
        end = found // block_size * block_size + -(-WORTH_WAITING // block_size) * block_size
        if end >= seq.num_tokens or seq.request.lacks_prompt_logprobs:
            continue
        start = seq.token_ids[:end]
        leader = leaders.setdefault((keys, start.tobytes()), seq)
        if leader is seq:
            busy = (other for other in prefills if other.num_computed_tokens < end <= other.prefill_end)
            same = (other for other in busy if other.request.extra_keys == keys and other.token_ids[:end] == start)
            leader = next(same, seq)
        if leader is not seq:
            held[seq] = Blocked(Cause.SHARED_PREFIX, needed=end - found, behind=leader.request.id)
    return held


@dataclass(frozen=True, slots=True)
class Policy:
    """`line_key` orders those that never ran, `run_key` those that run and those that lost their blocks; lower goes first."""

    line_key: Callable[[Sequence], Key] = by_arrival
    run_key: Callable[[Sequence], Key] = by_arrival
    arrange: Callable[[Hits, int], list[Sequence]] | None = None  # the line's order at each admission
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
