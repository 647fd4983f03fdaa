"""The same grid where layers have windows: several KV groups, null blocks, and hits that need only what is seen."""

from types import SimpleNamespace

import pytest
import tiny
import torch
from grid import SETTINGS, check
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


@pytest.fixture(scope="module", params=MODELS)
def loaded(request, tmp_path_factory):
    model_type, options, groups = MODELS[request.param]
    folder = tiny.tiny_model(tmp_path_factory.mktemp(model_type), model_type, tokenizer=False, **options)
    files = SimpleNamespace(folder=folder, name="tiny", source="a test")
    model = load_model(files, dtype=torch.float32, device="cpu", kernels=KERNELS)
    assert [(group.window, len(group.layers)) for group in model.spec.kv_groups] == groups
    return model, folder


@pytest.mark.parametrize("setting", SETTINGS[::7], ids=str)
def test_same_ids_with_windows(loaded, setting):
    check(loaded[0], KERNELS, loaded[1], setting)


@pytest.mark.full
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_same_ids_with_windows_in_every_setting(loaded, setting):
    check(loaded[0], KERNELS, loaded[1], setting)
