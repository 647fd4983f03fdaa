"""The same grid where layers have windows: several KV groups, null blocks, and hits that need only what is seen; and where those
groups have blocks of different sizes."""

import itertools
from types import SimpleNamespace

import pytest
import tiny
import torch
from grid import SETTINGS, Setting, check, covering, product
from kvscope.engine.models.loader import load_model
from kvscope.kernels import ops

pytestmark = pytest.mark.usefixtures("one_thread")
KERNELS = ops.resolve("cpu", "cpu", torch.float32)
MODELS = {
    "mistral, all layers": ("mistral", {"sliding_window": 9}, [(9, 2)]),
    "gemma3, two of three": (
        "gemma3_text",
        {
            "head_dim": 20, "query_pre_attn_scalar": 9, "sliding_window": 7, "sliding_window_pattern": 3, "num_hidden_layers": 6,
        },
        [(0, 2), (7, 2), (7, 2)],
    ),
}  # fmt: skip
OTHERS = {
    "qwen2": ("qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}, [(0, 1), (7, 1)]),
    "qwen3": ("qwen3", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}, [(0, 1), (7, 1)]),
    "smollm3": ("smollm3", {"num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 6}, [(0, 1)] * 3 + [(6, 1)]),
    "phi3": ("phi3", {"sliding_window": 9}, [(9, 2)]),
    "gemma2": ("gemma2", {"head_dim": 20, "query_pre_attn_scalar": 9, "sliding_window": 9}, [(0, 1), (9, 1)]),
}  # fmt: skip
SIZES = [{"full": 32, "sliding": 16}, {"full": 4, "sliding": 6}, {"full": 3, "sliding": 1}, {"full": 4, "sliding": 16}]
CACHES = ("off", "cold", "warm", "radix-cold", "radix-warm")
TWO_SIZES = [
    Setting(*point)
    for point in itertools.product(
        SIZES, (7, 64), CACHES, ("ample", "small"), ("alone", "among7"), ("recompute", "swap"), ("fcfs",), (1, 3)
    )
]
SPLIT = Setting(block_size=3, chunk=7, cache="warm", pool="small", company="among7")


@pytest.fixture(scope="module", params=MODELS)
def loaded(request, tmp_path_factory):
    return load(tmp_path_factory.mktemp("model"), *MODELS[request.param])


def load(folder, model_type, options, groups):
    folder = tiny.tiny_model(folder, model_type, tokenizer=False, **options)
    files = SimpleNamespace(folder=folder, name="tiny", source="a test")
    model = load_model(files, dtype=torch.float32, device="cpu", kernels=KERNELS)
    assert [(group.window, len(group.layers)) for group in model.spec.kv_groups] == groups
    return model, folder


@pytest.mark.parametrize("family", OTHERS)
def test_every_family_with_windows_runs_beyond_them(tmp_path, family):
    model, folder = load(tmp_path, *OTHERS[family])
    check(model, KERNELS, folder, SPLIT)


@pytest.mark.parametrize("setting", SETTINGS[::7], ids=str)
def test_same_ids_with_windows(loaded, setting):
    check(loaded[0], KERNELS, loaded[1], setting)


@pytest.fixture(scope="module", params=["gemma3, two of three", "gemma2"])
def hybrid(request, tmp_path_factory):
    return load(tmp_path_factory.mktemp("hybrid"), *(MODELS | OTHERS)[request.param])


@pytest.mark.parametrize("setting", TWO_SIZES[::29], ids=str)
def test_same_ids_with_blocks_of_two_sizes(hybrid, setting):
    check(hybrid[0], KERNELS, hybrid[1], setting)


@pytest.mark.full
@pytest.mark.parametrize("setting", TWO_SIZES, ids=str)
def test_same_ids_with_blocks_of_two_sizes_in_every_setting(hybrid, setting):
    check(hybrid[0], KERNELS, hybrid[1], setting)


@pytest.mark.full
@pytest.mark.parametrize("setting", [*SETTINGS, *covering(product()[0])], ids=str)
def test_same_ids_with_windows_in_every_setting(loaded, setting):
    check(loaded[0], KERNELS, loaded[1], setting)
