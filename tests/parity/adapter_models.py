"""Tiny checkpoints of architectures that only the adapter serves, and broken ones that it must refuse.

The broken models stand for faults that real architectures have: one layer that attends by itself, positions counted
from the packed row instead of taken from the argument, a window that only the mask knew about, and so on. They live in
this module so that transformers can look into their source as it does with its own.
"""

from __future__ import annotations

from pathlib import Path

import tiny
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention

OPTIONS = {
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "max_position_embeddings": 256, "n_inner": 96},
    "gpt_neox": {"max_position_embeddings": 256, "rotary_pct": 0.5, "use_parallel_residual": True},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64, "max_position_embeddings": 256},
    "llama": {},  # forced through the adapter
    "phi": {"partial_rotary_factor": 0.5},
    "gemma2": {"head_dim": 16, "sliding_window": 12},  # soft caps, every other layer with a window
    "mixtral": {"num_local_experts": 4, "sliding_window": None},
    "starcoder2": {"sliding_window": 12},
}


def make(folder: Path, model_type: str, *, seed: int = 3) -> Path:
    """The checkpoint; with this seed no step of the GPT-2 grid is a near tie."""
    return tiny.tiny_model(folder / model_type, model_type, tokenizer=False, seed=seed, **OPTIONS[model_type])


class SilentLayer(LlamaAttention):
    """Attends by itself, past the attention function."""

    def forward(self, hidden_states, position_embeddings, attention_mask=None, cache=None, **kwargs):
        return self.o_proj(self.q_proj(hidden_states)), None


class TwiceLayer(LlamaAttention):
    """Calls the attention function twice."""

    def forward(self, hidden_states, *arguments, **kwargs):
        super().forward(hidden_states, *arguments, **kwargs)
        return super().forward(hidden_states, *arguments, **kwargs)


class MixingLayer(LlamaAttention):
    """Adds the token before in the packed row: a convolution whose state is in no page."""

    def forward(self, hidden_states, *arguments, **kwargs):
        output, weights = super().forward(hidden_states, *arguments, **kwargs)
        return output + hidden_states.roll(1, dims=1), weights


class ExtraMathsLayer(LlamaAttention):
    """Asks the attention function for something that it does not implement."""

    extra: dict = {}  # noqa: RUF012

    def forward(self, hidden_states, *arguments, **kwargs):
        return super().forward(hidden_states, *arguments, **kwargs, **self.extra)


class OwnPositions(LlamaForCausalLM):
    """Counts positions from the start of the packed row."""

    def forward(self, input_ids=None, position_ids=None, logits_to_keep=0, **kwargs):
        own = torch.arange(input_ids.shape[1])[None]
        return super().forward(input_ids=input_ids, position_ids=own, logits_to_keep=logits_to_keep, **kwargs)


class NoPositions(LlamaForCausalLM):
    """Takes no position_ids."""

    def forward(self, input_ids=None, logits_to_keep=0, **kwargs):
        return super().forward(input_ids=input_ids, logits_to_keep=logits_to_keep, **kwargs)


class OddConfig(LlamaConfig):
    """A Llama under another name, so that the native decoder does not take it."""

    model_type = "kvscope_odd"


def odd(layer: type | None = None, *, at: int = 1, extra: dict | None = None, base: type = LlamaForCausalLM) -> type:
    """A model class with `layer` in the place of its attention module number `at`."""

    class OddForCausalLM(base):
        config_class = OddConfig
        config: OddConfig

        def __init__(self, config):
            super().__init__(config)
            if layer is not None:
                module = layer(config, at)
                if extra is not None:
                    module.extra = extra
                self.model.layers[at].self_attn = module

    return OddForCausalLM


def make_odd(folder: Path, monkeypatch, model_class: type, **overrides) -> Path:
    """Write a checkpoint of `model_class` and let transformers know of it for the time of one test."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    monkeypatch.setitem(CONFIG_MAPPING._extra_content, OddConfig.model_type, OddConfig)
    monkeypatch.setitem(MODEL_FOR_CAUSAL_LM_MAPPING._extra_content, OddConfig, model_class)
    config = AutoConfig.for_model(OddConfig.model_type, **{**tiny.SMALL, **overrides})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.2)
    model.save_pretrained(folder)
    return folder
