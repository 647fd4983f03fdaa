"""How many blocks the KV pool has: as many as asked for, or as fit into so many bytes or into a share of memory.

    num_blocks              taken as it is
    kv_cache_memory_bytes   as many whole blocks as fit
    gpu_memory_utilization  the share is for weights and pool together: what loading the model took, measured, goes off it.
                            A share of all the GPU's memory, as in vLLM; on a CPU of what was free before loading, because
                            the machine is shared with a browser, a notebook and the operating system

What loading took is what this process holds more than before, not what the machine has less: others come and go meanwhile.
So a second engine that shares the first one's weights pays nothing for them, and no engine pays for another's pool. The
arrays of a running step are not in the share; what is left of the memory is for them.
"""

from __future__ import annotations

from pathlib import Path

import psutil
import torch
from kvscope.kernels.ops import Ops

from .config import EngineConfig
from .kvcache.storage import KVStorage
from .models.base import ModelSpec

MOST_DEFAULT_BLOCKS = 512
LEAST_DEFAULT_BLOCKS = 16
DEFAULT_MEMORY_SHARE = 0.1  # of free memory, for the default pool
LEAST_BLOCKS = 2  # the null block and one to give out


class Loading:
    """Made before a model is loaded; knows afterwards what that took."""

    def __init__(self, device: torch.device):
        self._device = device
        self.free = free_memory(device)
        self.whole = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else self.free
        self._held = held_memory(device)

    def taken(self) -> int:
        """Bytes that this process holds more than before."""
        return max(0, held_memory(self._device) - self._held)


def decide_num_blocks(config: EngineConfig, spec: ModelSpec, kernels: Ops, loading: Loading) -> int:
    """Raises ValueError where the pool would be too small for one block, or larger than free memory."""
    size = config.block_size
    block_bytes = KVStorage.block_bytes_of(spec.kv_groups, block_size=size, dtype=spec.dtype, kernels=kernels)
    free = free_memory(spec.device)
    if config.kv_cache_memory_bytes is not None:
        asked = f"kv_cache_memory_bytes={config.kv_cache_memory_bytes}"
        num_blocks = _whole_blocks(asked, config.kv_cache_memory_bytes, block_bytes, size)
    elif config.gpu_memory_utilization is not None:
        budget, taken = int(loading.whole * config.gpu_memory_utilization), loading.taken()
        asked = f"gpu_memory_utilization={config.gpu_memory_utilization}"
        why = f"that is {_mib(budget)}, of which loading the model took {_mib(taken)}; "
        num_blocks = _whole_blocks(asked, max(0, budget - taken), block_bytes, size, why)
    else:
        fitting = int(free * DEFAULT_MEMORY_SHARE) // block_bytes
        num_blocks = config.num_blocks or max(LEAST_DEFAULT_BLOCKS, min(MOST_DEFAULT_BLOCKS, fitting))
        asked = f"num_blocks={num_blocks}"
    pool_bytes, host_bytes = num_blocks * block_bytes, config.num_cpu_blocks * block_bytes
    if pool_bytes > free:
        raise ValueError(
            f"{asked}: the pool would take {_mib(pool_bytes)} with block_size={size}, and {_mib(free)} are free"
        )
    free_in_host = free_memory(torch.device("cpu")) if spec.device.type == "cuda" else free - pool_bytes
    if host_bytes > free_in_host:
        raise ValueError(
            f"num_cpu_blocks={config.num_cpu_blocks}: they would take {_mib(host_bytes)} with block_size={size}, and "
            f"{_mib(free_in_host)} are free beside the pool"
        )
    return num_blocks


def _whole_blocks(asked: str, num_bytes: int, block_bytes: int, block_size: int, why: str = "") -> int:
    if num_bytes < LEAST_BLOCKS * block_bytes:
        raise ValueError(
            f"{asked}: {why}a pool has at least {LEAST_BLOCKS} blocks, the null block and one to give out, which take "
            f"{LEAST_BLOCKS * block_bytes} bytes with block_size={block_size}, and there are {num_bytes}"
        )
    return num_bytes // block_bytes


def _mib(num_bytes: int) -> str:
    return f"{num_bytes // 2**20} MiB"


def held_memory(device: torch.device) -> int:
    """Bytes that this process holds: on the GPU, what torch has reserved; else what is resident."""
    if device.type == "cuda":
        return torch.cuda.memory_reserved(device)
    return psutil.Process().memory_info().rss


def free_memory(device: torch.device, cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that can still be taken: of the GPU, or of the machine and of this process's container."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = psutil.virtual_memory().available
    try:
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no container, or "max": no limit
        return free
    # File pages that nobody uses count as used there, but the kernel gives them up.
    return min(free, max(0, limit - used + int(stat.get("inactive_file", 0))))
