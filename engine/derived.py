"""What of a snapshot follows from the rest of it: said once, for snapshots of a live engine and of a recorded one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .snapshot import ALONE, NOT_CACHED, ROOT, BlockState, RequestState

NULL_BLOCK = 0


def block_states(ref_count: np.ndarray, is_cached: np.ndarray) -> np.ndarray:
    """BlockState of every block, from its readers and whether its text can be found (1): uint8."""
    state = is_cached.astype(np.uint8)  # EMPTY 0, CACHED 1
    state[ref_count == 1] = BlockState.ACTIVE
    state[ref_count > 1] = BlockState.SHARED
    state[NULL_BLOCK] = BlockState.PINNED
    return state


def parents(before: np.ndarray, is_cached: np.ndarray, is_alone: np.ndarray) -> np.ndarray:
    """The cached block that each cached block continues, or ROOT, NOT_CACHED, ALONE: int32."""
    parent = np.where(before == NULL_BLOCK, ROOT, before).astype(np.int32)
    parent[is_alone == 1] = ALONE
    parent[is_cached == 0] = NOT_CACHED
    return parent


def last_used(last_used_step: np.ndarray, ref_count: np.ndarray, step: int) -> np.ndarray:
    """When each block was last used, where a block that has a reader is in use now: int32."""
    return np.where(ref_count > 0, step, last_used_step).astype(np.int32)


def owners(requests: Sequence[RequestState], num_blocks: int) -> np.ndarray:
    """Index into `requests` of the first reader of each block, −1 none: int32."""
    owner = np.full(num_blocks, -1, np.int32)
    for i in range(len(requests) - 1, -1, -1):  # backwards, so that the first reader stays
        for table in requests[i].block_tables:
            owner[table] = i
    owner[NULL_BLOCK] = -1
    return owner
