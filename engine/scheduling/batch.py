"""The flat arrays of one step: what the scheduler decided, as the model and the kernels want it.

T = tokens in the step, R = rows (sequences), S = rows whose logits are wanted, G = KV groups.
Each field says who fills it and who reads it; nothing else travels between scheduler and model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(slots=True)
class Batch:
    input_ids: torch.Tensor  # int64 [T]; from the requests
    positions: torch.Tensor  # int64 [T]; absolute, for the rotary embedding and the mask
    query_start_loc: torch.Tensor  # int32 [R + 1]; row r owns tokens query_start_loc[r] : query_start_loc[r + 1]
    cache_lens: torch.Tensor  # int32 [R]; rows already in the cache before this step
    seq_lens: torch.Tensor  # int32 [R]; cache_lens + this step's tokens of the row
    slot_mapping: tuple[torch.Tensor, ...]  # G × int64 [T]; block_id * block_size + offset, where KV is written
    block_tables: tuple[torch.Tensor, ...]  # G × int32 [R, most blocks of a row], padded with 0 (the null block)
    logits_indices: torch.Tensor  # int64 [S]; rows of the [T, hidden] activations that get logits
    copies: tuple[torch.Tensor, ...]  # G × int64 [C, 2]; (source, copy) pages to copy before anything is written

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[0]

    @property
    def num_rows(self) -> int:
        return self.seq_lens.shape[0]
