"""`kvscope bench kernels`: each operation of `kvscope.kernels.ops` on the CPU, in the shapes of a model's steps.

"reference" is the plain one that says what is to be computed, "cpu" the one that serves, "torch" what one would write with torch
alone, where there is such a thing. GB/s and GFLOP/s count what the operation cannot do without, and are those of "cpu". The
share is that of the ceiling which binds it; what fits into the caches may pass 100 %.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

from kvscope.kernels import ops

from ..engine import Engine
from .kernel_cases import Shapes, cases
from .machine import alternate, facts
from .report import print_table

HEADERS = ["operation", "shape", "reference µs", "cpu µs", "torch µs", "reference / cpu", "torch / cpu", "GB/s", "GFLOP/s",
           "share of ceiling"]  # fmt: skip
SECONDS, CALLS = 0.02, 3  # one measurement takes at least so long, and so many calls


def run(options) -> int:
    with Engine(options.model, dtype=options.dtype, device="cpu", num_blocks=2) as engine:
        info = engine.info
    kernels = {name: ops.resolve(name, "cpu", info.spec.dtype) for name in ("reference", "cpu")}
    rows = []
    for case in cases(kernels, Shapes.of(info.spec, options.model, (options.rows, options.context, options.prompt))):
        if options.only and options.only not in case.name:
            continue
        runs: dict[str, Callable[[], float]] = {
            name: partial(seconds_of_call, call) for name, call in case.runs.items()
        }
        seconds, ceilings = alternate(runs, options.repeats, info.spec)
        cpu, torch_alone = seconds["cpu"], seconds.get("torch")
        least = max(case.num_bytes / ceilings.bytes_per_second, case.num_flops / ceilings.flops_per_second)
        rows.append(
            [
                case.name, case.shape, 1e6 * seconds["reference"], 1e6 * cpu,
                "–" if torch_alone is None else 1e6 * torch_alone, seconds["reference"] / cpu,
                "–" if torch_alone is None else torch_alone / cpu, case.num_bytes / cpu / 1e9,
                case.num_flops / cpu / 1e9 if case.num_flops else "–", f"{least / cpu:.0%}",
            ]
        )  # fmt: skip
    workload = f"operands of {info.spec.num_layers} layers in turns; median of {options.repeats} alternations"
    print_table("kvscope bench kernels", facts(info, workload, ceilings), HEADERS, rows, options.json)
    return 0


def seconds_of_call(call: Callable[[], object]) -> float:
    """The median of some calls."""
    taken: list[float] = []
    started = time.perf_counter()
    while len(taken) < CALLS or time.perf_counter() - started < SECONDS:
        before = time.perf_counter()
        call()
        taken.append(time.perf_counter() - before)
    return statistics.median(taken)
