"""The native decoder against transformers, in float32: every family, every option it says it implements."""

import functools
from types import SimpleNamespace

import pytest
import tiny
import torch
from kvscope.engine.models.decoder_config import FAMILIES, DecoderConfig, UnsupportedModel
from kvscope.engine.models.loader import load_model
from kvscope.engine.models.rope import ROPE_TYPES
from kvscope.kernels import ops
from steps import HandDealt
from transformers import AutoConfig

PROMPT = [(37 * i * i + 11 * i) % 256 for i in range(40)]
NEW_TOKENS = 48
GEMMA = {"head_dim": 20, "query_pre_attn_scalar": 9, "final_logit_softcapping": 8.0}
UNTIED = {"tie_word_embeddings": False, "num_key_value_heads": 4}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e3, "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + i for i in range(8)],
}  # fmt: skip
CASES = {
    "llama": ("llama", {}),
    "llama, untied, biases": ("llama", {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True}),
    "llama, as many KV heads": ("llama", {"num_key_value_heads": 4}),
    "llama, one KV head": ("llama", {"num_key_value_heads": 1}),
    "llama, heads of 24, 3 to a KV head": (
        "llama",
        {"hidden_size": 72, "head_dim": 24, "num_attention_heads": 6, "num_key_value_heads": 2},
    ),
    "llama, llama3 rope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 1e3, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "llama, linear rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e3, "factor": 4.0}}),
    "llama, dynamic rope": ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e3, "factor": 4.0}}),
    "llama, longrope": ("llama", {"rope_parameters": {**LONGROPE, "original_max_position_embeddings": 256}}),
    "llama, yarn": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 1e3, "factor": 4.0, "original_max_position_embeddings": 256,
            }
        },
    ),
    "mistral, window 9": ("mistral", {"sliding_window": 9}),
    "mistral, untied, as many KV heads, no window": ("mistral", {**UNTIED, "sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2, window 7 from layer 1": ("qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "qwen2, untied, as many KV heads, window switched off": ("qwen2", {**UNTIED, "use_sliding_window": False, "sliding_window": 7}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3, untied, as many KV heads, heads of 20, biases": ("qwen3", {**UNTIED, "head_dim": 20, "attention_bias": True}),
    "smollm3": ("smollm3", {"num_hidden_layers": 4}),
    "smollm3, untied, as many KV heads, window 6": ("smollm3", {**UNTIED, "num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 6}),
    "granite": (
        "granite",
        {"embedding_multiplier": 2.0, "attention_multiplier": 0.3, "residual_multiplier": 0.4, "logits_scaling": 3.0},
    ),
    "granite, untied, as many KV heads": ("granite", UNTIED),
    "phi3": ("phi3", {}),
    "phi3, untied, as many KV heads, window 9": (
        "phi3", {**UNTIED, "sliding_window": 9},
    ),
    "phi3, longrope": ("phi3", {"original_max_position_embeddings": 256, "rope_parameters": LONGROPE}),
    "phi3, half of each head rotated": (
        "phi3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e3, "partial_rotary_factor": 0.5}},
    ),
    "olmo2": ("olmo2", {}),
    "olmo2, untied, as many KV heads, biases": (
        "olmo2", {**UNTIED, "attention_bias": True},
    ),
    "olmo2, three layers": ("olmo2", {"num_hidden_layers": 3, "num_key_value_heads": 1}),
    "gemma2, window 9": ("gemma2", {**GEMMA, "sliding_window": 9, "attn_logit_softcapping": 5.0}),
    "gemma2, untied, as many KV heads": (
        "gemma2", {**GEMMA, **UNTIED, "sliding_window": 6},
    ),
    "gemma2, no caps, own types of layers": (
        "gemma2",
        {
            **GEMMA, "sliding_window": 8, "attn_logit_softcapping": None, "final_logit_softcapping": None,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"], "num_hidden_layers": 3,
        },
    ),
    "gemma3, window 7, every third layer global": (
        "gemma3_text", {**GEMMA, "sliding_window": 7, "sliding_window_pattern": 3, "num_hidden_layers": 7},
    ),
    "gemma3, untied, as many KV heads, linear rope": (
        "gemma3_text",
        {
            **GEMMA, **UNTIED, "sliding_window": 9, "sliding_window_pattern": 2, "num_hidden_layers": 4,
            "final_logit_softcapping": 4.0,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 30.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 1e3, "factor": 8.0},
            },
        },
    ),
}  # fmt: skip


def load(folder, kernels):
    files = SimpleNamespace(folder=folder, name=folder.name, source="a test")
    return load_model(files, dtype=torch.float32, device="cpu", kernels=kernels)


@functools.cache
def expected_ids(folder):
    return tiny.oracle(folder, PROMPT, NEW_TOKENS)


@pytest.fixture(scope="module", params=CASES)
def folder(request, tmp_path_factory):
    family, options = CASES[request.param]
    return tiny.tiny_model(tmp_path_factory.mktemp("model"), family, tokenizer=False, **options)


@pytest.fixture(params=["reference", "cpu"])
def kernels(request):
    return ops.resolve(request.param, "cpu", torch.float32)


def test_logits_and_greedy_ids_equal_transformers(folder, kernels):
    model = load(folder, kernels)
    expected = tiny.oracle_logits(folder, PROMPT)
    whole = HandDealt(model, kernels).step({0: PROMPT}, all_logits=True)
    torch.testing.assert_close(whole, expected, rtol=0, atol=1e-4)
    assert HandDealt(model, kernels).greedy(PROMPT, NEW_TOKENS) == expected_ids(folder)


def test_chunks_beside_another_row_change_nothing(folder, kernels):
    model = load(folder, kernels)
    expected = tiny.oracle_logits(folder, PROMPT)
    pool = HandDealt(model, kernels, block_size=3)
    pool.step({1: PROMPT[::-1][:5]})
    for start, stop in ((0, 7), (7, 8), (8, 20), (20, 40)):
        logits = pool.step({0: PROMPT[start:stop], 1: [start]}, all_logits=True)[: stop - start]
        torch.testing.assert_close(logits, expected[start:stop], rtol=0, atol=1e-4)


def test_spec_counts_what_transformers_counts(folder):
    model = load(folder, ops.resolve("reference"))
    reference = tiny.reference_model(folder)
    assert model.spec.num_parameters == sum(p.numel() for p in reference.parameters())
    assert model.spec.architecture == type(reference).__name__
    assert model.spec.tied_embeddings == reference.config.tie_word_embeddings
    assert model.spec.eos_token_ids == {tiny.EOS}


def test_a_step_that_samples_nothing_writes_the_cache_and_gives_no_logits(tiny_folder):
    kernels = ops.resolve("reference")
    pool = HandDealt(load(tiny_folder, kernels), kernels)
    assert pool.step({0: PROMPT[:8]}, sampled=[]).shape == (0, tiny.VOCAB_SIZE)
    after = pool.step({0: PROMPT[8:12]})
    torch.testing.assert_close(after[0], tiny.oracle_logits(tiny_folder, PROMPT[:12])[-1], rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_compared_tied_and_untied_with_shared_and_own_kv_heads(family):
    cases = [tiny.SMALL | options for its, options in CASES.values() if its == family]
    assert {case["tie_word_embeddings"] for case in cases} == {True, False}
    assert {case["num_attention_heads"] == case["num_key_value_heads"] for case in cases} == {True, False}


def test_every_kind_of_rope_is_compared():
    parameters = [options.get("rope_parameters", {}) for _, options in CASES.values()]
    assert {p.get("rope_type", "default") for p in parameters if "sliding_attention" not in p} == set(ROPE_TYPES)


FAR = {  # where the frequencies follow the length, all of these positions are before the border
    "default": ("llama", {"rope_type": "default"}, {}),
    "linear": ("llama", {"rope_type": "linear", "factor": 4.0}, {}),
    "dynamic": ("llama", {"rope_type": "dynamic", "factor": 4.0}, {}),
    "yarn": ("llama", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}, {}),
    "llama3": (
        "llama",
        {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        {},
    ),
    "longrope": ("phi3", LONGROPE, {"original_max_position_embeddings": 16384}),
    "half of each head rotated": ("phi3", {"rope_type": "default", "partial_rotary_factor": 0.5}, {}),
    "layers without rotation": ("smollm3", {"rope_type": "default"}, {"num_hidden_layers": 4}),
}  # fmt: skip
PLACES = [0, 3, 700, 4095, 8191, 8192, 8193, 9000, 12_000, 16_000]


@pytest.mark.parametrize("case", FAR)
def test_logits_past_position_8192_equal_transformers(tmp_path, kernels, case):
    """Ten tokens far apart, as if the text between were not there: angles of all sizes decide who attends to whom."""
    family, rope, options = FAR[case]
    folder = tiny.tiny_model(
        tmp_path, family, tokenizer=False, max_position_embeddings=32768, rope_parameters={"rope_theta": 1e4, **rope}, **options
    )  # fmt: skip
    ids = PROMPT[: len(PLACES)]
    with torch.inference_mode():
        expected = tiny.reference_model(folder)(
            torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), position_ids=torch.tensor([PLACES])
        ).logits[0]
    logits = HandDealt(load(folder, kernels), kernels, places=PLACES).step({0: ids}, all_logits=True)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
    together = HandDealt(load(folder, kernels), kernels).step({0: ids}, all_logits=True)
    assert (logits - together)[1:].abs().max() > 0.1, "the distance between the tokens does show"


def test_greedy_ids_past_position_8192_equal_transformers(tmp_path):
    """A text that is really that long, in two pieces."""
    rope = {"rope_theta": 1e4, **FAR["llama3"][1]}
    folder = tiny.tiny_llama(
        tmp_path, tokenizer=False, num_hidden_layers=1, max_position_embeddings=16384, rope_parameters=rope
    )
    kernels = ops.resolve("cpu", "cpu", torch.float32)
    prompt = [(37 * i * i + 11 * i) % 256 for i in range(8300)]
    pool = HandDealt(load(folder, kernels), kernels, block_size=16, num_blocks=600)
    pool.step({0: prompt[:4000]})
    pool.step({0: prompt[4000:-1]})
    assert pool.greedy(prompt[-1:], 12) == tiny.oracle(folder, prompt, 12)


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("gpt_neox", {}, "model_type='gpt_neox': the native decoder serves llama, mistral"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu': the native decoder implements 'silu' and"),
        ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation='gelu': the native decoder implements"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ("qwen2", {"use_sliding_window": True, "layer_types": ["chunked_attention"] * 32}, "'chunked_attention'"),
        ("llama", {"attn_logit_softcapping": 30.0}, "attn_logit_softcapping=30.0: not an option of 'llama'"),
        ("llama", {"logits_scaling": 2.0}, "logits_scaling=2.0: not an option of 'llama'"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ("llama", {"quantization_config": {"quant_method": "awq"}}, "quantization_config="),
        ("llama", {"chunk_size_feed_forward": 8}, "chunk_size_feed_forward=8: the native decoder does not implement"),
        ("llama", {"rope_parameters": {"rope_type": "helical", "rope_theta": 1e4}}, "rope_type='helical'"),
    ],
)
def test_maths_that_is_not_implemented_is_refused_by_name(family, options, message):
    with pytest.raises(UnsupportedModel, match=message):
        DecoderConfig.from_transformers(AutoConfig.for_model(family, **options))


@pytest.mark.parametrize(("family", "options"), [("llama", {}), ("gemma3_text", GEMMA), ("olmo2", {})])
def test_bfloat16_is_no_further_from_float32_than_transformers_own(tmp_path, family, options):
    """The stated tolerance of bfloat16: per prompt position, the root mean square of the logits' distance to float32."""
    folder = tiny.tiny_model(tmp_path, family, tokenizer=False, num_hidden_layers=6, **options)
    exact = tiny.oracle_logits(folder, PROMPT)
    theirs = (tiny.oracle_logits(folder, PROMPT, torch.bfloat16) - exact).pow(2).mean().sqrt()
    for name in ("reference", "cpu"):
        kernels = ops.resolve(name, "cpu", torch.bfloat16)
        files = SimpleNamespace(folder=folder, name="tiny", source="a test")
        model = load_model(files, dtype=torch.bfloat16, device="cpu", kernels=kernels)
        logits = HandDealt(model, kernels, block_size=16).step({0: PROMPT}, all_logits=True)
        ours = (logits - exact).pow(2).mean().sqrt()
        assert 0 < ours <= theirs, f"{name}: {ours:.4f} against {theirs:.4f}"
