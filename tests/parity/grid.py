"""The settings under which greedy text must not change, and the run that tries one of them on a tiny model.

Seven prompts of 1 to 60 tokens, two of them sharing a prefix of 33; oracle ids come from transformers, one prompt at a time.

block_size, chunk   tokens a block, and the budget of a step
cache    off; cold (on, nothing in it); warm (on, and all requests have run before); the same with a radix tree, whose hits end
         inside blocks
pool     ample; small: too small for the seven, or for three samples, so that some lose their blocks
company  alone: the main prompt by itself; among 7: with the six others, which arrive one a step
mode     what becomes of KV that loses its blocks: recompute, or swap
policy   every scheduling policy; with priority some of the six come before the main prompt
samples  1, greedy; or 3 that may choose among one token, which is the greedy one, and so fork, share blocks and copy them
preempt_after   the main request loses its blocks by hand when it has so many output tokens: 0, 1, and around a block's size.
         None: nobody does it, but in a small pool alone, which one request just fits, where it happens twice

SETTINGS is the product of the first five, which `make test` runs whole; `product()` that of all nine, which `make test-full` runs
whole and `make test` in the rows of a list that covers every three values that can meet.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tiny
from kvscope.engine import Cause, EventKind
from kvscope.engine.config import EngineConfig
from kvscope.engine.core import EngineCore
from kvscope.engine.kvcache.prefix_cache import common_block_size
from kvscope.engine.kvcache.storage import KVStorage
from kvscope.engine.models.base import Model, with_block_size
from kvscope.engine.sampling.beam_search import common_prefix
from kvscope.engine.sampling.params import SamplingParams
from kvscope.engine.scheduling.policies import POLICIES
from kvscope.kernels.ops import Ops

NEW_TOKENS = 36  # at most
_TEXT = [(61 * i * i + 17 * i + 5) % 256 for i in range(400)]
MAIN = _TEXT[:45]
START = MAIN[:33]
MATES = [_TEXT[100:101], _TEXT[110:117], START + _TEXT[200:207], _TEXT[120:152], START, _TEXT[160:220]]
PRIORITIES = (1, 0, 1, 2, 0, 1, 2)
MAX_MODEL_LEN = 128
HELD_BACK = 7  # tokens of a prompt in one step, where it is to lose its blocks before its first output token
VALUES = {
    "block_size": (1, 3, 4, 16, 32),
    "chunk": (7, 64, 512),
    "cache": ("off", "cold", "warm", "radix-cold", "radix-warm"),
    "pool": ("ample", "small"),
    "company": ("alone", "among7"),
    "mode": ("recompute", "swap"),
    "policy": tuple(POLICIES),
    "samples": (1, 3),
    "preempt_after": ("0", "1", "bs-1", "bs", "bs+1"),
}


class Setting(NamedTuple):
    block_size: int | dict[str, int]
    chunk: int
    cache: str
    pool: str
    company: str
    mode: str = "recompute"
    policy: str = "fcfs"
    samples: int = 1
    preempt_after: str | None = None

    def __str__(self) -> str:
        size = "x".join(map(str, self.block_size.values())) if isinstance(self.block_size, dict) else self.block_size
        name = f"bs{size}-chunk{self.chunk}-{self.cache}-{self.pool}-{self.company}"
        if self.preempt_after is None:
            return name
        return f"{name}-{self.mode}-{self.policy}-n{self.samples}-after{self.preempt_after}"

    @property
    def options(self) -> dict[str, object]:
        """Those of EngineConfig that do not depend on the model."""
        return {
            "block_size": self.block_size,
            "max_model_len": MAX_MODEL_LEN,
            "max_num_batched_tokens": self.chunk,
            "enable_prefix_caching": self.cache != "off",
            "prefix_cache": "radix" if self.cache.startswith("radix") else "hash",
            "preemption_mode": self.mode,
            "scheduling_policy": self.policy,
            "long_prefill_token_threshold": HELD_BACK if self.preempt_after == "0" else 0,
            "watermark": 0,  # admit as many as fit, so that they run out of blocks when they grow
        }

    @property
    def moments(self) -> tuple[int, ...]:
        """Numbers of output tokens after which the main request loses its blocks by hand."""
        if self.preempt_after is None:
            return (1, 9) if (self.pool, self.company) == ("small", "alone") else ()
        size = self.block_size
        return ({"0": 0, "1": 1, "bs-1": size - 1, "bs": size, "bs+1": size + 1}[self.preempt_after],)

    @property
    def new_tokens(self) -> int:
        """So many that it goes on for a while after the last of these moments."""
        return 24 if self.preempt_after is None else max(12, self.block_size + 4)

    @property
    def prompts(self) -> list[list[int]]:
        return [MAIN] if self.company == "alone" else [MAIN, *MATES]


SETTINGS = [
    Setting(*point)
    for point in itertools.product(
        (1, 3, 4, 16, 32), (7, 64, 512), ("off", "cold", "warm"), ("ample", "small"), ("alone", "among7")
    )
] + [
    Setting(*point)
    for point in itertools.product(
        (1, 3, 4, 16), (7, 64), ("radix-cold", "radix-warm"), ("ample", "small"), ("alone", "among7")
    )
]


@cache
def product() -> tuple[list[Setting], int]:
    """(every setting that can be, the number of those that EngineConfig refuses). Of two that come to the same, as with blocks
    of one token, where 0 is bs-1, there is the first."""
    points = {(s[:-1], s.moments): s for s in reversed([*map(Setting._make, itertools.product(*VALUES.values()))])}
    settings = [s for s in reversed(points.values()) if _is_legal(s.cache, s.mode, s.policy)]
    return settings, len(points) - len(settings)


@cache
def _is_legal(cache: str, mode: str, policy: str) -> bool:
    """Whether EngineConfig takes them together; nothing else that differs between settings is ever refused."""
    setting = Setting(4, 64, cache, "ample", "alone", mode, policy)
    try:
        EngineConfig(**setting.options, num_cpu_blocks=8 * (mode == "swap"))
    except ValueError as refusal:
        assert "needs enable_prefix_caching=True" in str(refusal)
        return False
    return True


def tuples_of(settings: Iterable[Setting], strength: int) -> np.ndarray:
    """Which `strength` values meet in each setting: int [settings, choices of columns], a number for each combination."""
    places = [{value: place for place, value in enumerate(values)} for values in VALUES.values()]
    codes = np.array([[place[value] for place, value in zip(places, s, strict=True)] for s in settings])
    columns, first = [], 0
    for chosen in itertools.combinations(range(len(VALUES)), strength):
        sizes = [len(places[i]) for i in chosen]
        columns.append(first + np.ravel_multi_index(codes[:, chosen].T, sizes))
        first += int(np.prod(sizes))
    return np.stack(columns, axis=1)


def covering(settings: list[Setting], strength: int = 3) -> list[Setting]:
    """Some of the settings, in which every `strength` values meet that meet in any: of those that show the first combination
    which is missing, the one that shows most others."""
    tuples = tuples_of(settings, strength)
    last_of = tuples.max(axis=0)  # the highest number of each choice of columns; the next one's are above
    missing = np.zeros(last_of[-1] + 1, bool)
    missing[tuples] = True
    chosen = []
    while missing.any():
        wanted = missing.argmax()
        some = np.flatnonzero(tuples[:, np.searchsorted(last_of, wanted)] == wanted)
        best = some[missing[tuples[some]].sum(axis=1).argmax()]
        missing[tuples[best]] = False
        chosen.append(settings[best])
    return chosen


@cache
def expected(folder: Path) -> list[list[int]]:
    return [tiny.oracle(folder, prompt, NEW_TOKENS) for prompt in (MAIN, *MATES)]


class Run(NamedTuple):
    outputs: list[list[list[int]]]  # ids of each sample of each prompt
    by_hand: int  # preemptions
    preemptions: int  # others
    cached: list[int]  # prompt tokens found in the cache at first admission
    copies: int  # of blocks that others went on reading


def check(model: Model, kernels: Ops, folder: Path, setting: Setting) -> None:
    """Serve the requests of one setting; assert oracle ids, and that the setting was what it says it is."""
    prompts, groups = setting.prompts, with_block_size(model.spec.kv_groups, setting.block_size)
    has_windows = any(group.window for group in groups)
    texts = [ids[: setting.new_tokens] for ids in expected(folder)]
    wanted = [[ids] * setting.samples for ids in texts[: len(prompts)]]
    core = make_core(model, kernels, setting)
    known = []
    if setting.cache.endswith("warm"):
        known = (
            [START, *prompts[1:]] if setting.preempt_after == "0" else prompts
        )  # it needs a step without an output token
        outputs = [texts[[MAIN, *MATES].index(prompt)] for prompt in known]
        assert serve(core, setting, known).outputs == [[ids] * setting.samples for ids in outputs]
        known = [prompt + ids for prompt, ids in zip(known, outputs, strict=True)]
    run = serve(core, setting, prompts, moments=setting.moments)
    assert run.outputs == wanted
    overtaken = (setting.pool, setting.policy) == ("small", "priority")  # it may have lost them before
    assert run.by_hand == len(setting.moments) or overtaken
    crowded = setting.pool == "small" and (setting.samples, setting.company) != (1, "alone")
    if setting.pool == "ample":
        assert run.preemptions == 0
    elif not has_windows and not setting.moments:  # with windows seven may fit into what one long prefill needs
        assert run.preemptions or not crowded
    if setting.mode == "swap" and run.by_hand:
        assert (
            core.metrics()["kvscope:blocks_swapped_out_total"] >= core.metrics()["kvscope:blocks_swapped_in_total"] > 0
        )
    if setting.cache == "off":
        assert not any(run.cached)
    if known and setting.pool == "ample":
        unit = 1 if setting.cache.startswith("radix") else common_block_size(groups)
        longest = [max(min(common_prefix([prompt, text]), len(prompt) - 1) for text in known) for prompt in prompts]
        assert run.cached == [tokens // unit * unit for tokens in longest]
    if setting.samples > 1 and setting.pool == "ample":
        apart = setting.mode == "recompute" and setting.moments == (
            1,
        )  # computed again before anyone wrote, each alone
        partly_filled = sum(len(p) % group.block_size > 0 for p in prompts[apart:] for group in groups)
        assert run.copies == (setting.samples - 1) * partly_filled
    core.check_integrity()


def make_core(model: Model, kernels: Ops, setting: Setting) -> EngineCore:
    groups = with_block_size(model.spec.kv_groups, setting.block_size)
    lengths = [len(prompt) + setting.new_tokens for prompt in setting.prompts]
    if setting.pool == "ample":  # twice, so that a warm cache loses nothing to the run that reads it
        num_blocks = 2 + 2 * setting.samples * sum(-(-n // group.block_size) for n in lengths for group in groups)
    else:
        largest = max(sum(group.most_blocks(length, setting.chunk) for group in groups) for length in lengths)
        num_blocks = 1 + largest + (setting.company != "alone")
    num_cpu_blocks = 2 * num_blocks if setting.mode == "swap" else 0
    config = EngineConfig(**setting.options, num_blocks=num_blocks, num_cpu_blocks=num_cpu_blocks)
    spec = model.spec
    storage = KVStorage(
        spec.kv_groups,
        num_blocks=num_blocks,
        block_size=setting.block_size,
        dtype=spec.dtype,
        device=spec.device,
        kernels=kernels,
        num_cpu_blocks=num_cpu_blocks,
    )
    return EngineCore(model, storage, config)


def serve(core: EngineCore, setting: Setting, prompts: list[list[int]], *, moments: tuple[int, ...] = ()) -> Run:
    """The first prompt, then the others, one a step; the first loses its blocks at these moments."""
    sampling = {"n": setting.samples, "temperature": 1.0, "top_k": 1} if setting.samples > 1 else {"temperature": 0}
    params = SamplingParams(**sampling, max_tokens=setting.new_tokens, ignore_eos=True)
    priorities = iter(PRIORITIES if setting.policy == "priority" else [0] * len(prompts))
    first_event, left = core.events.next_index, list(moments)
    ids = [core.add_request(prompts[0], params, priority=next(priorities))]
    waiting, preemptions, by_hand = list(prompts[1:]), 0, 0
    main = core.get(ids[0]).children[0]
    while core.has_work or waiting:
        preemptions += len(core.step().preempted)
        if waiting:
            ids.append(core.add_request(waiting.pop(0), params, priority=next(priorities)))
        if left and main.num_output_tokens == left[0] and main.status == "running":
            by_hand += core.preempt(ids[0])
            left.pop(0)
    requests = [core.get(i) for i in ids]
    outputs = [[sample.output_token_ids for sample in request.children] for request in requests]
    events, _, lost = core.events.since(first_event)
    assert not lost
    copies = sum(e.kind is EventKind.COPIED and e.cause is Cause.SHARED_WRITE for e in events)
    return Run(outputs, by_hand, preemptions, [request.num_cached_tokens for request in requests], copies)
