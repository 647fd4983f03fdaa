"""A .gguf file becomes the same model: every quantization type, every architecture, its config and its tokenizer."""

import json
import tracemalloc

import numpy as np
import pytest
import tiny
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf_files import SHAPE, readable_types, write_gguf, write_tokenizer
from kvscope.engine.models import gguf as reader
from kvscope.engine.models.gguf import GGUFError, convert
from kvscope.engine.models.hub import resolve
from kvscope.engine.models.loader import load_model
from kvscope.kernels import ops
from safetensors.torch import load_file
from steps import HandDealt
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

TEXTS = [
    "the other heron",
    "  two  spaces\n\nand lines\t",
    "it's 12345 and ½ of 世界 é",
    "<|im_start|>user\nhi<|im_end|>",
    "",
]
OVERRIDES = {
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "n_inner": 96},
    "gemma2": {"head_dim": 16, "sliding_window": 12, "query_pre_attn_scalar": 16, "max_position_embeddings": 128},
    "llama": {"tie_word_embeddings": False},
    "phi3": {"tie_word_embeddings": False, "sliding_window": None},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """{model_type: folder} of tiny checkpoints; llama and qwen2 with rows of 256."""
    root = tmp_path_factory.mktemp("checkpoints")
    made = {name: tiny.tiny_model(root / name, name, **options) for name, options in OVERRIDES.items()}
    for name in ("llama", "qwen2"):
        made[f"{name}-256"] = tiny.tiny_model(root / f"{name}-256", name, **SHAPE)
    return made


def unpack(path, folder):
    folder.mkdir()
    return convert(path, folder, progress=False)


