"""The flat arrays of one step: what the scheduler decided, as the model and the kernels want it.

T = tokens in the step, R = rows (sequences, then padding), S = tokens whose logits are wanted, G = KV groups.
Each field says who fills it and who reads it; nothing else travels between scheduler and model.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from .plan import Plan


PAD_TOKEN = 0
NO_MOVES = torch.empty(0, 2, dtype=torch.int64)


@dataclass(slots=True)
class Batch:
    input_ids: torch.Tensor  # int64 [T]; from the requests
    positions: torch.Tensor  # int64 [T]; absolute, for the rotary embedding and the mask
    query_start_loc: torch.Tensor  # int32 [R + 1]; row r owns tokens query_start_loc[r] : query_start_loc[r + 1]
    cache_lens: torch.Tensor  # int32 [R]; rows already in the cache before this step
    seq_lens: torch.Tensor  # int32 [R]; cache_lens + this step's tokens of the row
    slot_mapping: tuple[
        torch.Tensor, ...
    ]  # G × int64 [T]; block_id * the group's block size + offset, where KV is written
    block_tables: tuple[torch.Tensor, ...]  # G × int32 [R, most blocks of a row], padded with 0 (the null block)
    logits_indices: torch.Tensor  # int64 [S]; of T, who gets logits: ends of sampled rows, prompt_spans, padding
    copies: tuple[torch.Tensor, ...]  # G × int64 [C, 2]; (source, copy) pages to copy before anything is written
    is_decode: bool = False  # every row is one token, and its logits are wanted: logits_indices is 0 … T − 1
    swap_out: torch.Tensor = NO_MOVES  # int64 [C, 2], on the CPU; (block, host block) to copy before that
    swap_in: torch.Tensor = NO_MOVES  # int64 [C, 2], on the CPU; (host block, block) to copy between the two

    @classmethod
    def from_plan(cls, plan: Plan, *, block_sizes: tuple[int, ...], device: torch.device | str = "cpu") -> Batch:
        """Flatten a plan: its sequences, and the first part of its padding; `block_sizes` are those of the groups. One pass over
        the rows gathers what differs by row; the rest is numpy over all tokens."""
        rows, padding = plan.sequences, plan.padding[0] if plan.padding else []
        num_rows = len(rows) + len(padding)
        token_ids, starts = array("q"), array("i")
        for seq, num_tokens in zip(rows, plan.num_tokens, strict=True):
            start = seq.num_computed_tokens
            token_ids.extend(seq.token_ids[start : start + num_tokens])
            starts.append(start)
        for row in padding:
            token_ids.extend([PAD_TOKEN] * row.num_tokens)
            starts.append(row.start)
        cache_lens = np.frombuffer(starts, np.int32)  # [R]
        query_lens = np.array(plan.num_tokens + [row.num_tokens for row in padding], np.int32)  # [R]
        query_start_loc = np.zeros(num_rows + 1, np.int32)
        np.cumsum(query_lens, out=query_start_loc[1:])
        row_of = np.repeat(np.arange(num_rows), query_lens)  # [T]
        positions = np.arange(len(token_ids)) + (cache_lens - query_start_loc[:-1])[row_of]  # [T]
        places = {size: np.divmod(positions, size) for size in set(block_sizes)}  # (logical block, offset), each [T]
        wanted = query_start_loc[1:][plan.sampled_rows].astype(np.int64) - 1
        if plan.prompt_spans:
            spans = [query_start_loc[row] + np.arange(first, end) for row, first, end in plan.prompt_spans]
            wanted = np.concatenate([wanted, *spans])
        if sampled := [len(rows) + i for i, row in enumerate(padding) if row.is_sampled]:
            wanted = np.concatenate([wanted, query_start_loc[1:][sampled].astype(np.int64) - 1])

        tables, slots = [], []
        longest = max([row.start + row.num_tokens for row in padding], default=0)
        for group, size in enumerate(block_sizes):
            widest = -(-longest // size)
            width = max([widest, *[len(seq.block_tables[group]) for seq in rows]])
            padded = bytearray().join(seq.block_tables[group].tobytes().ljust(4 * width, b"\0") for seq in rows)
            padded += bytes(4 * width * len(padding))  # the null block
            table = np.frombuffer(padded, np.int32).reshape(num_rows, width)
            tables.append(table)
            logical, offset = places[size]
            slots.append(table[row_of, logical].astype(np.int64) * size + offset)

        def tensor(values: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(values).to(device)

        def moves(pairs: list[tuple[int, int]]) -> torch.Tensor:
            return tensor(np.array(pairs, np.int64).reshape(-1, 2))

        return cls(
            input_ids=tensor(np.frombuffer(token_ids, np.int64)),
            positions=tensor(positions),
            query_start_loc=tensor(query_start_loc),
            cache_lens=tensor(cache_lens),
            seq_lens=tensor(cache_lens + query_lens),
            slot_mapping=tuple(map(tensor, slots)),
            block_tables=tuple(map(tensor, tables)),
            logits_indices=tensor(wanted),
            copies=tuple(map(moves, plan.copies)),
            is_decode=0 < len(token_ids) == num_rows == len(plan.sampled_rows) == len(wanted),
            swap_out=torch.tensor(plan.swap_out) if plan.swap_out else NO_MOVES,
            swap_in=torch.tensor(plan.swap_in) if plan.swap_in else NO_MOVES,
        )

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[0]

    @property
    def num_rows(self) -> int:
        return self.seq_lens.shape[0]
