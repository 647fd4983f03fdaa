"""What this process may use of its machine: vector instructions and CPUs. Read before any kernel is compiled.

LLVM does not refuse an instruction that its target lacks: it aborts the whole process. So whoever compiles one asks
`CPU` first, which holds exactly the features that Numba hands to LLVM.
"""

from __future__ import annotations

import math
import os
import platform
from dataclasses import dataclass
from pathlib import Path

import numba
from llvmlite import binding as llvm
from numba.core.registry import cpu_target


@dataclass(frozen=True, slots=True)
class CpuFlags:
    """The vector instructions that kernels may use in this process."""

    name: str  # LLVM's name of the target, such as "znver5"
    avx2: bool  # with FMA
    avx512: bool  # F, BW, DQ and VL
    avx512_bf16: bool  # dot products of bfloat16 pairs, and float32 -> bfloat16
    avx512_vnni: bool  # dot products of four bytes
    avx512_vbmi: bool  # tables of 128 bytes, looked up 64 at a time

    @classmethod
    def read(cls) -> CpuFlags:
        """Reads the target that Numba gives to LLVM.

        That is the host unless NUMBA_CPU_NAME or NUMBA_CPU_FEATURES say otherwise. Numba keeps the host's features
        when only the name is changed; a name that is not the host's is taken at its word here: no AVX-512.
        """
        _, name, features = cpu_target.target_context.codegen().magic_tuple()
        has = {feature[1:] for feature in features.split(",") if feature.startswith("+")}
        is_x86 = platform.machine().lower() in ("x86_64", "amd64")
        is_host = name == llvm.get_host_cpu_name() or numba.config.CPU_FEATURES is not None
        avx2 = is_x86 and {"avx2", "fma"} <= has
        avx512 = avx2 and is_host and {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= has
        more = (avx512 and f"avx512{feature}" in has for feature in ("bf16", "vnni", "vbmi"))
        return cls(name, avx2, avx512, *more)


CPU = CpuFlags.read()


def available_cpus() -> int:
    """CPUs this process may use: its affinity, and the quota of its container (rounded up) where there is one."""
    try:
        cpus = len(os.sched_getaffinity(0))
    except AttributeError:  # macOS and Windows
        cpus = os.cpu_count() or 1
    quota = _cgroup_quota()
    return max(1, cpus if quota is None else min(cpus, math.ceil(quota)))


def _cgroup_quota(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """CPUs granted by the control group, version 2 or 1; None where there is no limit."""
    try:
        quota, period = (root / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (root / "cpu/cpu.cfs_quota_us").read_text()
            period = (root / "cpu/cpu.cfs_period_us").read_text()
        except OSError:
            return None
    try:
        return float(quota) / float(period) if float(quota) > 0 else None
    except ValueError:  # "max"
        return None