@pytest.mark.parametrize("kind", readable_types(), ids=lambda kind: kind.name)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_every_type_gives_the_values_of_the_file(checkpoints, tmp_path, family, kind):
    expected = write_gguf(checkpoints[f"{family}-256"], tmp_path / "m.gguf", kind=kind)
    unpack(tmp_path / "m.gguf", tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert np.array_equal(found[name].float().numpy(), values), name


def test_the_types_are_not_few():
    names = {kind.name for kind in readable_types()}
    assert {
        "F32",
        "F16",
        "BF16",
        "Q8_0",
        "Q4_0",
        "Q4_1",
        "Q5_0",
        "Q5_1",
        "Q2_K",
        "Q3_K",
        "Q4_K",
        "Q5_K",
        "Q6_K",
    } <= names
    assert {"IQ4_NL", "IQ4_XS", "IQ2_XXS", "IQ3_S", "IQ1_M", "TQ1_0", "MXFP4"} <= names


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (GGMLQuantizationType.F32, torch.float32),
        (GGMLQuantizationType.F16, torch.float16),
        (GGMLQuantizationType.BF16, torch.bfloat16),
        (GGMLQuantizationType.Q8_0, torch.float32),
    ],
)
def test_plain_floats_keep_their_dtype_and_quantized_ones_become_float32(checkpoints, tmp_path, kind, dtype):
    write_gguf(checkpoints["llama-256"], tmp_path / "m.gguf", kind=kind)
    unpack(tmp_path / "m.gguf", tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found["model.layers.0.self_attn.q_proj.weight"].dtype == dtype
    assert found["model.norm.weight"].dtype == torch.float32


@pytest.mark.parametrize("family", sorted(OVERRIDES))
def test_config_and_logits_are_those_of_the_checkpoint(checkpoints, tmp_path, family):
    source = checkpoints[family]
    write_gguf(source, tmp_path / "m.gguf")
    unpack(tmp_path / "m.gguf", tmp_path / "out")
    ids = [5, 7, 9, 100, 3, 200, 41, 17, 20, 21, 30, 31, 8, 9, 10, 11]
    assert torch.equal(tiny.oracle_logits(tmp_path / "out", ids), tiny.oracle_logits(source, ids))
    found, expected = AutoConfig.from_pretrained(tmp_path / "out"), AutoConfig.from_pretrained(source)
    assert found.architectures == expected.architectures
    assert found.max_position_embeddings == expected.max_position_embeddings
    assert found.tie_word_embeddings == expected.tie_word_embeddings


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2", "gemma2"])
def test_tensors_are_those_that_transformers_reads_from_the_file(checkpoints, tmp_path, family):
    write_gguf(checkpoints[family], tmp_path / "m.gguf", kind=GGMLQuantizationType.Q8_0)
    unpack(tmp_path / "m.gguf", tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    theirs = load_gguf_checkpoint(tmp_path / "m.gguf", return_tensors=True, model_to_load=model)["tensors"]
    ours = load_file(tmp_path / "out" / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, values in ours.items():
        torch.testing.assert_close(values, theirs[name], rtol=0, atol=1e-6, msg=name)


def test_a_served_file_generates_what_its_checkpoint_generates(checkpoints, tmp_path):
    write_gguf(checkpoints["llama"], tmp_path / "m.gguf")
    unpack(tmp_path / "m.gguf", tmp_path / "out")
    kernels = ops.resolve("reference", "cpu", torch.float32)
    model = load_model(resolve(tmp_path / "out"), dtype=torch.float32, device="cpu", kernels=kernels)
    prompt = [5, 7, 9, 100, 3]
    assert HandDealt(model, kernels).greedy(prompt, 24) == tiny.oracle(checkpoints["llama"], prompt, 24)


def test_the_tokenizer_gives_the_ids_that_transformers_gives(checkpoints, tmp_path):
    write_gguf(checkpoints["qwen2"], tmp_path / "m.gguf")
    unpack(tmp_path / "m.gguf", tmp_path / "out")
    ours = AutoTokenizer.from_pretrained(tmp_path / "out")
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    original = AutoTokenizer.from_pretrained(checkpoints["qwen2"])
    for text in TEXTS:
        assert ours(text)["input_ids"] == theirs(text)["input_ids"] == original(text)["input_ids"]
        assert ours.decode(ours(text)["input_ids"]) == text
    assert ours.chat_template == original.chat_template
    assert (ours.bos_token, ours.eos_token) == ("<|bos|>", "<|eos|>")


def test_every_end_of_a_turn_ends_a_text(checkpoints, tmp_path):
    write_gguf(checkpoints["llama"], tmp_path / "m.gguf")
    unpack(tmp_path / "m.gguf", tmp_path / "out")
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [tiny.EOS, tiny.IM_END]  # the chat template writes <|im_end|>


def pre_tokenized(checkpoints, tmp_path, pre):
    """A file whose vocabulary merges digits, with text split as `pre` says."""
    folder = tmp_path / "digits"
    folder.mkdir()
    saved = json.loads((checkpoints["llama"] / "tokenizer.json").read_text())
    saved["model"]["vocab"]["12"] = 300
    saved["model"]["merges"].append(["1", "2"])
    (folder / "tokenizer.json").write_text(json.dumps(saved))
    writer = GGUFWriter(tmp_path / "t.gguf", "llama")
    write_tokenizer(writer, folder, pre=pre)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    opened = reader.open_gguf(tmp_path / "t.gguf")
    out = tmp_path / "out"
    out.mkdir()
    problem = reader.write_tokenizer(tmp_path / "t.gguf", reader.Metadata(tmp_path / "t.gguf", opened), out)
    return problem, out


def test_text_is_split_digit_by_digit_where_the_file_says_so(checkpoints, tmp_path):
    problem, out = pre_tokenized(checkpoints, tmp_path, "smollm")
    assert problem == ""
    assert AutoTokenizer.from_pretrained(out).tokenize("a12") == ["a", "1", "2"]


def test_text_is_split_as_gpt2_does_where_the_file_says_so(checkpoints, tmp_path):
    problem, out = pre_tokenized(checkpoints, tmp_path, "gpt-2")
    assert problem == ""
    assert AutoTokenizer.from_pretrained(out).tokenize("a12") == ["a", "12"]


def test_an_unknown_way_of_splitting_leaves_the_tokenizer_out(checkpoints, tmp_path):
    problem, out = pre_tokenized(checkpoints, tmp_path, "nobody-knows")
    assert "'nobody-knows'" in problem and "tokenizer=" in problem
    assert not list(out.iterdir())


LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({}, {"rope_type": "default"}),
        ({"rope.scaling.type": "none"}, {"rope_type": "default"}),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 256},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
        ),
    ],
)
def test_rotary_scaling_is_carried_over(checkpoints, tmp_path, metadata, expected):
    write_gguf(checkpoints["llama"], tmp_path / "m.gguf", metadata=metadata)
    unpack(tmp_path / "m.gguf", tmp_path / "out")
    found = AutoConfig.from_pretrained(tmp_path / "out").rope_parameters
    assert {**expected, "rope_theta": 10000.0} == {key: found[key] for key in (*expected, "rope_theta")}
    assert set(found) == {*expected, "rope_theta"}


def test_llama3_scaling_is_read_back_from_its_factors(checkpoints, tmp_path):
    source = tiny.tiny_llama(
        tmp_path / "llama3",
        head_dim=64,
        rope_parameters={**LLAMA3, "original_max_position_embeddings": 8192, "rope_theta": 500000.0},
    )
    config = AutoConfig.from_pretrained(source)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 1.0 / (500000.0 ** (torch.arange(0, 64, 2) / 64))
    write_gguf(source, tmp_path / "m.gguf", extra={"rope_freqs.weight": (plain / scaled).numpy()})
    unpack(tmp_path / "m.gguf", tmp_path / "out")
    found = AutoConfig.from_pretrained(tmp_path / "out")
    assert found.rope_parameters == config.rope_parameters
    torch.testing.assert_close(ROPE_INIT_FUNCTIONS["llama3"](found, "cpu")[0], scaled)


