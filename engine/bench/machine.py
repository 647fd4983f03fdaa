"""What this machine can do at best, measured now: the two ceilings that the floor of a step is made of.

Both move from minute to minute on a shared machine, so they are taken between the timed runs and not once.
"""

from __future__ import annotations

import platform
import time
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Ceilings:
    bytes_per_second: float  # reading memory that does not fit in cache, all threads
    flops_per_second: float  # a large matrix product in the given dtype


def measure_ceilings(dtype: torch.dtype, weights: torch.Tensor) -> Ceilings:
    """Best of three: one pass over `weights` (uint8, as large as the model's), and one product of 1536³."""
    words = weights.view(torch.int64)
    a = torch.randn(1536, 1536).to(dtype)
    read = min(_seconds(words.sum) for _ in range(3))
    multiply = min(_seconds(lambda: a @ a) for _ in range(3))
    return Ceilings(weights.numel() / read, 2 * 1536**3 / multiply)


def buffer_like(weight_bytes: int) -> torch.Tensor:
    """Memory to measure bandwidth on: touched, as large as the weights, a multiple of 8 bytes."""
    return torch.ones(-(-weight_bytes // 8) * 8, dtype=torch.uint8)


def describe() -> dict[str, str]:
    """The lines that stand above every table."""
    import numba
    import transformers

    return {
        "machine": f"{_cpu_name()}, {torch.get_num_threads()} threads",
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}, "
        f"Numba {numba.__version__}, transformers {transformers.__version__}",
    }


def _cpu_name() -> str:
    if platform.system() == "Linux":
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _seconds(call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
