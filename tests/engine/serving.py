"""What tests of a whole engine share: small options, the threads to look for, and a model that says what it is told.

After absolute position p `ScriptedModel` says token `script[p]`, whatever the prompt. It makes the text of a test exact:
with a prompt of one token, output token i is `script[i]`.
"""

from __future__ import annotations

import threading
import time

import torch
from kvscope.engine import Engine, assembly
from kvscope.engine.models.base import KVGroup, ModelSpec

VOCAB_SIZE = 300
OPTIONS = {"dtype": "float32", "kernels": "reference", "num_blocks": 64}


def engine_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("kvscope-engine")]


class ScriptedModel:
    """`seconds` is what a step takes; `fault`, when set, is raised once; `spoil` puts that value into every logit once."""

    def __init__(self, script, seconds=0.0, eos_token_ids=()):
        self.script = list(script)
        self.seconds = seconds
        self.fault: BaseException | None = None
        self.spoil: float | None = None
        self.steps = 0
        self.spec = ModelSpec(
            name="scripted",
            architecture="Scripted",
            num_layers=1,
            hidden_size=8,
            num_heads=1,
            num_kv_heads=1,
            head_dim=8,
            vocab_size=VOCAB_SIZE,
            max_model_len=1024,
            kv_groups=(KVGroup((0,), 1, 8),),
            dtype=torch.float32,
            device=torch.device("cpu"),
            eos_token_ids=frozenset(eos_token_ids),
            tied_embeddings=False,
            num_parameters=0,
            weight_bytes=0,
        )

    def forward(self, batch, storage):
        self.steps += 1
        time.sleep(self.seconds)
        if self.fault is not None:
            fault, self.fault = self.fault, None
            raise fault
        positions = batch.positions[batch.logits_indices].tolist()
        logits = torch.full((len(positions), VOCAB_SIZE), -10.0)
        for row, position in enumerate(positions):
            logits[row, self.script[position % len(self.script)]] = 10.0
        if self.spoil is not None:
            logits[:], self.spoil = self.spoil, None
        return logits


def scripted_engine(monkeypatch, folder, script, *, seconds=0.0, eos_token_ids=(), **options):
    """(engine, model): an engine around the tokenizer in `folder` and a scripted model."""
    model = ScriptedModel(script, seconds, eos_token_ids)
    monkeypatch.setattr(assembly, "load_model", lambda files, **_: model)
    return Engine(folder, **{**OPTIONS, **options}), model
