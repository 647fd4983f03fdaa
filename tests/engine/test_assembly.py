"""Options become decisions: device, dtype, kernels, pool, context and end-of-sequence ids, or a sentence why not."""

import json

import numpy as np
import pytest
import tiny
import torch
from kvscope.engine import EngineConfig
from kvscope.engine.assembly import assemble
from kvscope.kernels.cpu import compiler

PLAIN = {"dtype": "float32", "kernels": "reference"}


def config_of(folder, **options):
    return assemble(EngineConfig.from_options(folder, {**PLAIN, **options})).config


def test_every_none_and_auto_is_decided(tiny_folder):
    built = assemble(EngineConfig(model=str(tiny_folder)))
    config = built.config
    assert config.device == ("cuda" if torch.cuda.is_available() else "cpu")
    assert config.dtype in ("float32", "bfloat16") and config.kernels in ("cpu", "reference")
    assert (config.num_blocks, config.max_model_len) == (512, 1024) and config.num_threads >= 1
    assert config.weights_source == "folder, float32"
    info = built.info
    assert (info.num_blocks, info.block_size, info.max_model_len) == (512, 16, 1024)
    assert info.pool_bytes == 512 * info.block_bytes and info.architecture == "LlamaForCausalLM"
    assert info.block_bytes == 16 * 2 * 2 * 2 * 16 * getattr(torch, config.dtype).itemsize  # tokens·layers·K,V·heads·16
    assert info.num_parameters == sum(p.numel() for p in tiny.reference_model(tiny_folder).parameters())


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [
        ({"avx512_bf16": True}, "bfloat16"),
        ({"amx_bf16": True}, "bfloat16"),
        ({"avx2": True}, "float32"),
        ({}, "float32"),
    ],
)
def test_auto_is_bfloat16_only_where_the_cpu_multiplies_it(monkeypatch, tiny_folder, flags, dtype):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: flags)
    assert config_of(tiny_folder, dtype="auto", device="cpu").dtype == dtype


def test_the_context_may_be_shorter_than_the_models_but_not_longer(tiny_folder):
    assert config_of(tiny_folder, max_model_len=100).max_model_len == 100
    with pytest.raises(ValueError, match=r"max_model_len=1025: .* was made for at most 1024 tokens"):
        config_of(tiny_folder, max_model_len=1025)


def test_ends_come_from_tokenizer_config_and_generation_config(tmp_path):
    folder = tiny.tiny_llama(tmp_path, eos_token_id=5)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [6, 7]}))
    core = assemble(EngineConfig.from_options(folder, PLAIN)).core
    assert core.eos_token_ids == {5, 6, 7, tiny.EOS}


def test_an_end_outside_the_vocabulary_is_no_end(tmp_path):
    folder = tiny.tiny_llama(tmp_path, eos_token_id=5)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [300, 7]}))
    assert assemble(EngineConfig.from_options(folder, PLAIN)).core.eos_token_ids == {5, 7, tiny.EOS}


def test_numpys_integers_are_integers(tiny_folder):
    config = config_of(tiny_folder, block_size=np.int64(8), num_blocks=np.int32(20), seed=np.int64(3))
    assert (config.block_size, config.num_blocks, config.seed) == (8, 20, 3)
    assert type(config.block_size) is type(config.num_blocks) is type(config.seed) is int


def test_a_tokenizer_may_come_from_elsewhere(tmp_path, tiny_folder):
    folder = tiny.tiny_llama(tmp_path, tokenizer=False)
    assert assemble(EngineConfig.from_options(folder, PLAIN)).tokenizer is None
    built = assemble(EngineConfig.from_options(folder, {**PLAIN, "tokenizer": str(tiny_folder)}))
    assert built.tokenizer.eos_token_id == tiny.EOS
    for wrong, message in (
        ("no/where", "tokenizer='no/where' cannot be loaded: [^\n]*$"),
        ("/nope", r"tokenizer='/nope': is no folder here, and not the name of a hub model \(org/name\)$"),
        ("x" * 5000, "tokenizer='x{117}…': is no folder here"),
    ):
        with pytest.raises(ValueError, match=message):
            assemble(EngineConfig.from_options(folder, {**PLAIN, "tokenizer": wrong}))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there_is_said(tiny_folder):
    with pytest.raises(ValueError, match="device='cuda': torch sees no GPU here"):
        config_of(tiny_folder, device="cuda")


def test_the_number_of_threads_is_set_for_the_process(tiny_folder):
    before = compiler.num_threads(), torch.get_num_threads()
    try:
        assert config_of(tiny_folder, num_threads=1).num_threads == 1
        assert (compiler.num_threads(), torch.get_num_threads()) == (1, 1)
    finally:
        compiler.set_num_threads(before[0])
        torch.set_num_threads(before[1])


def test_kernels_are_compiled_before_the_model_loads_and_only_those_of_this_dtype(monkeypatch, tiny_folder):
    asked = []
    monkeypatch.setattr(compiler, "warm_up", lambda groups, progress: asked.append(set(groups)))
    config_of(tiny_folder, kernels="reference")
    assert asked == []
    config_of(tiny_folder, kernels="cpu", device="cpu")
    config_of(tiny_folder, kernels="cpu", device="cpu", quantization="int8")
    assert asked == [{"common", "float32"}, {"common", "float32", "int8"}]
