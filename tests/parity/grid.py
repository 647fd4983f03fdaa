"""The settings under which greedy text must not change, and the run that tries one of them on a tiny model.

A setting is one point of: block size × chunk budget × prefix cache × pool × company. Seven prompts of 1 to 60 tokens, two
of them sharing a prefix of 33, 24 new tokens each; oracle ids come from transformers, one prompt at a time.

cache    off; cold (on, nothing in it); warm (on, and all requests have run before); the same with a radix tree, whose hits end
         inside blocks
pool     ample; small: too small for the seven, so that some lose their blocks and are computed again. Alone nobody takes
         blocks away, so there the request is preempted by hand, twice, in a pool that it just fits
company  alone: the main prompt by itself; among 7: with the six others, which arrive one a step
"""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path
from typing import NamedTuple

import tiny
from kvscope.engine.config import EngineConfig
from kvscope.engine.core import EngineCore
from kvscope.engine.kvcache.storage import KVStorage
from kvscope.engine.models.base import Model
from kvscope.engine.sampling.params import SamplingParams
from kvscope.kernels.ops import Ops

NEW_TOKENS = 24
_TEXT = [(61 * i * i + 17 * i + 5) % 256 for i in range(400)]
MAIN = _TEXT[:45]
MATES = [_TEXT[100:101], _TEXT[110:117], MAIN[:33] + _TEXT[200:207], _TEXT[120:152], MAIN[:33], _TEXT[160:220]]
MAX_MODEL_LEN = 128


class Setting(NamedTuple):
    block_size: int
    chunk: int
    cache: str
    pool: str
    company: str

    def __str__(self) -> str:
        return f"bs{self.block_size}-chunk{self.chunk}-{self.cache}-{self.pool}-{self.company}"


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
def expected(folder: Path) -> list[list[int]]:
    return [tiny.oracle(folder, prompt, NEW_TOKENS) for prompt in (MAIN, *MATES)]


def check(model: Model, kernels: Ops, folder: Path, setting: Setting) -> None:
    """Serve the requests of one setting; assert oracle ids, and that the setting was what it says it is."""
    prompts = [MAIN] if setting.company == "alone" else [MAIN, *MATES]
    core = make_core(model, kernels, setting, prompts)
    if setting.cache.endswith("warm"):
        assert serve(core, prompts)[0] == expected(folder)[: len(prompts)]
    outputs, preemptions, cached = serve(core, prompts, by_hand=(setting.pool, setting.company) == ("small", "alone"))
    assert outputs == expected(folder)[: len(prompts)]
    has_windows = any(group.window for group in model.spec.kv_groups)
    if (
        setting.pool == "ample" or not has_windows
    ):  # with windows seven short requests may fit into what one long prefill needs
        assert (preemptions > 0) == (setting.pool == "small")
    if setting.cache == "off":
        assert cached == 0
    if setting.cache.endswith("warm") and setting.pool == "ample":
        unit = 1 if setting.cache.startswith("radix") else setting.block_size
        assert cached == sum((len(p) - 1) // unit * unit for p in prompts)
    core.check_integrity()


def make_core(model: Model, kernels: Ops, setting: Setting, prompts: list[list[int]]) -> EngineCore:
    groups, size = model.spec.kv_groups, setting.block_size
    lengths = [len(prompt) + NEW_TOKENS for prompt in prompts]
    if setting.pool == "ample":  # twice, so that a warm cache loses nothing to the run that reads it
        num_blocks = 2 + 2 * len(groups) * sum(-(-length // size) for length in lengths)
    else:
        largest = max(sum(g.most_blocks(length, size, setting.chunk) for g in groups) for length in lengths)
        num_blocks = 1 + largest + (setting.company != "alone")
    config = EngineConfig(
        block_size=setting.block_size,
        num_blocks=num_blocks,
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=setting.chunk,
        enable_prefix_caching=setting.cache != "off",
        prefix_cache="radix" if setting.cache.startswith("radix") else "hash",
        watermark=0,  # admit as many as fit, so that they run out of blocks when they grow
    )
    spec = model.spec
    storage = KVStorage(
        spec.kv_groups,
        num_blocks=num_blocks,
        block_size=setting.block_size,
        dtype=spec.dtype,
        device=spec.device,
        kernels=kernels,
    )
    return EngineCore(model, storage, config)


def serve(core: EngineCore, prompts: list[list[int]], *, by_hand: bool = False) -> tuple[list[list[int]], int, int]:
    """(output ids of each prompt, preemptions, prompt tokens found in the cache at first admission)."""
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    ids = [core.add_request(prompts[0], params)]
    waiting, preemptions, num_tokens = list(prompts[1:]), 0, 0
    while core.has_work or waiting:
        step = core.step()
        preemptions += len(step.preempted)
        if waiting:
            ids.append(core.add_request(waiting.pop(0), params))
        if by_hand and step.new_tokens:
            num_tokens += 1
            if num_tokens in (1, 9):
                preemptions += core.preempt(ids[0])
    requests = [core.get(i) for i in ids]
    outputs = [request.children[0].output_token_ids for request in requests]
    return outputs, preemptions, sum(request.num_cached_tokens for request in requests)
