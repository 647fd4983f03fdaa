"""The benchmarks run, print what they promise, and their floors follow from the model's sizes."""

import argparse
import json
from types import SimpleNamespace

import pytest
import torch
from kvscope.engine import Engine
from kvscope.engine.bench import add_parser
from kvscope.engine.bench.floor import prefill_floor, workload_floor
from kvscope.engine.bench.kernel_cases import Shapes, cases
from kvscope.engine.bench.machine import Ceilings, alternate
from kvscope.kernels.ops import OPERATIONS, resolve

SPEC = SimpleNamespace(vocab_size=10, hidden_size=4, num_parameters=100, tied_embeddings=True, dtype=torch.float32,
                       bytes_per_weight=4, quantization=None,
                       num_heads=2, head_dim=2, num_layers=3, kv_bytes_per_token=96)  # fmt: skip
BYTES_ALONE = Ceilings(bytes_per_second=1.0, flops_per_second=1e30)
FLOPS_ALONE = Ceilings(bytes_per_second=1e30, flops_per_second=1.0)


def test_the_floor_of_a_workload_reads_the_weights_once_a_step_and_computes_every_token_once():
    """One sequence at a time of prompts 5 and 3, outputs 4 and 2: six steps; KV read is that of all tokens before each."""
    requests = [(5, 4), (3, 2)]
    least = workload_floor(SPEC, BYTES_ALONE, requests, max_num_seqs=1)
    assert least == pytest.approx(6 * 100 * 4 + (5 + 6 + 7 + 8 + 3 + 4) * 96)
    assert workload_floor(SPEC, BYTES_ALONE, requests, max_num_seqs=2) == pytest.approx(least - 2 * 100 * 4)
    least = workload_floor(SPEC, FLOPS_ALONE, requests, max_num_seqs=1)
    pairs = sum(range(1, 9)) + sum(range(1, 5))
    assert least == pytest.approx(2 * 60 * (8 + 4) + 2 * 40 * 6 + 4 * pairs * 2 * 2 * 3)


def test_a_workload_of_one_prompt_and_one_token_is_a_prefill():
    for ceilings in (BYTES_ALONE, FLOPS_ALONE):
        alone = workload_floor(SPEC, ceilings, [(7, 1)], max_num_seqs=1)
        assert alone == pytest.approx(prefill_floor(SPEC, ceilings, batch=1, prompt=7))


def test_int8_weights_are_read_as_bytes_and_int8_products_have_a_rate_of_their_own():
    int8, dynamic = (SimpleNamespace(**vars(SPEC) | {"bytes_per_weight": 1, "quantization": name})
                     for name in ("int8", "int8-dynamic"))  # fmt: skip
    kv = 7 * 96
    for spec in (int8, dynamic):
        assert prefill_floor(spec, BYTES_ALONE, batch=1, prompt=7) == pytest.approx(100 + kv)
    both = Ceilings(bytes_per_second=1e30, flops_per_second=1.0, int8_per_second=2.0)
    linears, attention = 2 * (60 * 7 + 40), 4 * 28 * 2 * 2 * 3
    assert prefill_floor(int8, both, batch=1, prompt=7) == pytest.approx(linears + attention)
    assert prefill_floor(dynamic, both, batch=1, prompt=7) == pytest.approx(linears / 2 + attention)


def test_runs_take_turns_and_the_median_counts():
    turns = []

    def run(name, seconds):
        turns.append(name)
        return next(seconds)

    first, second = iter([9.0, 1.0, 5.0, 2.0]), iter([9.0, 7.0, 8.0, 9.0])
    spec = SimpleNamespace(weight_bytes=64, dtype=torch.float32)
    seconds, ceilings = alternate({"a": lambda: run("a", first), "b": lambda: run("b", second)}, 3, spec)
    assert seconds == {"a": 2.0, "b": 8.0} and turns == ["a", "b"] * 4
    assert ceilings.bytes_per_second > 0 and ceilings.flops_per_second > 0


def parsed(model, folder, *arguments):
    """(options of `kvscope bench` with these arguments and one repeat in float32; what reads the figures that it will write)"""
    parser, file = argparse.ArgumentParser(), folder / "figures.json"
    add_parser(parser.add_subparsers())
    common = ["--model", str(model), "--dtype", "float32", "--repeats", "1", "--json", str(file)]
    return parser.parse_args(["bench", *arguments, *common]), lambda: json.loads(file.read_text())


