"""What this machine can do at best, measured now: the two ceilings that the floor of a step is made of.

Both move from minute to minute on a shared machine, so they are taken between the timed runs and not once.
"""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from kvscope.kernels.huge_pages import empty

if TYPE_CHECKING:
    from ..info import EngineInfo
    from ..models.base import ModelSpec


@dataclass(frozen=True, slots=True)
class Ceilings:
    bytes_per_second: float  # reading memory that does not fit in cache, all threads
    flops_per_second: float  # a large matrix product in the given dtype
    int8_per_second: float = math.inf  # the same of int8, summed in int32


def measure_ceilings(dtype: torch.dtype, weights: torch.Tensor) -> Ceilings:
    """Best of three: one pass over `weights` (uint8, as large as the model's), and products of 1536³, as is and in int8."""
    words = weights.view(torch.int64)
    a = torch.randn(1536, 1536).to(dtype)
    read = min(seconds_of(words.sum) for _ in range(3))
    multiply = min(seconds_of(lambda: a @ a) for _ in range(3))
    whole = torch.randint(-127, 128, (1536, 1536), dtype=torch.int8)
    count = min(seconds_of(lambda: torch._int_mm(whole, whole.T)) for _ in range(3))
    return Ceilings(weights.numel() / read, 2 * 1536**3 / multiply, 2 * 1536**3 / count)


def facts(info: EngineInfo, workload: str, ceilings: Ceilings | None = None) -> dict[str, str]:
    """The lines that stand above every table; no ceilings where nothing is compared with them."""
    import numba
    import transformers

    told = {
        "machine": f"{_cpu_name()}, {torch.get_num_threads()} threads",
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}, "
        f"Numba {numba.__version__}, transformers {transformers.__version__}",
        "model": f"{info.model_name}, {info.precision}, from {info.weights_source}",
        "workload": workload,
    }
    if ceilings is not None:
        told["ceilings"] = (
            f"{ceilings.bytes_per_second / 1e9:.0f} GB/s, {ceilings.flops_per_second / 1e12:.2f} TFLOP/s, "
            f"{ceilings.int8_per_second / 1e12:.2f} TOP/s in int8 (median)"
        )
    return told


def _cpu_name() -> str:
    if platform.system() == "Linux":
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def seconds_of(call: Callable[[], object]) -> float:
    """Wall-clock seconds of one call, on a GPU until the device has finished."""
    _finish()
    start = time.perf_counter()
    call()
    _finish()
    return time.perf_counter() - start


def _finish() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def alternate(runs: dict[str, Callable[[], float]], repeats: int, spec: ModelSpec) -> tuple[dict[str, float], Ceilings]:
    """Median of what each run measures (seconds), taken in turns, and the median ceilings measured between the turns.

    The ratios then hold on a machine whose speed moves from minute to minute. Each is run once before, to warm. NaN for a run
    that gave NaN in any of its turns.
    """
    buffer = empty([-(-spec.weight_bytes // 8) * 8], torch.uint8)  # as large as the weights, in memory of their kind
    buffer.fill_(1)  # touched
    taken: dict[str, list[float]] = {name: [] for name in runs}
    ceilings = []
    for run in runs.values():
        run()
    for _ in range(repeats):
        for name, run in runs.items():
            taken[name].append(run())
        ceilings.append(measure_ceilings(spec.dtype, buffer))
    ceilings.sort(key=lambda c: c.bytes_per_second)
    return {name: float(np.median(values)) for name, values in taken.items()}, ceilings[len(ceilings) // 2]
