"""Greedy ids equal transformers' over the whole product of settings, on a tiny GPT-2 through the adapter."""

from types import SimpleNamespace

import adapter_models
import pytest
import tiny
import torch
from grid import MAIN, MATES, NEW_TOKENS, SETTINGS, check
from kvscope.engine.models.transformers_adapter import load_adapter
from kvscope.kernels import ops

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return adapter_models.make(tmp_path_factory.mktemp("grid"), "gpt2")


@pytest.fixture(scope="module")
def loaded(folder):
    kernels = ops.resolve("cpu", "cpu", torch.float32)
    files = SimpleNamespace(folder=folder, name="tiny", source="a test")
    return load_adapter(files, dtype=torch.float32, device="cpu", kernels=kernels), kernels


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_same_ids_in_every_setting(loaded, folder, setting):
    check(*loaded, folder, setting)


def test_no_oracle_step_is_a_near_tie(folder):
    """Where the two best logits are closer than rounding, equal ids would be luck."""
    for prompt in (MAIN, *MATES):
        ids = prompt + tiny.oracle(folder, prompt, NEW_TOKENS)
        best = tiny.oracle_logits(folder, ids)[len(prompt) - 1 : -1].topk(2).values
        assert float((best[:, 0] - best[:, 1]).min()) > 1e-3
