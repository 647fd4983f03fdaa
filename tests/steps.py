"""Drives a model with no engine: block tables dealt by hand, one a KV group, so that a model test can fail for the model's reasons only."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import torch
from kvscope.engine.kvcache.storage import KVStorage
from kvscope.engine.models.base import Model
from kvscope.engine.models.runner import ModelRunner
from kvscope.engine.scheduling.batch import Batch
from kvscope.kernels.ops import Ops


class HandDealt:
    """Sequences over one pool; each gets the next free blocks, dealt in turns so that tables are not contiguous."""

    def __init__(
        self,
        model: Model,
        kernels: Ops,
        *,
        block_size: int = 4,
        num_blocks: int = 256,
        places: Sequence[int] = (),
        enforce_eager: bool = False,
    ):
        self.storage = KVStorage(
            model.spec.kv_groups,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=model.spec.dtype,
            device=model.spec.device,
            kernels=kernels,
        )
        self.runner = ModelRunner(model, self.storage, enforce_eager=enforce_eager)
        self.block_size = block_size
        self.places = places  # the absolute positions of a row's tokens, where they are not 0, 1, 2, …
        self.num_groups = len(model.spec.kv_groups)
        self.tables: dict[tuple[int, int], list[int]] = {}  # (row, group) -> block ids
        self.lengths: dict[int, int] = {}
        self._next_block = 1  # block 0 is the null block

    def step(
        self, tokens: dict[int, Sequence[int]], *, all_logits: bool = False, sampled: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Give each row its tokens. Logits of every row's last token, of every token, or of the tokens at `sampled`."""
        rows = {row: list(ids) for row, ids in tokens.items()}
        cache_lens = [self.lengths.get(row, 0) for row in rows]
        seq_lens = [have + len(ids) for have, ids in zip(cache_lens, rows.values(), strict=True)]
        needed = {row: -(-length // self.block_size) for row, length in zip(rows, seq_lens, strict=True)}
        for _ in range(max(needed.values())):
            for row, group in product(rows, range(self.num_groups)):
                table = self.tables.setdefault((row, group), [])
                if len(table) < needed[row]:
                    table.append(self._next_block)
                    self._next_block += 1
        positions = [p for have, length in zip(cache_lens, seq_lens, strict=True) for p in range(have, length)]
        owners = [row for row, ids in rows.items() for _ in ids]
        slots = [
            [
                self.tables[row, group][p // self.block_size] * self.block_size + p % self.block_size
                for row, p in zip(owners, positions, strict=True)
            ]
            for group in range(self.num_groups)
        ]
        starts = torch.tensor([0, *(len(ids) for ids in rows.values())]).cumsum(0)
        widest = max(needed.values())
        tables = [
            [self.tables[row, group][: needed[row]] + [0] * (widest - needed[row]) for row in rows]
            for group in range(self.num_groups)
        ]
        wanted = torch.arange(len(positions)) if all_logits else starts[1:] - 1
        if sampled is not None:
            wanted = torch.tensor(sampled, dtype=torch.long)
        batch = Batch(
            input_ids=torch.tensor([i for ids in rows.values() for i in ids]),
            positions=torch.tensor([self.places[p] for p in positions] if self.places else positions),
            query_start_loc=starts.int(),
            cache_lens=torch.tensor(cache_lens, dtype=torch.int32),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            slot_mapping=tuple(map(torch.tensor, slots)),
            block_tables=tuple(torch.tensor(table, dtype=torch.int32) for table in tables),
            logits_indices=wanted,
            copies=(torch.zeros(0, 2, dtype=torch.long),) * self.num_groups,
            is_decode=len(positions) == len(rows) == len(wanted),
        )
        self.lengths |= dict(zip(rows, seq_lens, strict=True))
        return self.runner.execute(batch)

    def greedy(self, prompt: Sequence[int], num_tokens: int, *, row: int = 0) -> list[int]:
        """Prompt in one step, then one token a step."""
        ids = [int(self.step({row: prompt})[0].argmax())]
        while len(ids) < num_tokens:
            ids.append(int(self.step({row: ids[-1:]})[0].argmax()))
        return ids
