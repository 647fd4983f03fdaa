"""Replayed decode steps give the bits of steps that are computed call by call, and stay out of the way where they cannot."""

import random
from types import SimpleNamespace

import pytest
import tiny
import torch
from kvscope.engine import Engine, SamplingParams
from kvscope.engine.models import decode_graphs
from kvscope.engine.models.loader import load_model
from kvscope.engine.scheduling.batch import Batch
from kvscope.engine.scheduling.plan import Plan
from kvscope.kernels import ops
from steps import HandDealt

DTYPES = [torch.float32, torch.bfloat16]


def load(folder, dtype, quantization=None):
    kernels = ops.resolve("cpu", "cpu", dtype)
    files = SimpleNamespace(folder=folder, name=folder.name, source="a test")
    model = load_model(files, dtype=dtype, device="cpu", kernels=kernels, quantization=quantization)
    return model, kernels


def both(folder, dtype=torch.float32, quantization=None, **options):
    """The same model twice: replaying, and call by call."""
    model, kernels = load(folder, dtype, quantization)
    return [HandDealt(model, kernels, block_size=16, enforce_eager=eager, **options) for eager in (False, True)]


def graphs_of(pool):
    return pool.runner._graphs


@pytest.mark.parametrize("quantization", [None, "int8", "int8-dynamic"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_are_those_of_eager_steps_while_texts_grow_and_rows_come_and_go(tiny_folder, dtype, quantization):
    replaying, eager = both(tiny_folder, dtype, quantization)
    draw = random.Random(0)
    for row in range(6):
        prompt = [draw.randrange(256) for _ in range(draw.randrange(1, 30))]
        assert torch.equal(replaying.step({row: prompt}), eager.step({row: prompt}))
    for step in range(60):
        rows = draw.sample(range(6), k=3 if step % 3 else draw.randrange(1, 7))
        tokens = {row: [draw.randrange(256)] for row in rows}
        assert torch.equal(replaying.step(tokens), eager.step(tokens))
    assert len(graphs_of(replaying)._graphs) >= 2 and graphs_of(eager) is None


@pytest.mark.parametrize(
    ("family", "captured"),
    [("llama", True), ("qwen2", True), ("mistral", True), ("granite", False), ("gemma2", False), ("qwen3", False)],
)
def test_a_family_that_torch_helps_to_compute_is_served_as_before(tmp_path, family, captured):
    options = {"residual_multiplier": 0.5} if family == "granite" else {}
    replaying, eager = both(tiny.tiny_model(tmp_path, family, tokenizer=False, **options))
    for token in range(8):
        assert torch.equal(replaying.step({0: [token], 1: [token + 1]}), eager.step({0: [token], 1: [token + 1]}))
    assert graphs_of(replaying)._serves == captured
    assert bool(graphs_of(replaying)._graphs) == captured


def test_a_prompt_is_not_replayed_nor_a_step_that_wants_some_logits(tiny_folder):
    replaying, eager = both(tiny_folder)
    for step in range(5):
        for tokens, options in (
            ({0: [1, 2]}, {}),
            ({1: [3], 2: [4]}, {"sampled": [1]}),
            ({3: [5, 6]}, {"all_logits": True}),
        ):
            assert torch.equal(replaying.step(tokens, **options), eager.step(tokens, **options)), step
    assert not graphs_of(replaying)._graphs


def test_longer_texts_than_the_tables_were_captured_for(tmp_path):
    folder = tiny.tiny_llama(tmp_path, tokenizer=False, num_hidden_layers=1, max_position_embeddings=4096)
    replaying, eager = both(folder)
    for pool in (
        replaying,
        eager,
    ):  # 1024 positions are the first rotary table, 512 tokens the first width of block tables
        pool.step({0: [i % 256 for i in range(500)], 1: [i % 256 for i in range(1010)]})
    for token in range(40):
        tokens = {0: [token], 1: [token + 1]}
        assert torch.equal(replaying.step(tokens), eager.step(tokens))
    assert len(graphs_of(replaying)._graphs) == 2


def test_graphs_are_few_and_small(tiny_folder, monkeypatch):
    monkeypatch.setattr(decode_graphs, "MOST", 3)
    replaying, eager = both(tiny_folder, num_blocks=600)
    for _ in range(2):
        for rows in range(1, 9):
            for token in range(5):
                tokens = {row: [token] for row in range(rows)}
                assert torch.equal(replaying.step(tokens), eager.step(tokens))
                assert len(graphs_of(replaying)._graphs) <= 3
    assert graphs_of(replaying)._memory.num_bytes < 400_000  # the scratch of attention among them


def test_a_block_that_does_not_exist_is_told_as_in_an_eager_step(tiny_folder):
    replaying, _ = both(tiny_folder)
    for token in range(5):
        replaying.step({0: [token]})
    assert graphs_of(replaying)._graphs
    replaying.tables[0, 0][0] = 9999
    with pytest.raises(IndexError, match="9999"):
        replaying.step({0: [5]})
    replaying.tables[0, 0][0] = 1
    assert replaying.step({0: [5]}).isfinite().all()


def test_a_closed_model_is_not_replayed(tiny_folder):
    replaying, _ = both(tiny_folder)
    for token in range(5):
        replaying.step({0: [token]})
    replaying.runner.model.close()
    with pytest.raises(RuntimeError, match="is closed"):
        replaying.step({0: [5]})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_gives_the_same_tokens_and_logprobs(tiny_folder, dtype):
    outputs = {}
    for eager in (False, True):
        with Engine(
            tiny_folder, dtype=dtype, kernels="cpu", num_blocks=17, enforce_eager=eager, max_num_batched_tokens=32
        ) as engine:
            params = [
                SamplingParams(
                    n=1 + i % 3,
                    temperature=0.9,
                    seed=i,
                    max_tokens=8 + 5 * i,
                    ignore_eos=True,
                    logprobs=2,
                    repetition_penalty=1.2,
                )
                for i in range(8)
            ]  # few blocks, so that some are preempted
            results = engine.generate([[7 + i] * (3 + 4 * i) for i in range(8)], params)
            outputs[eager] = [[(o.token_ids, o.logprobs) for o in result.outputs] for result in results]
            assert engine.metrics()["vllm:num_preemptions_total"] > 0
    assert outputs[False] == outputs[True]


def test_a_step_without_tokens_does_not_end_replays(tiny_folder):
    replaying, _ = both(tiny_folder)
    empty = Batch.from_plan(Plan(step=1, copies=([],)), block_sizes=(16,))
    for _ in range(5):
        assert replaying.runner.execute(empty).shape == (0, 300)
    for token in range(5):
        replaying.step({0: [token]})
    assert graphs_of(replaying)._graphs
