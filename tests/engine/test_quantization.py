"""`Engine(…, quantization=…)`: validated, shown, shared, loaded within one copy; the maths is in tests/kernels and tests/parity."""

import pytest
import tiny
import torch
from kvscope.engine import Engine, EngineConfig, SamplingParams
from kvscope.engine.models.hub import resolve
from kvscope.engine.models.loader import load_model
from kvscope.kernels import ops, reference

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[5, 9, 77, 3, 120], list(range(20, 60))]


def ids(engine):
    return [output.outputs[0].token_ids for output in engine.generate(PROMPTS, GREEDY)]


def test_an_unknown_kind_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"quantization='int4': must be one of None, 'int8', 'int8-dynamic'"):
        EngineConfig(quantization="int4")


@pytest.mark.parametrize(
    ("quantization", "words"), [(None, ""), ("int8", ", int8 weights"), ("int8-dynamic", ", int8 weights and products")]
)
def test_it_is_shown_where_the_dtype_is(make_engine, quantization, words):
    engine = make_engine(quantization=quantization, dtype="float32")
    assert engine.config.quantization == engine.info.quantization == engine.info.spec.quantization == quantization
    assert engine.info.precision == f"float32{words}" and f"float32{words} on cpu" in repr(engine)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantization", ["int8", "int8-dynamic"])
def test_weights_shrink_and_the_embedding_stays_as_it_is(make_engine, tiny_folder, quantization, dtype):
    plain, small = (make_engine(quantization=q, dtype=dtype, kernels="reference") for q in (None, quantization))
    spec, size = small.info.spec, getattr(torch, dtype).itemsize
    table = spec.vocab_size * spec.hidden_size
    assert spec.num_parameters == plain.info.num_parameters and spec.tied_embeddings and spec.bytes_per_weight == 1
    products = plain.info.num_parameters - (2 * spec.num_layers + 1) * spec.hidden_size  # all parameters but the norms
    saved = (size - 1) * products - size * table  # the table is kept beside the head
    scales = spec.num_layers * ((4 + 2 * 2) * 16 + 2 * 64 + 2 * 96) + spec.vocab_size  # one for each output
    assert plain.info.weight_bytes - small.info.weight_bytes == saved - 4 * scales
    assert all(len(made) == 12 for made in ids(small))


@pytest.mark.parametrize("kernels", ["cpu", "reference"])
def test_the_table_is_looked_up_as_it_is_and_the_head_is_rounded(tiny_folder, kernels):
    kernels = ops.resolve(kernels)
    model, plain = (
        load_model(resolve(str(tiny_folder)), dtype=torch.float32, device="cpu", kernels=kernels, quantization=q)
        for q in ("int8", None)
    )
    every = torch.arange(model.spec.vocab_size)
    table = plain.weights.head.rows(every)
    assert torch.equal(model.weights.embedding, table) and plain.weights.embedding is None
    int8, scale = reference.quantize_weight(table)
    assert torch.equal(model.weights.head.rows(every), int8 * scale[:, None])


@pytest.mark.parametrize("quantization", ["int8", "int8-dynamic"])
def test_both_kernel_sets_say_the_same(make_engine, quantization):
    ours, theirs = (make_engine(quantization=quantization, dtype="float32", kernels=k) for k in ("cpu", "reference"))
    assert ids(ours) == ids(theirs)


def test_engines_share_weights_of_one_kind_only(tiny_folder):
    def load(quantization):
        files = resolve(str(tiny_folder))
        kernels = ops.resolve("cpu")
        return load_model(files, dtype=torch.float32, device="cpu", kernels=kernels, quantization=quantization)

    plain, first, second, dynamic = load(None), load("int8"), load("int8"), load("int8-dynamic")
    assert first.weights is second.weights
    assert len({id(model.weights) for model in (plain, first, dynamic)}) == 3


def test_a_model_of_transformers_is_refused(tmp_path):
    folder = tiny.tiny_model(tmp_path, "gpt_neox")
    with pytest.raises(
        ValueError, match=r"quantization='int8': .* is computed by transformers, with weights as they are"
    ):
        Engine(str(folder), quantization="int8")