def test_other_rotary_factors_are_refused(checkpoints, tmp_path):
    factors = np.linspace(1, 3, 8, dtype=np.float32)
    write_gguf(checkpoints["llama"], tmp_path / "m.gguf", extra={"rope_freqs.weight": factors})
    with pytest.raises(ValueError, match=r"rope_freqs.weight holds rotary factors that are not Llama 3's"):
        unpack(tmp_path / "m.gguf", tmp_path / "out")


def test_longrope_factors_are_carried_over(checkpoints, tmp_path):
    long, short = np.linspace(1, 9, 8, dtype=np.float32), np.linspace(1, 2, 8, dtype=np.float32)
    write_gguf(
        checkpoints["phi3"],
        tmp_path / "m.gguf",
        metadata={"rope.scaling.original_context_length": 256},
        extra={"rope_factors_long.weight": long, "rope_factors_short.weight": short},
    )
    unpack(tmp_path / "m.gguf", tmp_path / "out")
    found = AutoConfig.from_pretrained(tmp_path / "out").rope_parameters
    assert found["rope_type"] == "longrope" and found["original_max_position_embeddings"] == 256
    assert np.allclose(found["long_factor"], long) and np.allclose(found["short_factor"], short)


@pytest.mark.parametrize("keep", [3, 23, 100, 2_000, 9_000, -700, -1])
def test_a_file_cut_short_is_said_so(checkpoints, tmp_path, keep):
    write_gguf(checkpoints["llama"], tmp_path / "whole.gguf")
    (tmp_path / "m.gguf").write_bytes((tmp_path / "whole.gguf").read_bytes()[:keep])
    with pytest.raises(GGUFError, match=r"m\.gguf is (not a GGUF file|cut short or damaged)"):
        unpack(tmp_path / "m.gguf", tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drop": "blk.1.attn_q.weight"}, r"lacks model\.layers\.1\.self_attn\.q_proj\.weight"),
        (
            {"extra": {"blk.0.attn_q.bias": np.zeros(64, np.float32)}},
            r"lacks model\.layers\.0\.self_attn\.k_proj\.bias",
        ),
        ({"extra": {"blk.0.attn_sinks.weight": np.zeros(4, np.float32)}}, r"holds blk\.0\.attn_sinks\.weight"),
        ({"metadata": {"feed_forward_length": 100}}, r"ffn_\w+\.weight has shape .* of this model has"),
        ({"metadata": {"expert_count": 8}}, "is a mixture of 8 experts"),
        ({"metadata": {"attention.head_count_kv": [2, 1]}}, "head_count_kv differs from layer to layer"),
        ({"metadata": {"embedding_length": None}}, r"does not state llama\.embedding_length"),
        ({"metadata": {"rope.scaling.type": "spiral"}}, r"rope.scaling.type='spiral'"),
    ],
)
def test_a_model_that_would_be_wrong_is_refused(checkpoints, tmp_path, options, message):
    write_gguf(checkpoints["llama"], tmp_path / "m.gguf", **options)
    with pytest.raises(ValueError, match=message):
        unpack(tmp_path / "m.gguf", tmp_path / "out")


def test_an_architecture_that_is_not_known_is_named(tmp_path):
    writer = GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(GGUFError, match=r"architecture 'mamba'; GGUF files can be read for .*llama.*qwen2"):
        unpack(tmp_path / "m.gguf", tmp_path / "out")


def test_memory_stays_near_one_slice(checkpoints, tmp_path, monkeypatch):
    folder = tiny.tiny_model(tmp_path / "wide", "llama", vocab_size=20_000, **SHAPE)  # an embedding of 20 MB
    write_gguf(folder, tmp_path / "m.gguf", kind=GGMLQuantizationType.Q8_0, tokenizer=False)
    opened = reader.open_gguf(tmp_path / "m.gguf")
    metadata = reader.Metadata(tmp_path / "m.gguf", opened)
    architecture = reader.ARCHITECTURES["llama"]
    targets = reader._targets(tmp_path / "m.gguf", opened, architecture, reader.build_config(architecture, metadata))
    monkeypatch.setattr(reader, "SLICE_BYTES", 1 << 20)
    tracemalloc.start()
    reader._write_safetensors(tmp_path / "out.safetensors", targets, progress=False)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (tmp_path / "out.safetensors").stat().st_size > 20_000 * 256 * 4
    assert peak < 8 << 20


def test_a_disk_that_is_too_small_is_said_before_writing(checkpoints, tmp_path, monkeypatch):
    write_gguf(checkpoints["llama"], tmp_path / "m.gguf")
    monkeypatch.setattr(reader.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    with pytest.raises(GGUFError, match=r"has 0 MB free; the unpacked model needs"):
        unpack(tmp_path / "m.gguf", tmp_path / "out")
