"""Random schedules: whatever is submitted, stepped, forked, cancelled, preempted, failed or reset, and in whatever order,
the books balance after every operation and every sample that ends has the text that it would have had alone."""

from __future__ import annotations

from typing import ClassVar

import pytest
import tiny
import torch
from kvscope.engine import EngineConfig, EngineCore
from kvscope.engine.kvcache import prefix_hash
from kvscope.engine.kvcache.eviction import STRATEGIES
from kvscope.engine.kvcache.storage import KVStorage
from kvscope.engine.models.hub import ModelFiles
from kvscope.engine.models.loader import load_model
from kvscope.kernels import ops
from schedules import EOS, Schedules, check


class TwoBlockSizes(Schedules):
    """KV groups whose blocks hold different numbers of tokens: a common block is one of either, or several of both."""

    sliding: ClassVar[dict[int, int]] = {1: 3, 2: 4, 3: 2, 4: 2, 8: 4}

    def make_core(self, options):
        if len({window > 0 for window in self.windows}) == 1:
            self.windows = (0, 3) if self.windows == (3,) else (0, 5)
        full = options["block_size"]
        sizes = {"full": full, "sliding": self.sliding[full]}
        return super().make_core(options | {"block_size": sizes, "windows": self.windows})


class LlamaSchedules(Schedules):
    """The same with a tiny Llama in float32, judged by transformers on each prompt alone. Samples of n > 1 run along."""

    kernels = ops.resolve("auto")
    oracle: ClassVar[dict[tuple[int, ...], list[int]]] = {}
    longest = 40

    def make_core(self, options):
        options = {k: v for k, v in options.items() if k != "windows"}
        config = EngineConfig(max_model_len=self.longest, **options)
        storage = KVStorage(
            self.llama.spec.kv_groups,
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            dtype=torch.float32,
            device="cpu",
            kernels=self.kernels,
            num_cpu_blocks=config.num_cpu_blocks,
        )
        return EngineCore(Breakable(self.llama), storage, config, eos_token_ids=[EOS])

    def check_pages(self):
        pass

    def expected(self, request, child):
        params, prompt = request.params, tuple(request.prompt_token_ids)
        if params.n > 1 or params.min_tokens:
            return request.children[child].output_token_ids
        if prompt not in self.oracle:
            self.oracle[prompt] = tiny.oracle(self.folder, prompt, self.longest - len(prompt))
        text = self.oracle[prompt][: request.max_tokens]
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else (EOS,))}
        return text[: next((i + 1 for i, token in enumerate(text) if token in ends), len(text))]


class Breakable:
    """A model that can be told to fail in the next step."""

    def __init__(self, model):
        self.model, self.spec = model, model.spec
        self.fault, self.broken_rows = None, ()

    def forward(self, batch, storage):
        fault, self.fault = self.fault, None
        if fault is not None:
            raise fault
        logits = self.model.forward(batch, storage)
        for row in self.broken_rows if len(logits) else ():
            logits[row % len(logits)] = torch.nan
        self.broken_rows = ()
        return logits


@pytest.fixture
def colliding_hash(monkeypatch):
    """Every key is equal: only the comparison of text and parent is left."""
    monkeypatch.setattr(prefix_hash, "hash_block", lambda parent_key, tokens: b"the same for everyone")


@pytest.fixture
def llama(tiny_folder):
    LlamaSchedules.folder = tiny_folder
    files = ModelFiles(folder=tiny_folder, source="test", name="tiny", checksum="")
    LlamaSchedules.llama = load_model(files, dtype=torch.float32, device="cpu", kernels=LlamaSchedules.kernels)
    yield
    del LlamaSchedules.llama


def test_random_schedules():
    check(Schedules, 60, 25)


def test_random_schedules_with_two_block_sizes():
    check(TwoBlockSizes, 60, 25)


def test_random_schedules_where_every_hash_collides(colliding_hash):
    check(Schedules, 15, 25)


def test_random_schedules_of_a_llama(llama):
    check(LlamaSchedules, 8, 25)


@pytest.mark.full
def test_many_random_schedules():
    check(Schedules, 1500, 50)


@pytest.mark.full
def test_many_random_schedules_with_two_block_sizes():
    check(TwoBlockSizes, 1500, 50)


@pytest.mark.full
def test_many_random_schedules_where_every_hash_collides(colliding_hash):
    check(Schedules, 200, 50)


@pytest.mark.full
def test_many_random_schedules_of_a_llama(llama):
    check(LlamaSchedules, 300, 50)


@pytest.mark.full
@pytest.mark.parametrize("policy", sorted(STRATEGIES))
@pytest.mark.parametrize("prefix_cache", ["hash", "radix"])
def test_a_hundred_thousand_operations_of_both_caches(prefix_cache, policy):
    """A twelfth of them a strategy and cache; each admission is held against a list of all cached texts."""

    class OfOneKind(Schedules):
        def make_core(self, options):
            kind = {"enable_prefix_caching": True, "prefix_cache": prefix_cache, "eviction_policy": policy}
            return super().make_core(options | kind)

    OfOneKind.__name__ = f"{prefix_cache}, {policy}"
    assert check(OfOneKind, 140, 60) >= 100_000 / 12
