"""One step of the model: swap pages, copy pages, then forward.

Whole pages are moved before anything is written, in the order in which each may overwrite what the one before has read: out
to host memory, for the block may belong to someone else by now; in from host memory; copies, also of what has just come in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .decoder import Decoder

if TYPE_CHECKING:
    from ..kvcache.storage import KVStorage
    from ..scheduling.batch import Batch
    from .base import Model
    from .decode_graphs import DecodeGraphs


class ModelRunner:
    """Runs `model` on the pages of `storage`. Knows no request and no sampler; keeps nothing between steps but how decode
    steps of a shape are computed."""

    def __init__(self, model: Model, storage: KVStorage, *, enforce_eager: bool = False):
        self.model = model
        self.storage = storage
        self._graphs: DecodeGraphs | None = None
        if not enforce_eager and isinstance(model, Decoder) and model.kernels.name == "cpu":
            from .decode_graphs import DecodeGraphs  # with the CPU's kernels, which a GPU does without

            self._graphs = DecodeGraphs(model, storage)

    def execute(self, batch: Batch) -> torch.Tensor:
        """Logits, float32 [S, vocab], one row per entry of `batch.logits_indices`."""
        if len(batch.swap_out):
            self.storage.swap_out(batch.swap_out)
        if len(batch.swap_in):
            self.storage.swap_in(batch.swap_in)
        for pairs in batch.copies:
            self.storage.copy(pairs)
        logits = self._graphs.forward(batch) if self._graphs else None
        return self.model.forward(batch, self.storage) if logits is None else logits
