"""Decode steps as replays: what a model does between its kernels is done once for each shape of a step.

A step in which every row is one token, whose logits are wanted, does the same kernel calls as the last one of as many
rows; only what the arrays hold has changed. So such a step is captured (`kernels.cpu.replay`) when its shape has come
often enough, and from then on its arrays are copied to where the captured calls read them.

A shape is the number of rows and the width of the block tables, rounded up so that a sequence meets few of them.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from kvscope.kernels.cpu.compiler import num_threads
from kvscope.kernels.cpu.replay import KernelGraph, NotCapturable, ReusedMemory

if TYPE_CHECKING:
    from ..kvcache.storage import KVStorage
    from ..scheduling.batch import Batch
    from .decoder import Decoder

WORTH = 3  # steps of a shape before one is captured, which takes about as long as two of them
MOST = 64  # graphs that are kept, those that ran last
WIDTH = 32  # blocks by which a captured table is longer than the one before

Shape = tuple[int, ...]


class DecodeGraphs:
    """Of one engine, which calls it from one thread at a time."""

    def __init__(self, model: Decoder, storage: KVStorage):
        self._model, self._storage = model, storage
        self._memory = ReusedMemory()
        self._graphs: OrderedDict[Shape, _DecodeGraph] = OrderedDict()
        self._seen: Counter[Shape] = Counter()
        self._serves = True  # the model computes with nothing but kernels

    def forward(self, batch: Batch) -> torch.Tensor | None:
        """Logits as `Decoder.forward` gives them; None where that has to be asked."""
        if not (self._serves and batch.is_decode):
            return None
        tables = self._model.rotary_tables(batch)
        widths = [-(-table.shape[1] // WIDTH) * WIDTH for table in batch.block_tables]
        addresses = (self._storage.pages(0)[0].data_ptr(), *(table.data_ptr() for table in tables))
        shape = (batch.num_rows, num_threads(), *widths, *addresses)
        graph = self._graphs.get(shape)
        if graph is not None:
            self._graphs.move_to_end(shape)
            hidden = graph.replay(self._model.embed(batch.input_ids), batch)
            return None if hidden is None else self._model.logits(hidden)
        self._seen[shape] += 1
        if self._seen[shape] < WORTH:
            return None
        if len(self._graphs) == MOST:
            self._graphs.popitem(last=False)
            self._seen.clear()
        try:
            graph = _DecodeGraph(self._memory, self._model, self._storage, tables, batch, widths)
        except NotCapturable:
            self._serves = False
            return None
        self._graphs[shape] = graph
        return self._model.logits(graph.result)


class _DecodeGraph:
    """One shape: the tensors that the captured calls read, and the one that they write."""

    def __init__(
        self,
        memory: ReusedMemory,
        model: Decoder,
        storage: KVStorage,
        tables: list[torch.Tensor],
        batch: Batch,
        widths: list[int],
    ):
        tables_of_blocks = (torch.zeros(batch.num_rows, width, dtype=torch.int32) for width in widths)
        self._batch = replace(batch, block_tables=tuple(tables_of_blocks))  # whose other arrays are ours from now on
        self._residual = model.embed(batch.input_ids)
        self._tables = tables
        self._load(batch)
        self._graph = KernelGraph(memory)
        self.result = self._graph.capture(lambda: model.layers(self._residual, tables, self._batch, storage))

    def _load(self, batch: Batch) -> None:
        mine = self._batch
        mine.positions.copy_(batch.positions)
        mine.seq_lens.copy_(batch.seq_lens)
        for here, slots in zip(mine.slot_mapping, batch.slot_mapping, strict=True):
            here.copy_(slots)
        for here, table in zip(mine.block_tables, batch.block_tables, strict=True):
            here[:, : table.shape[1]].copy_(table)

    def replay(self, residual: torch.Tensor, batch: Batch) -> torch.Tensor | None:
        self._load(batch)
        self._residual.copy_(residual)
        return self.result if self._graph.replay() else None