def bench(model, folder, *arguments):
    """Run `kvscope bench` with these arguments; the figures that it wrote."""
    options, figures = parsed(model, folder, *arguments)
    assert options.run(options) == 0
    return figures()


@pytest.mark.parametrize(
    ("arguments", "rows", "column"),
    [
        (["latency", "--batch", "1", "2", "--prompt", "8", "--new", "2"], 3, "phase"),
        (
            [
                "latency",
                "--batch",
                "1",
                "--prompt",
                "8",
                "--new",
                "2",
                "--quantization",
                "none",
                "int8",
                "int8-dynamic",
            ],
            6,
            "weights",
        ),
        (["throughput", "--requests", "2", "--max-num-seqs", "2", "--quantization", "int8"], 3, "engine"),
    ],
)
def test_a_benchmark_prints_a_floor_and_a_peer_for_every_figure(tiny_folder, tmp_path, capsys, arguments, rows, column):
    figures = bench(tiny_folder, tmp_path, *arguments)
    printed = capsys.readouterr().out
    assert "transformers" in printed and "floor" in printed and "GB/s" in figures["ceilings"]
    assert len(figures["rows"]) == rows and all(row[column] and row["share of floor"] for row in figures["rows"])


def test_the_prefix_benchmark_finds_more_with_a_cache_and_in_the_order_of_the_cache(tiny_folder, tmp_path):
    arguments = ["--users", "2", "--turns", "2", "--system", "40", "--new", "3"]
    figures = bench(tiny_folder, tmp_path, "prefix", *arguments)
    found = {(row["workload"], row["engine"]): row["found"] for row in figures["rows"]}
    assert found["chat", "no cache"] == 0 < found["chat", "hash chain"] < found["chat", "radix tree"]
    for cache in ("hash chain", "radix tree"):
        assert found["tree", f"{cache}, lpm"] >= found["tree", f"{cache}, fcfs"] > 0


def test_the_kernel_benchmark_compares_the_implementations_with_torch_and_the_ceilings(tiny_folder, tmp_path):
    sizes = ["--rows", "3", "--context", "40", "--prompt", "24", "--only", "linear, head"]
    one, three = bench(tiny_folder, tmp_path, "kernels", *sizes)["rows"]
    assert [one["shape"], three["shape"]] == ["1 × 64 → 300", "3 × 64 → 300"]
    assert one["GFLOP/s"] == pytest.approx(2 * 64 * 300 / one["cpu µs"] / 1e3)
    assert one["GB/s"] == pytest.approx((64 * 300 + 64 + 300) * 4 / one["cpu µs"] / 1e3)
    for row in (one, three):
        assert row["reference / cpu"] == pytest.approx(row["reference µs"] / row["cpu µs"]) and row["torch µs"] > 0


def test_the_kernel_benchmark_runs_every_operation_and_all_implementations_agree(tiny_folder):
    """Every implementation of a case, torch's too, computes the same; so the ratio is of the same work."""
    with Engine(str(tiny_folder), dtype="float32", num_blocks=2) as engine:
        spec = engine.info.spec
    kernels, seen = {name: resolve(name) for name in ("reference", "cpu")}, set()
    for case in cases(kernels, Shapes.of(spec, str(tiny_folder), (3, 10, 150))):
        answers = [
            run() for name, run in case.runs.items() if not (name == "torch" and case.name == "sample, temperature")
        ]
        seen.add(case.name.split(",")[0])
        if case.name == "add_rms_norm" or any(answer is None for answer in answers):
            continue  # in place
        tensors = [torch.stack(answer) if isinstance(answer, tuple) else answer for answer in answers]
        if case.name.startswith("paged_attention"):  # torch gives [rows, heads, queries, d]
            tensors = [t.transpose(1, 2).flatten(0, 1) if t.dim() == 4 else t for t in tensors]
        for other in tensors[1:]:
            assert torch.allclose(other.double(), tensors[0].double(), atol=2e-4), case.name
    assert seen == set(OPERATIONS) - {"page_layout", "pack_linear"}
