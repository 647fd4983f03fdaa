"""`kvscope bench gpu`: one prepared run, under five minutes, that says what the GPU path is worth on this machine.

1. Every kernel is checked against float64 on random data; one that is wrong makes the exit status 1.
2. The ceilings are measured: bytes per second of a copy, FLOP per second of a large product. Each kernel is a share
   of the one that binds it: of the time that its bytes or its FLOPs need at least.
3. Decode steps of random-weight Llamas through the engine's core, beside the time that reading weights and cache needs.
4. The same prompts through the core and through transformers' continuous batching, in turns.

Where there is no GPU the table says so, and the exit status is 0. Also `python -m kvscope.engine.bench.gpu`: it needs
torch, Triton, transformers, numpy and safetensors, and nothing else that kvscope depends on.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable

import torch

from . import add_gpu_options
from .gpu_kernels import Case, Sizes, cases
from .gpu_model import SHAPES, Served, random_llama, transformers_generate
from .machine import seconds_of
from .report import print_table

HEADERS = ["what", "shape", "error / allowed", "µs", "GB/s", "TFLOP/s", "share of ceiling"]
BATCHES = (1, 32, 256)
PROMPT, NEW = 128, 64


def run(options) -> int:
    title = "kvscope bench gpu"
    if not torch.cuda.is_available():
        nothing = {"versions": f"torch {torch.__version__}", "machine": "no GPU here: nothing was measured"}
        print_table(title, nothing, HEADERS, [["no GPU", *["–"] * (len(HEADERS) - 1)]], options.json)
        return 0
    from kvscope.kernels import ops

    device, dtype = torch.device("cuda", torch.cuda.current_device()), getattr(torch, options.dtype)
    kernels = ops.resolve("triton", device, dtype)
    bandwidth, rate = ceilings(dtype, device)
    rows, worst = kernel_rows(cases(kernels, dtype, device, Sizes.full()), graph_seconds, bandwidth, rate)
    for name, shape in SHAPES.items():
        rows += model_rows(name, random_llama(shape, dtype, device), kernels, bandwidth, BATCHES, PROMPT, NEW)
        torch.cuda.empty_cache()
    print_table(title, facts(device, dtype, bandwidth, rate), HEADERS, rows, options.json)
    if worst > 1:
        print(f"a kernel is wrong: its error is {worst:.2f} times what is allowed", file=sys.stderr)
    return int(worst > 1)


def facts(device: torch.device, dtype: torch.dtype, bandwidth: float, rate: float) -> dict[str, str]:
    import transformers
    import triton

    return {
        "machine": torch.cuda.get_device_name(device),
        "versions": f"torch {torch.__version__}, Triton {triton.__version__}, transformers {transformers.__version__}",
        "dtype": str(dtype).removeprefix("torch."),
        "ceilings": f"{bandwidth / 1e9:,.0f} GB/s copied, {rate / 1e12:,.0f} TFLOP/s multiplied",
    }


def ceilings(dtype: torch.dtype, device: torch.device, elements: int = 2**28, side: int = 8192) -> tuple[float, float]:
    """(bytes per second read and written by a copy, FLOP per second of a square product), each the best of its kind."""
    source, copy = torch.zeros(2, elements, dtype=torch.int32, device=device).unbind()
    a = torch.randn(side, side, dtype=dtype, device=device)
    return 2 * source.nbytes / graph_seconds(lambda: copy.copy_(source)), 2 * side**3 / graph_seconds(lambda: a @ a)


def graph_seconds(call: Callable[[], object]) -> float:
    """Seconds of one call on the device, its launch not counted: the median over replays of a captured graph."""
    from triton.testing import do_bench_cudagraph

    call()  # compiles, and fills what is cached
    return do_bench_cudagraph(call, rep=50, return_mode="median") / 1e3


def kernel_rows(
    all_cases, timed: Callable[[Callable], float], bandwidth: float, rate: float
) -> tuple[list[list], float]:
    """A row for each case, and the largest error of all as a share of what is allowed (NaN counts as infinite)."""
    rows, worst = [], 0.0
    for case in all_cases:
        error = case.check()
        error = float("inf") if error != error else error
        worst = max(worst, error)
        seconds = timed(case.run)
        rows.append(
            [
                case.name, case.shape, round(error, 3), seconds * 1e6,
                case.num_bytes / seconds / 1e9 if case.num_bytes else "–",
                case.num_flops / seconds / 1e12 if case.num_flops else "–",
                f"{_least(case, bandwidth, rate) / seconds:.0%}",
            ]
        )  # fmt: skip
    return rows, worst


def _least(case: Case, bandwidth: float, rate: float) -> float:
    return max(case.num_bytes / bandwidth, case.num_flops / rate)


def model_rows(name, source, kernels, bandwidth, batches, prompt, new) -> list[list]:
    """Decode steps at each batch, and the whole of the largest batch against transformers."""
    most = max(batches)
    num_blocks = 1 + (most + 1) * (1 + (prompt + 2 * new) // 16)
    served = Served(source, kernels, max_num_seqs=most, max_num_batched_tokens=8192, num_blocks=num_blocks)
    spec = served.model.spec
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(10, spec.vocab_size, (most, prompt), generator=generator).tolist()
    served.generate(prompts[:2], 4)  # compiles
    rows = []
    for batch in batches:
        seconds = statistics.median(served.decode_seconds(prompts[:batch], new))
        moved = spec.weight_bytes + batch * (prompt + new // 2) * spec.kv_bytes_per_token
        speed = moved / seconds
        rows.append([f"decode step, {name}", f"{batch} × {prompt}", "–", seconds * 1e6, speed / 1e9, "–", f"{speed / bandwidth:.0%}"])  # fmt: skip
    return rows + _beside_transformers(name, source, served, prompts, new)


def _beside_transformers(name, source, served, prompts, new) -> list[list]:
    """Tokens a second of both in turns; a peer that cannot run is a row that says why."""
    shape = f"{len(prompts)} × {len(prompts[0])} + {new}"
    speeds: dict[str, list[float]] = {"kvscope": [], "transformers": []}
    runs = {"kvscope": served.generate, "transformers": lambda p, n: transformers_generate(source, p, n)}
    refused = {}
    for _ in range(2):  # the first turn compiles and warms
        for peer, generate in runs.items():
            if peer in refused:
                continue
            made: list = []
            try:
                seconds = seconds_of(lambda g=generate, m=made: m.extend(g(prompts, new)))
            except Exception as error:  # a peer's own fault must not take our figures along
                refused[peer] = f"{type(error).__name__}: {error}".splitlines()[0][:80]
                continue
            if [len(ids) for ids in made] != [new] * len(prompts):
                refused[peer] = "stopped early: the ratio would be false"
            speeds[peer].append(len(prompts) * new / seconds)
    rows = []
    for peer in runs:
        told = refused.get(peer) or f"{speeds[peer][-1]:,.0f} tok/s"
        rows.append([f"{peer}, {name}", shape, "–", "–", "–", "–", told])
    return rows


if __name__ == "__main__":
    alone = argparse.ArgumentParser(prog="python -m kvscope.engine.bench.gpu", description=__doc__)
    add_gpu_options(alone)
    sys.exit(run(alone.parse_args()))
