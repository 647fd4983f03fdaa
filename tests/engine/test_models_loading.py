"""Loading: shards, sharing, memory, and a sentence for every way in which a folder can be wrong."""

import gc
import json
import os
import shutil
import threading
import time
import weakref
from types import SimpleNamespace

import pytest
import tiny
import torch
from kvscope.engine.models.loader import eos_token_ids, load_model, read_config
from kvscope.engine.models.transformers_adapter import TransformersModel
from kvscope.engine.models.weights import Checkpoint, shared
from kvscope.kernels import ops
from safetensors.torch import load_file, save_file
from steps import HandDealt

PROMPT = list(range(40, 70))


def load(folder, dtype=torch.float32, kernels="reference", quantization=None):
    files = SimpleNamespace(folder=folder, name="tiny", source="a test")
    chosen = ops.resolve(kernels, "cpu", dtype)
    return load_model(files, dtype=dtype, device="cpu", kernels=chosen, quantization=quantization)


def logits(model):
    return HandDealt(model, model.kernels).step({0: PROMPT})


@pytest.fixture
def folder(tiny_folder, tmp_path):
    """A copy of the tiny model that a test may damage."""
    return shutil.copytree(tiny_folder, tmp_path / "model")


def rewrite(folder, change):
    """Save the folder's tensors again after `change(tensors)`."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_shards_load_like_one_file(tmp_path, tiny_folder):
    sharded = tiny.tiny_llama(tmp_path, max_shard_size="60KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    torch.testing.assert_close(logits(load(sharded)), logits(load(tiny_folder)), rtol=0, atol=0)


def test_missing_shard_is_named(tmp_path):
    sharded = tiny.tiny_llama(tmp_path, max_shard_size="60KB")
    shard = sorted(sharded.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ValueError, match=f"index.json names the shard {shard.name}, which is not in"):
        load(sharded)


def test_broken_index_is_said(folder):
    (folder / "model.safetensors.index.json").write_text('{"weights": {}}')
    with pytest.raises(ValueError, match="is not an index of shards"):
        load(folder)


def test_two_files_without_an_index_are_not_guessed_at(folder):
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    shutil.copy(folder / "a.safetensors", folder / "b.safetensors")
    with pytest.raises(ValueError, match="holds 2 safetensors files and no model"):
        load(folder)


@pytest.mark.parametrize("kept", [4, 200, -64])
def test_file_that_is_cut_off_is_said(folder, kept):
    file = folder / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:kept])
    with pytest.raises(ValueError, match=r"model\.safetensors is cut off"):
        load(folder)


def test_file_that_is_no_safetensors_is_said(folder):
    (folder / "model.safetensors").write_bytes((16).to_bytes(8, "little") + b"not json at all!" * 4)
    with pytest.raises(ValueError, match="its header does not parse"):
        load(folder)


def test_parameter_that_no_file_fills_is_named(folder):
    rewrite(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ValueError, match=r"parameter model\.layers\.1\.mlp\.up_proj\.weight \[96, 64\] is in no file"):
        load(folder)


def test_weight_that_nothing_reads_is_named(folder):
    rewrite(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}))
    with pytest.raises(ValueError, match=r"holds 1 tensors that .*model\.layers\.0\.self_attn\.q_proj\.bias first"):
        load(folder)


def test_frequencies_stored_by_old_releases_are_passed_over(folder, tiny_folder):
    rewrite(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}))
    assert torch.equal(logits(load(folder)), logits(load(tiny_folder)))


def test_wrong_shape_names_both(folder):
    rewrite(folder, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(63)}))
    with pytest.raises(
        ValueError, match=r"model\.norm\.weight is \[63\] in model\.safetensors; config\.json makes it \[64\]"
    ):
        load(folder)


def test_element_type_that_is_not_read_is_named(folder):
    rewrite(folder, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(64, dtype=torch.int8)}))
    with pytest.raises(
        ValueError, match=r"stored as I8 in model\.safetensors; the element types that are read are F64"
    ):
        load(folder)


def test_pickle_is_refused(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin and no safetensors: loading a pickle can run code"):
        load(folder)


def test_folder_without_weights_and_without_config(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="holds no weights"):
        load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"holds no config\.json"):
        load(folder)


def test_unknown_model_type_is_said(folder):
    (folder / "config.json").write_text(json.dumps({"model_type": "never_heard_of"}))
    with pytest.raises(ValueError, match=r"config\.json in .* is not one that transformers reads: .*never_heard_of"):
        load(folder)


def test_tied_matrix_is_stored_once_under_either_name(folder, tiny_folder):
    model = load(tiny_folder)
    assert model.weights.embedding is None
    assert model.spec.weight_bytes == 4 * model.spec.num_parameters
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": tensors.pop("model.embed_tokens.weight")}))
    assert torch.equal(logits(load(folder)), logits(model))
    rewrite(folder, lambda tensors: tensors.update({"model.embed_tokens.weight": tensors["lm_head.weight"].clone()}))
    assert torch.equal(logits(load(folder)), logits(model))


def test_tied_matrices_that_differ_are_refused(folder):
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}))
    with pytest.raises(ValueError, match=r"tie_word_embeddings=true, but .* differ"):
        load(folder)


@pytest.mark.parametrize("stored", [torch.float64, torch.float16, torch.bfloat16])
def test_any_stored_float_type_is_converted(folder, stored):
    rewrite(folder, lambda tensors: tensors.update({name: t.to(stored) for name, t in tensors.items()}))
    tensors = load_file(folder / "model.safetensors")
    weights = load(folder).weights
    assert torch.equal(weights.head.weight, tensors["model.embed_tokens.weight"].float())
    q_rows = tensors["model.layers.1.self_attn.q_proj.weight"].float()
    assert torch.equal(weights.layers[1].qkv.weight[: len(q_rows)], q_rows)


def test_large_tensor_is_converted_piece_by_piece(tmp_path):
    tensor = torch.arange(3 * 1500 * 1001, dtype=torch.float32).view(-1, 1001)  # more than two pieces, no whole number
    save_file({"a": tensor, "b": tensor[:0].clone()}, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path) as checkpoint:
        assert torch.equal(checkpoint.read("a", (4500, 1001), torch.float64), tensor.double())
        assert checkpoint.unread == ["b"]
        assert checkpoint.read("b", (0, 1001), torch.float64).shape == (0, 1001)


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="the peak of a process is reset through /proc")
@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_peak_memory_is_one_copy_and_one_matrix(tmp_path, dtype, quantization):
    def status(field):
        with open("/proc/self/status") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

    folder = tiny.tiny_llama(
        tmp_path, tokenizer=False, vocab_size=16000, hidden_size=512, intermediate_size=1024, num_hidden_layers=8
    )
    gc.collect()
    with open("/proc/self/clear_refs", "w") as reset:
        reset.write("5")
    before = status("VmRSS")
    model = load(folder, dtype, quantization=quantization)
    peak = status("VmHWM") - before
    embedding = 16000 * 512 * dtype.itemsize
    assert (
        model.spec.weight_bytes > (2.5 if quantization is None else 1.5) * embedding
    )  # so that a second copy of the rest would show
    assert peak < model.spec.weight_bytes + embedding + (16 << 20)


def test_engines_share_weights_until_the_last_one_closes(tiny_folder):
    first, second = load(tiny_folder), load(tiny_folder)
    assert first.weights is second.weights
    assert first.weights is not load(tiny_folder, torch.bfloat16).weights
    alive = weakref.ref(first.weights)
    first.close()
    first.close()
    with pytest.raises(RuntimeError, match="is closed"):
        logits(first)
    assert alive() is second.weights
    second.close()
    gc.collect()
    assert alive() is None


def test_replaced_file_is_loaded_anew(folder):
    first = load(folder)
    rewrite(folder, lambda tensors: tensors["model.norm.weight"].mul_(2))
    assert not torch.equal(load(folder).weights.final_norm, first.weights.final_norm)


def test_threads_that_ask_at_once_build_once():
    built, got = [], []
    together = threading.Barrier(4)

    class Weights:
        def __init__(self):
            time.sleep(0.02)  # long enough that the others arrive meanwhile
            built.append(self)

    def ask():
        together.wait()
        got.append(shared("a key", Weights))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1
    assert [value is built[0] for value in got] == [True] * 4


def test_eos_is_the_union_of_both_files(folder):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 106]}))
    assert eos_token_ids(folder, read_config(folder)) == {1, 106, tiny.EOS}
    (folder / "generation_config.json").unlink()
    assert eos_token_ids(folder, read_config(folder)) == {tiny.EOS}


def test_option_that_the_native_decoder_lacks_goes_to_the_adapter(tmp_path):
    folder = tiny.tiny_llama(tmp_path, tokenizer=False, hidden_act="gelu")
    model = load(folder)
    assert isinstance(model, TransformersModel)
    torch.testing.assert_close(logits(model)[0], tiny.oracle_logits(folder, PROMPT)[-1], rtol=0, atol=1e-4)
