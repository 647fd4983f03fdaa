"""Greedy ids equal transformers' over the whole product of settings, on a tiny Llama through the native decoder.

`-s` shows how many settings a test of the whole product has tried.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import tiny
import torch
from grid import MAIN, MATES, NEW_TOKENS, SETTINGS, VALUES, check, covering, product, tuples_of
from kvscope.engine.models.loader import load_model
from kvscope.kernels import ops

pytestmark = pytest.mark.usefixtures("one_thread")
COVERING = covering(product()[0])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.tiny_llama(tmp_path_factory.mktemp("grid"), tokenizer=False)


@pytest.fixture(scope="module", params=["reference", "cpu"])
def loaded(request, folder):
    return load(folder, request.param)


@pytest.fixture(scope="module")
def cpu(folder):
    return load(folder, "cpu")


def load(folder, kernels):
    kernels = ops.resolve(kernels, "cpu", torch.float32)
    files = SimpleNamespace(folder=folder, name="tiny", source="a test")
    return load_model(files, dtype=torch.float32, device="cpu", kernels=kernels), kernels


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_same_ids_in_every_setting(loaded, folder, setting):
    check(*loaded, folder, setting)


def test_the_product_is_whole_and_the_list_covers_it():
    settings, refused = product()
    assert (len(settings), refused) == (36_432, 2_208)
    assert {name: set(column) for name, column in zip(VALUES, zip(*settings, strict=True), strict=True)} == {
        name: set(values) for name, values in VALUES.items()
    }
    assert np.array_equal(np.unique(tuples_of(COVERING, 3)), np.unique(tuples_of(settings, 3)))
    assert len(COVERING) < 250


@pytest.mark.parametrize("setting", COVERING, ids=str)
def test_same_ids_wherever_three_values_meet(cpu, folder, setting):
    check(*cpu, folder, setting)


@pytest.mark.full
@pytest.mark.parametrize("block_size", VALUES["block_size"])
@pytest.mark.parametrize("policy", VALUES["policy"])
def test_same_ids_in_the_whole_product(cpu, folder, policy, block_size):
    failed, settings = [], [s for s in product()[0] if (s.policy, s.block_size) == (policy, block_size)]
    for setting in settings:
        try:
            check(*cpu, folder, setting)
        except Exception as error:  # the others are tried too: which fail together says why
            failed.append((str(setting), repr(error)[:300]))
    print(f"{policy}, blocks of {block_size}: {len(settings)} settings, {len(failed)} failures")
    assert not failed


def test_no_oracle_step_is_a_near_tie(folder):
    """Where the two best logits are closer than rounding, equal ids would be luck."""
    for prompt in (MAIN, *MATES):
        ids = prompt + tiny.oracle(folder, prompt, NEW_TOKENS)
        best = tiny.oracle_logits(folder, ids)[len(prompt) - 1 : -1].topk(2).values
        assert float((best[:, 0] - best[:, 1]).min()) > 1e-3
