"""One step of the model: swap pages, copy pages, then forward.

Whole pages are moved before anything is written, in the order in which each may overwrite what the one before has read: out
to host memory, for the block may belong to someone else by now; in from host memory; copies, also of what has just come in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ..kvcache.storage import KVStorage
    from ..scheduling.batch import Batch
    from .base import Model


class ModelRunner:
    """Runs `model` on the pages of `storage`. Knows no request and no sampler; keeps nothing between steps."""

    def __init__(self, model: Model, storage: KVStorage):
        self.model = model
        self.storage = storage

    def execute(self, batch: Batch) -> torch.Tensor:
        """Logits, float32 [S, vocab], one row per entry of `batch.logits_indices`."""
        if len(batch.swap_out):
            self.storage.swap_out(batch.swap_out)
        if len(batch.swap_in):
            self.storage.swap_in(batch.swap_in)
        for pairs in batch.copies:
            self.storage.copy(pairs)
        return self.model.forward(batch, self.storage)
