"""What viewers get to see of a core: gauges and snapshots. Reads everything, changes nothing."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from . import derived
from .request import RequestStatus
from .snapshot import EngineSnapshot, RequestState

if TYPE_CHECKING:
    from .core import EngineCore
    from .request import Sequence

MAX_WAITING_SHOWN = 100  # of a long line; the gauges count all of it


def gauges(core: EngineCore) -> dict[str, float]:
    """The state of the core as numbers, by the names of `metrics.GAUGES`."""
    pool, running, swap = core.tables.pool, core.scheduler.running, core.scheduler.swap
    num_running = len({seq.request.id for seq in running})
    return {
        "vllm:num_requests_running": num_running,
        "vllm:num_requests_waiting": core.num_live - num_running,
        "vllm:kv_cache_usage_perc": pool.num_used / (pool.num_blocks - 1),
        "kvscope:num_sequences_running": len(running),
        "kvscope:num_blocks_used": pool.num_used,
        "kvscope:num_blocks_cached": pool.num_free_cached,
        "vllm:num_requests_swapped": len({seq.request.id for seq in swap.sequences}),
        "vllm:cpu_cache_usage_perc": swap.num_used / max(1, swap.num_blocks),
        "kvscope:num_cpu_blocks_used": swap.num_used,
        "kvscope:num_slots_used": pool.used_slots,
    }


def take_snapshot(core: EngineCore, state: str) -> EngineSnapshot:
    """Copy what a viewer may see. Costs a few array copies and a little for every running request."""
    pool, step = core.tables.pool, core.journal.step
    line = core.scheduler.waiting.first(MAX_WAITING_SHOWN)
    sequences = sorted([*core.scheduler.running, *line], key=lambda s: s.key)
    places = {seq: place for place, seq in enumerate(line)}
    requests = tuple(_state(core, seq, places.get(seq, -1)) for seq in sequences)
    ref_count = np.array(pool.ref_count, np.int32)
    return EngineSnapshot(
        step=step,
        time=time.monotonic(),
        state=state,
        block_size=core.tables.common_size,
        num_blocks=pool.num_blocks,
        block_state=pool.states(),
        ref_count=ref_count,
        generation=np.array(pool.generation, np.int32),
        filled=np.array(pool.filled, np.int32),
        owner=derived.owners(requests, pool.num_blocks),
        last_used_step=derived.last_used(np.asarray(pool.last_used_step), ref_count, step),
        eviction_order=pool.eviction_order(),
        parent=pool.parents(),
        num_hits=np.array(pool.hits, np.int32),
        computed_for=np.array(pool.computed_for, np.int32),
        requests=requests,
        num_host_blocks=core.scheduler.swap.num_blocks,
        counters=core.metrics(),
        block_sizes=core.tables.unequal_sizes,
        group=np.array(pool.group if core.tables.unequal_sizes else (), np.int8),
    )


def _state(core: EngineCore, seq: Sequence, place: int) -> RequestState:
    request = seq.request
    blocked = None if seq.status is RequestStatus.RUNNING else core.scheduler.reasons.of(seq)
    return RequestState(
        id=request.id,
        child=seq.child,
        status=seq.status.value,
        num_samples=request.params.n,
        num_prompt_tokens=request.num_prompt_tokens,
        num_computed_tokens=seq.num_computed_tokens,
        num_cached_tokens=seq.num_cached_tokens,
        num_output_tokens=seq.num_output_tokens,
        block_tables=tuple(np.array(table, np.int32) for table in seq.block_tables),
        blocked_because=core.scheduler.reasons.words(seq),
        blocked_cause="" if blocked is None else blocked.cause.value,
        num_reserved_tokens=core.tables.reserved_tokens(seq),
        label=request.label,
        priority=request.priority,
        deadline=request.deadline,
        arrival=request.metrics.arrival,
        first_token=request.metrics.first_token,
        queue_place=place,
        waiting_since_step=seq.waiting_since_step,
        num_times_passed=seq.num_times_passed,
        host_tables=tuple(np.array(table, np.int32) for table in core.scheduler.swap.slots(seq)),
    )
