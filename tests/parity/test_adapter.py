"""Architectures through the transformers adapter: greedy ids equal to `generate`, or refused with the reason."""

import json
import threading
from types import SimpleNamespace

import adapter_models as models
import pytest
import tiny
import torch
from grid import Setting, check, make_core, serve
from kvscope.engine.models.decoder_config import UnsupportedModel
from kvscope.engine.models.loader import load_model
from kvscope.engine.models.transformers_adapter import TransformersModel, load_adapter
from kvscope.engine.sampling.params import SamplingParams
from kvscope.kernels import ops
from safetensors.torch import load_file, save_file
from steps import HandDealt

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPTS = [[5, 7, 9, 100, 3, 200, 41, 17], [44], [(31 * i) % 256 for i in range(37)]]
NEW_TOKENS = 48
SPLIT = Setting(block_size=3, chunk=7, cache="warm", pool="small", company="among7")


def files_of(folder):
    return SimpleNamespace(folder=folder, name=folder.name, source="a test")


def load(folder, kernels="reference", dtype=torch.float32):
    chosen = ops.resolve(kernels, "cpu", dtype)
    return load_adapter(files_of(folder), dtype=dtype, device="cpu", kernels=chosen), chosen


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """Maker of a model's checkpoint, once a session."""
    root, made = tmp_path_factory.mktemp("adapter"), {}

    def get(model_type):
        if model_type not in made:
            made[model_type] = models.make(root, model_type)
        return made[model_type]

    return get


@pytest.mark.parametrize("model_type", sorted(models.OPTIONS))
def test_greedy_ids_are_those_of_generate(checkpoint, model_type):
    folder = checkpoint(model_type)
    model, kernels = load(folder)
    core = make_core(model, kernels, Setting(16, 64, "off", "ample", "among7"))
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    ids = [core.add_request(prompt, params) for prompt in PROMPTS]
    while core.has_work:
        core.step()
    for request_id, prompt in zip(ids, PROMPTS, strict=True):
        assert core.get(request_id).children[0].output_token_ids == tiny.oracle(folder, prompt, NEW_TOKENS)


@pytest.mark.parametrize("model_type", sorted(models.OPTIONS))
def test_greedy_ids_survive_chunks_preemption_and_a_warm_cache(checkpoint, model_type):
    folder = checkpoint(model_type)
    check(*load(folder), folder, SPLIT)


@pytest.mark.parametrize("model_type", sorted(models.OPTIONS))
def test_logits_are_those_of_transformers(checkpoint, model_type):
    folder = checkpoint(model_type)
    model, kernels = load(folder)
    logits = HandDealt(model, kernels).step({0: PROMPTS[2]}, all_logits=True)
    torch.testing.assert_close(logits, tiny.oracle_logits(folder, PROMPTS[2]), rtol=0, atol=1e-4)


