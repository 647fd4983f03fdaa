"""What the native decoder needs to know of a model, read from a transformers config, or the reason why it cannot.

transformers' own class for the model is the meaning of a config: every field of that class is either read here, or
known to change no number at inference, or must still have its default. So an option that a later release adds, or that
this decoder does not implement, is refused by name and never ignored.

Families: Llama; Mistral (sliding window); Qwen2 (biases on q, k, v; windows by layer); Qwen3 (a norm on every query
and key head); SmolLM3 (layers without rotation); Granite (four multipliers).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .rope import longest_sequence, rope_type_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_READ = {
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "rope_parameters",
    "eos_token_id", "architectures",
}  # fmt: skip
_NO_MATHS = {
    "transformers_version", "dtype", "output_hidden_states", "return_dict", "id2label", "label2id", "problem_type",
    "initializer_range", "use_cache", "pad_token_id", "bos_token_id", "attention_dropout", "pretraining_tp",
}  # fmt: skip
_WINDOWS = {"use_sliding_window", "sliding_window", "max_window_layers", "layer_types"}
_FAMILIES: dict[str, set[str]] = {  # and the further options that each one reads
    "llama": {"attention_bias", "mlp_bias"},
    "mistral": {"sliding_window"},
    "qwen2": _WINDOWS,
    "qwen3": {"attention_bias", *_WINDOWS},
    "smollm3": {"attention_bias", "mlp_bias", "no_rope_layers", "no_rope_layer_interval", *_WINDOWS},
    "granite": {
        "attention_bias", "mlp_bias", "embedding_multiplier", "attention_multiplier", "residual_multiplier",
        "logits_scaling",
    },
}  # fmt: skip
# Maths of other families that has been seen in config files of these; transformers would drop it without a word.
_FOREIGN: dict[str, Any] = {
    "attn_logit_softcapping": None, "final_logit_softcapping": None, "logit_scale": None, "logits_scaling": 1.0,
    "embedding_multiplier": 1.0, "attention_multiplier": None, "residual_multiplier": 1.0, "clip_qkv": None,
    "query_pre_attn_scalar": None, "rope_interleaved": False, "alibi": False, "use_qk_norm": False, "qk_norm": False,
    "num_experts": None, "num_local_experts": None, "sliding_window": None, "quantization_config": None,
}  # fmt: skip


class UnsupportedModel(ValueError):
    """The native decoder does not implement this model; the message says which option stands in the way."""


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Every number and choice that changes what the decoder computes."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    tied_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool  # RMSNorm over every query and key head, before the rotation
    attention_scale: float
    embedding_multiplier: float
    residual_multiplier: float
    logits_divisor: float
    windows: tuple[int, ...]  # per layer: tokens a query sees, itself included; 0 = all
    rotates: tuple[bool, ...]  # per layer
    rope_parameters: dict[str, Any]
    max_position: int
    max_model_len: int

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @classmethod
    def from_transformers(cls, config: PreTrainedConfig) -> DecoderConfig:
        """Raises UnsupportedModel with the option that is not implemented."""
        family = config.model_type
        if family not in _FAMILIES:
            raise UnsupportedModel(f"model_type={family!r}: the native decoder serves {', '.join(_FAMILIES)}")
        _refuse_unknown(config)
        if config.hidden_act != "silu":
            raise UnsupportedModel(f"hidden_act={config.hidden_act!r}: the native decoder implements 'silu'")
        num_heads, num_layers = config.num_attention_heads, config.num_hidden_layers
        num_kv_heads = config.num_key_value_heads or num_heads
        if num_heads % num_kv_heads:
            raise UnsupportedModel(
                f"num_attention_heads={num_heads}: not a multiple of num_key_value_heads={num_kv_heads}"
            )
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
        bias = getattr(config, "attention_bias", False)
        rope = dict(config.rope_parameters)
        try:
            rope_type_of(rope)
        except ValueError as error:
            raise UnsupportedModel(str(error)) from error
        if rope.get("partial_rotary_factor") not in (None, 1.0):
            raise UnsupportedModel(
                f"partial_rotary_factor={rope['partial_rotary_factor']}: this family rotates whole heads"
            )
        return cls(
            model_type=family,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=config.rms_norm_eps,
            tied_embeddings=bool(config.tie_word_embeddings),
            qkv_bias=bias or family == "qwen2",
            o_bias=bias,
            mlp_bias=getattr(config, "mlp_bias", False),
            qk_norm=family == "qwen3",
            attention_scale=config.attention_multiplier if family == "granite" else head_dim**-0.5,
            embedding_multiplier=getattr(config, "embedding_multiplier", 1.0),
            residual_multiplier=getattr(config, "residual_multiplier", 1.0),
            logits_divisor=getattr(config, "logits_scaling", 1.0),
            windows=_windows(config),
            rotates=tuple(map(bool, getattr(config, "no_rope_layers", None) or [True] * num_layers)),
            rope_parameters=rope,
            max_position=config.max_position_embeddings,
            max_model_len=longest_sequence(rope, config.max_position_embeddings),
        )


def _windows(config: PreTrainedConfig) -> tuple[int, ...]:
    """The window of each layer. Mistral's holds for all layers; the others say by layer type which ones have it."""
    size = getattr(config, "sliding_window", None) or 0
    if config.model_type == "mistral":
        return (size,) * config.num_hidden_layers
    if not size or not getattr(config, "use_sliding_window", False):
        return (0,) * config.num_hidden_layers
    return tuple(size if kind == "sliding_attention" else 0 for kind in config.layer_types)


def _refuse_unknown(config: PreTrainedConfig) -> None:
    read = _READ | _FAMILIES[config.model_type]
    if getattr(config, "is_heterogeneous", False):
        raise UnsupportedModel("per_layer_config: the native decoder implements layers of one shape only")
    for field in dataclasses.fields(config):
        if field.name in read or field.name in _NO_MATHS:
            continue
        default = field.default_factory() if callable(field.default_factory) else field.default
        if getattr(config, field.name) != default:
            raise UnsupportedModel(
                f"{field.name}={getattr(config, field.name)!r}: the native decoder does not implement this option of "
                f"{config.model_type!r}"
            )
    for name, neutral in _FOREIGN.items():
        value = getattr(config, name, None)
        if name not in read and value is not None and value != neutral:
            raise UnsupportedModel(
                f"{name}={value!r}: not an option of {config.model_type!r} that the native decoder implements"
            )
