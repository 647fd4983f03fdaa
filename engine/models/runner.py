"""One step of the model: copy pages, then forward. Copies come first, because the step writes to the copies."""

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
        for pairs in batch.copies:
            self.storage.copy(pairs)
        return self.model.forward(batch, self.storage)
