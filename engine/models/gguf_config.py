"""What a .gguf file's metadata says, as a transformers config: one line of a table for each architecture.

llama.cpp's keys describe the same shapes under other names. Everything that changes the maths is carried over or
refused: rotary scaling in all its forms (Llama 3's hides in a tensor of factors), windows, soft caps and biases.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader

from .gguf_header import GGUFError


@dataclass(frozen=True, slots=True)
class Architecture:
    """How one architecture of llama.cpp becomes one of transformers.

    keys         metadata key (without the architecture's prefix) -> config field, beside those all share
    interleaved  q and k rows are stored with the halves of each rotary pair interleaved
    transposed   tensors (last part of the name) that transformers stores the other way round
    norm_offset  what is added to norm weights: llama.cpp stores w + 1 where transformers computes with 1 + w
    biases       config field -> tensor whose presence switches it on
    """

    gguf: str
    model_type: str
    keys: dict[str, str] = field(default_factory=dict)
    interleaved: bool = False
    transposed: tuple[str, ...] = ()
    norm_offset: float = 0.0
    biases: dict[str, str] = field(default_factory=dict)


_RMS = {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}

ARCHITECTURES = {
    arch.gguf: arch
    for arch in (
        Architecture(
            "llama",
            "llama",
            keys={**_RMS, "attention.key_length": "head_dim"},
            interleaved=True,
            biases={"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_gate.bias"},
        ),
        Architecture("qwen2", "qwen2", keys=_RMS),
        Architecture(
            "qwen3",
            "qwen3",
            keys={**_RMS, "attention.key_length": "head_dim"},
            biases={"attention_bias": "blk.0.attn_q.bias"},
        ),
        Architecture("phi3", "phi3", keys={**_RMS, "attention.sliding_window": "sliding_window"}),
        Architecture(
            "gemma2",
            "gemma2",
            keys={
                **_RMS,
                "attention.key_length": "head_dim",
                "attention.sliding_window": "sliding_window",
                "attn_logit_softcapping": "attn_logit_softcapping",
                "final_logit_softcapping": "final_logit_softcapping",
            },
            norm_offset=-1.0,
        ),
        Architecture(
            "gpt2",
            "gpt2",
            keys={"attention.layer_norm_epsilon": "layer_norm_epsilon"},
            transposed=("attn_qkv", "attn_output", "ffn_up", "ffn_down"),
        ),
        Architecture("starcoder2", "starcoder2", keys={"attention.layer_norm_epsilon": "norm_epsilon"}),
    )
}

MOST = 2**31  # of anything that a model has
_SHARED = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
}
_GPT2 = {
    "max_position_embeddings": "n_positions",
    "num_hidden_layers": "n_layer",
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "num_attention_heads": "n_head",
}


class Metadata:
    """Read-only view of a file's keys; floats come back as the decimal that was written into float32."""

    def __init__(self, path: Path, reader: GGUFReader):
        self.path = path
        self._reader = reader
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.architecture = str(self.get("general.architecture"))

    def __contains__(self, key: str) -> bool:
        return key in self._reader.fields

    def __getitem__(self, key: str) -> Any:
        value = self._reader.fields[key].contents()
        if isinstance(value, float):
            return float(str(np.float32(value))) if value == np.float32(value) else value
        return value

    def get(self, key: str, default: Any = None) -> Any:
        return default if key not in self._reader.fields else self[key]

    def own(self, key: str, default: Any = None) -> Any:
        """The value of `<architecture>.<key>`."""
        return self.get(f"{self.architecture}.{key}", default)

    @property
    def num_tensors(self) -> int:
        return len(self._tensors)

    def has_tensor(self, name: str) -> bool:
        return name in self._tensors

    def tensor(self, name: str) -> np.ndarray | None:
        """A float32 tensor by its name, or None."""
        found = self._tensors.get(name)
        return None if found is None else np.asarray(found.data, dtype=np.float32)


def build_config(architecture: Architecture, metadata: Metadata):
    """The transformers config of the file. Raises GGUFError with a sentence where something cannot be carried over."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name = metadata.path.name
    if metadata.own("expert_count", 0):
        raise GGUFError(f"{name} is a mixture of {metadata.own('expert_count')} experts, which kvscope does not serve.")
    values: dict[str, Any] = {}
    for key, target in {**_SHARED, **architecture.keys}.items():
        value = metadata.own(key)
        if isinstance(value, list):
            if len(set(value)) > 1:
                raise GGUFError(f"{name}: {key} differs from layer to layer, which kvscope does not serve.")
            value = value[0]
        if value is not None:
            values[target] = value
    for required in ("num_hidden_layers", "hidden_size", "num_attention_heads"):
        if required not in values:
            key = next(key for key, target in _SHARED.items() if target == required)
            raise GGUFError(f"{name} does not state {metadata.architecture}.{key}.")
    for key, target in _SHARED.items():
        if target in values and not (type(values[target]) is int and 1 <= values[target] <= MOST):
            raise GGUFError(f"{name} states {key}={values[target]!r}: must be a number from 1 to {MOST:,}.")
    if values["num_hidden_layers"] > metadata.num_tensors:
        raise GGUFError(
            f"{name} states {values['num_hidden_layers']} blocks and holds {metadata.num_tensors} tensors: it is damaged."
        )
    values.setdefault("num_key_value_heads", values["num_attention_heads"])
    values["vocab_size"] = metadata.own("vocab_size") or len(metadata.get("tokenizer.ggml.tokens", []))
    values["tie_word_embeddings"] = not metadata.has_tensor("output.weight")
    for option, tensor in architecture.biases.items():
        values[option] = metadata.has_tensor(tensor)
    for token in ("bos", "eos", "padding"):
        values[f"{token.replace('padding', 'pad')}_token_id"] = metadata.get(f"tokenizer.ggml.{token}_token_id")
    if architecture.model_type == "gpt2":
        values = {_GPT2.get(key, key): value for key, value in values.items() if key != "num_key_value_heads"}
    else:
        _rotary(values, metadata)
    if architecture.model_type == "gemma2":
        # the scale is 1/sqrt(head_dim), but for the 27B model, which has 46 layers; the file does not say
        heads = values["num_attention_heads"]
        head_dim = values.get("head_dim", values["hidden_size"] // heads)
        values["query_pre_attn_scalar"] = (
            values["hidden_size"] // heads if values["num_hidden_layers"] == 46 else head_dim
        )
    config = AutoConfig.for_model(architecture.model_type, **values)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[architecture.model_type]]
    return config


def _rotary(values: dict[str, Any], metadata: Metadata) -> None:
    """Fill `rope_parameters` (and head_dim where only the rotary width is stated)."""
    head_dim = values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]
    rotated = metadata.own("rope.dimension_count", head_dim)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": metadata.own("rope.freq_base", 10000.0)}
    if rotated != head_dim:
        if metadata.architecture == "llama":
            values["head_dim"] = head_dim = rotated  # older files state the head size only so
        else:
            rope["partial_rotary_factor"] = rotated / head_dim
            values["partial_rotary_factor"] = rotated / head_dim
    kind = metadata.own("rope.scaling.type", "none")
    factor = metadata.own("rope.scaling.factor", metadata.own("rope.scale_linear", 1.0))
    original = metadata.own("rope.scaling.original_context_length")
    long, short = metadata.tensor("rope_factors_long.weight"), metadata.tensor("rope_factors_short.weight")
    if long is not None and short is not None:
        rope |= {"rope_type": "longrope", "long_factor": _floats(long), "short_factor": _floats(short)}
        rope["original_max_position_embeddings"] = values["original_max_position_embeddings"] = original
        attention = metadata.own("rope.scaling.attn_factor")
        if attention:
            rope["attention_factor"] = attention
    elif (factors := metadata.tensor("rope_freqs.weight")) is not None:
        rope |= _llama3(metadata, factors, rope["rope_theta"], rotated)
    elif kind == "yarn":
        rope |= {"rope_type": "yarn", "factor": factor}
        rope["original_max_position_embeddings"] = original or values["max_position_embeddings"]
        if (attention := metadata.own("rope.scaling.attn_factor")) is not None:
            # llama.cpp multiplies this into the usual 0.1 ln(factor) + 1
            rope["attention_factor"] = attention * (0.1 * math.log(factor) + 1.0)
    elif kind in ("linear", "none"):
        if kind == "linear" or factor != 1.0:
            rope |= {"rope_type": "linear", "factor": factor}
    else:
        raise GGUFError(f"{metadata.path.name}: rope.scaling.type={kind!r} is not a rotary scaling that kvscope knows.")
    values["rope_parameters"] = rope


def _llama3(metadata: Metadata, factors: np.ndarray, theta: float, rotated: int) -> dict[str, Any]:
    """Llama 3's scaling from the factors llama.cpp worked out from it, checked against its formula."""
    factor = float(factors.max())
    wavelength = 2 * np.pi * theta ** (np.arange(0, rotated, 2, dtype=np.float64) / rotated)
    for original in (8192, 4096, 2048, 16384, 32768):
        smooth = np.clip((original / wavelength - 1.0) / (4.0 - 1.0), 0.0, 1.0)
        expected = 1.0 / ((1.0 - smooth) / factor + smooth)
        if np.allclose(factors, expected, rtol=1e-3):
            return {
                "rope_type": "llama3",
                "factor": round(factor, 4),
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": original,
            }
    raise GGUFError(
        f"{metadata.path.name}: rope_freqs.weight holds rotary factors that are not Llama 3's scaling; "
        "without them the model would be wrong at long context."
    )


def _floats(array: np.ndarray) -> list[float]:
    return [float(str(value)) for value in array.astype(np.float32)]


_TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|eom_id|>", "<|endoftext|>", "<|end_of_text|>")


def eos_token_ids(metadata: Metadata) -> list[int]:
    """Every id that ends a text: those the file names, and a turn's end that its chat template writes."""
    ids = {metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")} - {None}
    template = metadata.get("tokenizer.chat_template") or ""
    mentioned = [text for text in _TURN_ENDS if text in template]
    if mentioned:
        tokens = metadata.get("tokenizer.ggml.tokens", [])
        ids |= {tokens.index(text) for text in mentioned if text in tokens}
    return sorted(ids)
