"""A request that loses its blocks after k tokens says what transformers says, whether its KV is computed again or comes back.

An older request is still in its prefill and takes a block in every step, so it writes into what the victim has just lost.
"""

from types import SimpleNamespace

import pytest
import tiny
import torch
from grid import MAIN
from kvscope.engine import EngineConfig, EventKind, SamplingParams
from kvscope.engine.core import EngineCore
from kvscope.engine.kvcache.storage import KVStorage
from kvscope.engine.models.loader import load_model
from kvscope.kernels import ops

pytestmark = pytest.mark.usefixtures("one_thread")
KERNELS = ops.resolve("cpu", "cpu", torch.float32)
SIZE, NEW_TOKENS = 4, 12
OLDER, VICTIM = [*MAIN, *MAIN[:15]], MAIN[20:29]
MODELS = {
    "llama": ("llama", {}),
    "windows": (
        "gemma3_text",
        {"head_dim": 16, "query_pre_attn_scalar": 9, "sliding_window": 7, "sliding_window_pattern": 3, "num_hidden_layers": 6},
    ),
}  # fmt: skip
CACHES = {
    "off": {"enable_prefix_caching": False},
    "hash": {"prefix_cache": "hash"},
    "radix": {"prefix_cache": "radix"},
}
MODES = {"recompute": {}, "swap": {"preemption_mode": "swap", "num_cpu_blocks": 64}}


@pytest.fixture(scope="module", params=MODELS)
def loaded(request, tmp_path_factory):
    model_type, options = MODELS[request.param]
    folder = tiny.tiny_model(tmp_path_factory.mktemp(model_type), model_type, tokenizer=False, **options)
    files = SimpleNamespace(folder=folder, name="tiny", source="a test")
    model = load_model(files, dtype=torch.float32, device="cpu", kernels=KERNELS)
    return model, {len(p): tiny.oracle(folder, p, NEW_TOKENS) for p in (OLDER, VICTIM)}


def serve(model, *, params, preempt_after=None, **options):
    """(core, blocks that the victim lost, blocks that the older one had when the next step was over)."""
    config = EngineConfig(
        block_size=SIZE, num_blocks=160, max_model_len=128, long_prefill_token_threshold=SIZE, **options
    )
    storage = KVStorage(
        model.spec.kv_groups, num_blocks=160, block_size=SIZE, dtype=torch.float32, device="cpu", kernels=KERNELS,
        num_cpu_blocks=config.num_cpu_blocks,
    )  # fmt: skip
    core, lost, taken = EngineCore(model, storage, config), set(), set()
    core.add_request(OLDER, SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True))
    core.add_request(VICTIM, params)
    older, victim = core.get(1).children[0], core.get(2).children[0]
    while core.has_work:
        core.step()
        core.check_integrity()
        if preempt_after is not None and victim.num_output_tokens == preempt_after:
            lost = {block for seq in core.get(2).children for table in seq.block_tables for block in table} - {0}
            assert older.is_prefill and core.preempt(2)
            core.check_integrity()
            core.step()
            taken, preempt_after = {block for table in older.block_tables for block in table}, None
            core.check_integrity()
    return core, lost, taken


def told(core, kind):
    return [event for event in core.events.since(0)[0] if event.kind is kind]


@pytest.mark.parametrize("generated", [0, 1, SIZE - 1, SIZE, SIZE + 1])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("mode", MODES)
def test_the_text_is_that_of_transformers(loaded, mode, cache, generated):
    model, expected = loaded
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    core, lost, taken = serve(model, params=params, preempt_after=generated, **MODES[mode], **CACHES[cache])
    assert [core.get(i).children[0].output_token_ids for i in (1, 2)] == list(expected.values())
    assert cache != "off" or lost & taken, "the older one wrote into what the victim had"
    (resumed,) = told(core, EventKind.RESUMED)
    moved = [
        event.numbers["blocks"] for kind in (EventKind.SWAPPED_OUT, EventKind.SWAPPED_IN) for event in told(core, kind)
    ]
    assert moved == ([len(lost)] * 2 if mode == "swap" else [])
    computed = core.metrics()["kvscope:computed_tokens_total"] - len(OLDER) - len(VICTIM) - 2 * (NEW_TOKENS - 1)
    if mode == "swap":
        assert computed == 0, "nothing is computed again"
    elif (
        cache == "off"
    ):  # in the step of the preemption it computed SIZE tokens of its prompt, or all of it and its text
        assert computed == (SIZE if not generated else len(VICTIM) + generated - 1)
    else:
        assert resumed.numbers["cached_tokens"] + resumed.numbers["recompute_tokens"] == len(VICTIM) + generated


@pytest.mark.parametrize("generated", [1, SIZE, SIZE + 1])
@pytest.mark.parametrize("cache", CACHES)
def test_three_samples_go_on_where_they_were(loaded, cache, generated):
    model, _ = loaded
    params = SamplingParams(n=3, temperature=1.0, seed=7, max_tokens=NEW_TOKENS, ignore_eos=True)
    texts = []
    for preempt_after in (None, generated):
        core, lost, _ = serve(model, params=params, preempt_after=preempt_after, **MODES["swap"], **CACHES[cache])
        texts.append([seq.output_token_ids for seq in core.get(2).children])
    assert texts[0] == texts[1] and len(set(map(tuple, texts[0]))) == 3
    (out,), (back,) = told(core, EventKind.SWAPPED_OUT), told(core, EventKind.SWAPPED_IN)
    assert out.numbers["samples"] == 3 and out.numbers["blocks"] == back.numbers["blocks"] == len(lost)
    assert (
        core.metrics()["kvscope:blocks_swapped_out_total"]
        == core.metrics()["kvscope:blocks_swapped_in_total"]
        == len(lost)
    )
