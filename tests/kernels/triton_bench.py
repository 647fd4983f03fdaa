"""`kvscope bench gpu` on tiny sizes in Triton's interpreter: its checks and its models, without its clock. See test_triton."""

import argparse
import json

import pytest
import torch
from kvscope.engine.bench import add_parser, gpu, gpu_kernels, gpu_model
from kvscope.kernels import ops
from kvscope.kernels.triton import launch

assert launch.INTERPRETED, "this file is run by test_triton.py, with TRITON_INTERPRET=1"
torch.set_num_threads(1)
CPU = torch.device("cpu")


def rows(dtype, kernels):
    def seconds(call):
        call()
        return 1e-3

    cases = gpu_kernels.cases(kernels, dtype, CPU, gpu_kernels.Sizes.tiny())
    return gpu.kernel_rows(cases, seconds, 1e9, 1e12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_every_kernel_passes_its_check(dtype):
    table, worst = rows(dtype, ops.resolve("triton", CPU, dtype))
    assert worst <= 1, table
    assert {len(row) for row in table} == {len(gpu.HEADERS)} and len(table) == 16


def test_a_wrong_kernel_is_found():
    kernels = ops.resolve("triton", CPU, torch.float32)
    off = {name: getattr(kernels, name) for name in ops.OPERATIONS} | {
        "silu_mul": lambda x: kernels.silu_mul(x) * 1.001
    }
    table, worst = rows(torch.float32, ops.Ops("off", **off))
    assert worst > 1 and [row[0] for row in table if row[2] > 1] == ["silu_mul"]


def test_a_model_in_memory_decodes_as_transformers_generates(monkeypatch):
    shape = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": 90,
    }  # fmt: skip
    source = gpu_model.random_llama(shape, torch.float32, CPU)
    kernels = ops.resolve("reference", CPU, torch.float32)
    served = gpu_model.Served(source, kernels, max_num_seqs=4, max_num_batched_tokens=64, num_blocks=30)
    prompts = [[5, 6, 7, 8], [9, 10, 11, 12]]
    made = served.generate(prompts, 6)
    want = source.generate(torch.tensor(prompts), max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0)
    assert made == want[:, 4:].tolist()
    seconds = served.decode_seconds(prompts, 5)
    assert len(seconds) == 5 and min(seconds) > 0

    def peer(model, prompts, new_tokens):  # transformers' continuous batching would take most of this machine's memory
        return served.generate(prompts, new_tokens)

    monkeypatch.setattr(gpu, "transformers_generate", peer)
    table = gpu.model_rows("tiny", source, kernels, 1e9, (1, 2), 4, 3)
    assert [row[0] for row in table] == ["decode step, tiny"] * 2 + ["kvscope, tiny", "transformers, tiny"]
    assert table[2][-1].endswith("tok/s") and table[3][-1].endswith("tok/s")
    monkeypatch.setattr(gpu, "transformers_generate", lambda model, prompts, new_tokens: [[1]])
    assert (
        gpu.model_rows("tiny", source, kernels, 1e9, (1, 2), 4, 3)[3][-1] == "stopped early: the ratio would be false"
    )


def test_without_a_gpu_the_table_says_so(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    commands = argparse.ArgumentParser()
    add_parser(commands.add_subparsers())
    options = commands.parse_args(["bench", "gpu", "--json", str(tmp_path / "gpu.json")])
    assert options.dtype == "bfloat16" and options.run(options) == 0
    assert "no GPU here: nothing was measured" in capsys.readouterr().out
    assert json.loads((tmp_path / "gpu.json").read_text())["rows"][0]["what"] == "no GPU"