def test_layers_with_a_window_give_back_what_they_no_longer_see(checkpoint):
    """24 tokens in blocks of 4 and a window of 12: the group holds what one token sees, and the answer stays."""
    folder = checkpoint("gemma2")
    model, kernels = load(folder)
    assert [(group.layers, group.window) for group in model.spec.kv_groups] == [((1,), 0), ((0,), 12)]
    core = make_core(model, kernels, Setting(4, 64, "off", "ample", "alone"))
    request = core.add_request(PROMPTS[0], SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    while core.get(request).children[0].num_output_tokens < 20:
        core.step()
    everything, windowed = core.get(request).children[0].block_tables
    assert everything.count(0) == 0 and windowed.count(0) == len(everything) - 3
    while core.has_work:
        core.step()
    assert core.get(request).children[0].output_token_ids == tiny.oracle(folder, PROMPTS[0], 24)


def test_the_cpu_kernels_serve_it_too(checkpoint):
    folder = checkpoint("gemma2")  # windows and soft caps
    check(*load(folder, "cpu"), folder, SPLIT)


def test_bfloat16_stays_near_float32(checkpoint):
    folder = checkpoint("gpt2")
    model, kernels = load(folder, dtype=torch.bfloat16)
    found = HandDealt(model, kernels, block_size=16).step({0: PROMPTS[2]}, all_logits=True)
    expected = tiny.oracle_logits(folder, PROMPTS[2])
    theirs = tiny.oracle_logits(folder, PROMPTS[2], torch.bfloat16)
    assert found.dtype == torch.float32
    assert (found - expected).norm() < 1.5 * (theirs - expected).norm()


def test_logits_only_for_the_rows_that_are_sampled(checkpoint):
    model, kernels = load(checkpoint("gpt2"))
    hand = HandDealt(model, kernels)
    assert hand.step({0: [1, 2, 3], 1: [4, 5]}).shape == (2, tiny.VOCAB_SIZE)
    shapes = []
    model._weights.module.lm_head.register_forward_hook(lambda module, inputs, output: shapes.append(output.shape))
    hand.step({0: [6, 7, 8, 9]})
    assert shapes == [(1, 1, tiny.VOCAB_SIZE)]


def test_facts_of_the_model(checkpoint):
    spec = load(checkpoint("gpt2"))[0].spec
    expected = sum(tensor.numel() for tensor in load_file(checkpoint("gpt2") / "model.safetensors").values())
    assert (spec.architecture, spec.num_layers, spec.num_heads, spec.num_kv_heads) == ("GPT2LMHeadModel", 2, 4, 4)
    assert (spec.head_dim, spec.vocab_size, spec.max_model_len) == (16, tiny.VOCAB_SIZE, 256)
    assert (spec.num_parameters, spec.weight_bytes, spec.tied_embeddings) == (expected, 4 * expected, True)
    assert spec.eos_token_ids == {tiny.EOS}


def test_two_engines_share_weights_and_run_at_once(checkpoint):
    folder = checkpoint("gpt_neox")
    (one, kernels), (two, _) = load(folder), load(folder)
    assert one._weights is two._weights
    setting, found = Setting(4, 7, "off", "ample", "alone"), {}

    def run(model, prompt):
        found[tuple(prompt)] = serve(make_core(model, kernels, setting), setting, [prompt]).outputs[0][0]

    threads = [
        threading.Thread(target=run, args=(model, prompt))
        for model, prompt in zip((one, two), (PROMPTS[0], PROMPTS[2]), strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for prompt, ids in found.items():
        assert ids == tiny.oracle(folder, prompt, len(ids))
    assert len(found) == 2
    one.close()
    with pytest.raises(RuntimeError, match="is closed; load it again"):
        HandDealt(one, kernels).step({0: [1]})
    HandDealt(two, kernels).step({0: [1]})


def test_nothing_is_left_in_the_model(checkpoint):
    """A model that was probed and served still generates by itself what it did before."""
    folder = checkpoint("opt")
    model, kernels = load(folder)
    HandDealt(model, kernels).greedy(PROMPTS[0], 8)
    module = model._weights.module
    module.set_attn_implementation("eager")
    with torch.inference_mode():
        ids = module.generate(torch.tensor([PROMPTS[0]]), do_sample=False, max_new_tokens=8, eos_token_id=None)
    module.set_attn_implementation("kvscope_paged")
    assert ids[0, len(PROMPTS[0]) :].tolist() == tiny.oracle(folder, PROMPTS[0], 8)


def test_the_loader_falls_back_to_it(checkpoint):
    kernels = ops.resolve("reference", "cpu", torch.float32)
    model = load_model(files_of(checkpoint("gpt2")), dtype=torch.float32, device="cpu", kernels=kernels)
    assert isinstance(model, TransformersModel)


# What must be refused


@pytest.mark.parametrize(
    ("model_class", "reason"),
    [
        (
            models.odd(models.SilentLayer),
            r"1 of its 2 layers never call the attention function \(the first is layer 1\)",
        ),
        (models.odd(models.SilentLayer, at=0), r"the first is layer 0"),
        (models.odd(models.TwiceLayer), r"its 2 layers call the attention function 3 times a forward, not once each"),
        (models.odd(models.MixingLayer), r"on 8 tokens MixingLayer of layer 1 differs from eager attention"),
        (models.odd(base=models.OwnPositions), r"on 8 tokens \w+ of layer 0 differs from eager attention"),
        (models.odd(base=models.NoPositions), r"forward takes no position_ids"),
        *(
            (models.odd(models.ExtraMathsLayer, extra=extra), reason)
            for extra, reason in (
                ({"s_aux": torch.zeros(4)}, "asks for s_aux, which paged attention does not implement"),
                ({"position_bias": torch.zeros(1)}, "asks for position_bias"),
                ({"sinks": torch.zeros(4)}, "asks for sinks"),
                ({"is_causal": False}, "is not causal"),
                ({"sliding_window": 4}, "asks for a window of 4 tokens where the config states all"),
            )
        ),
    ],
)
def test_a_model_that_would_be_wrong_is_refused(tmp_path, monkeypatch, model_class, reason):
    folder = models.make_odd(tmp_path / "odd", monkeypatch, model_class)
    with pytest.raises(UnsupportedModel, match=rf"^odd \(OddForCausalLM\) cannot be served: .*{reason}"):
        load(folder)


def test_the_odd_model_is_served_when_nothing_is_wrong_with_it(tmp_path, monkeypatch):
    folder = models.make_odd(tmp_path / "odd", monkeypatch, models.odd())
    model, kernels = load(folder)
    assert HandDealt(model, kernels).greedy(PROMPTS[0], 12) == tiny.oracle(folder, PROMPTS[0], 12)


def test_a_window_that_only_the_mask_knows_is_refused(tmp_path, monkeypatch):
    """Its layers never say so, and 8 tokens do not reach the end of it; the config does."""
    folder = models.make_odd(tmp_path / "odd", monkeypatch, models.odd(), sliding_window=32)
    with pytest.raises(UnsupportedModel, match=r"layer 0 asks for a window of all tokens where the config states 32"):
        load(folder)


@pytest.mark.parametrize(
    ("model_type", "options", "reason"),
    [
        ("gpt_oss", {"num_local_experts": 4, "head_dim": 16}, "asks for s_aux"),
        ("falcon", {"alibi": True}, "looks its attention up in a table of its own"),
        ("bloom", {}, "forward takes no position_ids"),
        ("mamba", {}, "layers of the kind linear_attention, whose state is not K and V pages"),
        ("jamba", {"num_experts": 2}, "whose state is not K and V pages"),
        ("bart", {}, "encoder-decoder|takes no position_ids"),
        (
            "deepseek_v3",
            {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16},
            "keys of 24 and values of 16",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "rope_type='dynamic' from the longest sequence of the batch",
        ),
    ],
)
def test_architectures_out_of_reach_say_why(tmp_path, model_type, options, reason):
    folder = tiny.tiny_model(tmp_path / "model", model_type, tokenizer=False, **options)
    with pytest.raises(UnsupportedModel, match=reason):
        load(folder)


def test_an_encoder_decoder_is_refused(tmp_path):
    from transformers import T5Config

    T5Config(architectures=["T5ForConditionalGeneration"]).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="it is an encoder-decoder"):
        load(tmp_path)


def damaged(checkpoint, tmp_path, change):
    """A copy of the GPT-2 checkpoint whose tensors `change` has worked on."""
    folder = tmp_path / "damaged"
    folder.mkdir()
    (folder / "config.json").write_text((checkpoint("gpt2") / "config.json").read_text())
    tensors = load_file(checkpoint("gpt2") / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: t.pop("transformer.h.1.attn.c_attn.bias"), r"no file fills its parameter transformer\.h\.1\.attn"),
        (lambda t: t.update({"transformer.h.1.extra": torch.ones(2)}), r"it has no place for the tensor transformer"),
        (
            lambda t: t.update({"transformer.ln_f.bias": torch.ones(2)}),
            r"another shape to its parameter transformer\.ln_f\.bias",
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(checkpoint, tmp_path, change, reason):
    with pytest.raises(UnsupportedModel, match=reason):
        load(damaged(checkpoint, tmp_path, change))


def test_both_reasons_are_told(tmp_path):
    folder = tiny.tiny_model(tmp_path / "model", "bloom", tokenizer=False)
    kernels = ops.resolve("reference", "cpu", torch.float32)
    message = r"takes no position_ids.*\. The native decoder does not take it either: model_type='bloom'"
    with pytest.raises(UnsupportedModel, match=message):
        load_model(files_of(folder), dtype=torch.float32, device="cpu", kernels=kernels)


def test_all_that_a_config_shows_is_told_at_once(tmp_path):
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    folder = tiny.tiny_model(tmp_path / "model", "llama", tokenizer=False, rope_parameters=rope)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "awq"}}))
    with pytest.raises(
        UnsupportedModel, match=r"cannot be served: its weights are quantized [^;]*; transformers computes"
    ):
        load(folder)


def test_remote_code_is_never_run(tmp_path):
    folder = tiny.tiny_llama(tmp_path / "remote", tokenizer=False)
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "unheard_of",
        "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()")
    with pytest.raises(ValueError, match=r"config\.json in .* is not one that transformers reads"):
        load(folder)
    assert not (tmp_path / "ran").exists()
