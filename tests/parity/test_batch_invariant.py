"""batch_invariant=True: the logits behind every token of a request are the same, bit for bit, whatever else is in its steps,
however its prompt is cut into them, whatever is cached, and however often it loses its blocks."""

import random
import time
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import tiny
import torch
from kvscope.engine import Engine, EngineConfig, EngineCore, SamplingParams
from kvscope.engine.kvcache.storage import KVStorage
from kvscope.engine.models.hub import resolve
from kvscope.engine.models.loader import load_model
from kvscope.kernels import ops
from kvscope.kernels.invariant import batch_invariant

TEXT = [(61 * i * i + 17 * i + 5) % 256 for i in range(600)]
DTYPES = [torch.float32, torch.bfloat16]


class Setting(NamedTuple):
    mates: int  # other requests, with prompts of 1 to 60 tokens, older than ours
    budget: int  # tokens of a step
    cache: bool  # half of the prompt is found in the prefix cache
    preempted: bool  # twice


SETTINGS = [
    Setting(0, 7, False, False),
    Setting(0, 64, True, True),
    Setting(1, 512, True, False),
    Setting(7, 100, False, True),
    Setting(7, 2048, True, False),
]


class Recorder:
    """The model, and the logits of its last step."""

    def __init__(self, model):
        self.model, self.spec = model, model.spec

    def forward(self, batch, storage):
        logits = self.model.forward(batch, storage)
        self.logits = logits.clone()
        return logits


def record(model, kernels, text, setting, num_tokens=8):
    """Logits behind every new token of one request, float32 [num_tokens, vocab], and its ids."""
    config = EngineConfig(num_blocks=400, max_model_len=1024, max_num_batched_tokens=setting.budget, max_num_seqs=16,
                          enable_prefix_caching=setting.cache)  # fmt: skip
    storage = KVStorage(model.spec.kv_groups, num_blocks=400, block_size=config.block_size, dtype=model.spec.dtype,
                        device="cpu", kernels=kernels)  # fmt: skip
    recorder = Recorder(model)
    core, chance = EngineCore(recorder, storage, config), random.Random(5)
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    if setting.cache:
        core.add_request(text[: len(text) // 2], SamplingParams(temperature=0, max_tokens=1))
        while core.has_work:
            core.step()
    for _ in range(setting.mates):
        prompt = [chance.randrange(256) for _ in range(chance.choice([1, 5, 20, 60]))]
        core.add_request(prompt, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    ours, kept = core.add_request(text, params), []
    while not core.get(ours).finished:
        if ours in core.step().new_tokens:
            kept.append(recorder.logits[-1])  # the youngest request is the last row
            if setting.preempted and len(kept) in (1, 6):
                assert core.preempt(ours)
    assert (core.get(ours).num_cached_tokens > 0) == setting.cache
    return torch.stack(kept), core.get(ours).children[0].output_token_ids


def assert_invariant(model, kernels, text, settings=SETTINGS):
    alone, ids = record(model, kernels, text, Setting(0, 2048, False, False))
    for setting in settings:
        logits, same_ids = record(model, kernels, text, setting)
        assert torch.equal(logits, alone), f"{setting}: {(logits != alone).any(1).sum()} rows differ"
        assert same_ids == ids


def load(folder, kernels, dtype):
    files = SimpleNamespace(folder=folder, name="tiny", source="a test")
    return load_model(files, dtype=dtype, device="cpu", kernels=kernels)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Families that add something of their own: windows, soft caps, gelu over a width that fills no vector."""
    options = {"sliding_window": 270, "intermediate_size": 100, "max_position_embeddings": 1024}
    gemma = {"head_dim": 16, "query_pre_attn_scalar": 16}
    wanted = {"mistral": {}, "gemma2": gemma, "gemma3_text": gemma, "qwen3": {}}
    made = {
        name: tiny.tiny_model(tmp_path_factory.mktemp(name), name, tokenizer=False, **{**options, **own})
        for name, own in wanted.items()
    }
    return made | {"llama": tiny.tiny_llama(tmp_path_factory.mktemp("llama"), tokenizer=False)}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gemma3_text", "qwen3"])
def test_cpu_kernels(folders, family, dtype):
    kernels = batch_invariant(ops.resolve("cpu", "cpu", dtype))
    assert_invariant(load(folders[family], kernels, dtype), kernels, TEXT)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_reference_kernels_need_the_option_and_hold_it(folders, family, dtype):
    plain = ops.resolve("reference", "cpu", dtype)
    kernels, text, settings = batch_invariant(plain), TEXT[:40], SETTINGS[:1] + SETTINGS[3:4]
    assert_invariant(load(folders[family], kernels, dtype), kernels, text, settings)
    if dtype is torch.float32:
        with pytest.raises(AssertionError, match="rows differ"):
            assert_invariant(load(folders[family], plain, dtype), plain, text, settings)


def test_default_model_in_bfloat16_and_what_it_costs():
    files = resolve("default", source="wheel")
    plain = ops.resolve("cpu", "cpu", torch.bfloat16)
    kernels = batch_invariant(plain)
    model = load_model(files, dtype=torch.bfloat16, device="cpu", kernels=kernels)
    without = load_model(files, dtype=torch.bfloat16, device="cpu", kernels=plain)
    assert_invariant(model, kernels, TEXT[:200], SETTINGS[1:])
    seconds = {True: [], False: []}
    for _ in range(4):
        for invariant, one in ((True, model), (False, without)):
            started = time.perf_counter()
            record(one, one.kernels, TEXT[:200], Setting(7, 512, False, False))
            seconds[invariant].append(time.perf_counter() - started)
    print(f"batch_invariant=True takes {min(seconds[True]) / min(seconds[False]):.2f} of the time without")
    model.close()
    without.close()


def test_an_engine_serves_with_it_and_refuses_where_it_cannot(tmp_path, tiny_folder):
    with Engine(tiny_folder, dtype="float32", num_blocks=32, batch_invariant=True) as engine:
        assert engine.config.batch_invariant
        assert engine.generate("hello", SamplingParams(temperature=0, max_tokens=3))[0].finished
    gpt2 = tiny.tiny_model(tmp_path, "gpt2", n_embd=64, n_layer=2, n_head=4, n_positions=128)
    with pytest.raises(ValueError, match=r"batch_invariant=True: .* is computed by transformers"):
        Engine(gpt2, dtype="float32", num_blocks=32, batch_invariant=True)
    with pytest.raises(ValueError, match="batch_invariant=True: kernels='triton' multiply through cuBLAS"):
        batch_invariant(SimpleNamespace(name="triton"))
    with pytest.raises(ValueError, match="batch_invariant='yes': must be True or False"):
        EngineConfig(batch_invariant="yes")
