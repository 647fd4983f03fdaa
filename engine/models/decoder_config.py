"""What the native decoder needs to know of a model, read from a transformers config, or the reason why it cannot.

transformers' own class for the model is the meaning of a config: every field of that class is either read here, or
known to change no number at inference, or must still have its default. So an option that a later release adds, or that
this decoder does not implement, is refused by name and never ignored.

Families, by what sets them apart from Llama:

| model_type | differences |
|---|---|
| mistral | a sliding window on every layer |
| qwen2 | biases on q, k and v; windows by layer |
| qwen3 | a norm on every query and key head; windows by layer |
| smollm3 | layers without rotation; windows by layer |
| granite | four multipliers |
| phi3 | fused projections in the file; a window on every layer; may rotate a part of each head |
| olmo2 | norms after attention and MLP, none before; one norm over all query heads and one over all key heads |
| gemma2 | norms before and after; they scale by 1 + weight; scaled embeddings; soft caps; windows by layer; GELU |
| gemma3_text | gemma2 without its soft caps by default; a norm on every query and key head; another rope with a window |
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .rope import longest_sequence, rope_type_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_READ = {
    "vocab_size", "hidden_size", "hidden_act", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "rope_parameters",
    "eos_token_id", "architectures",
}  # fmt: skip
_NO_MATHS = {
    "transformers_version", "dtype", "output_hidden_states", "return_dict", "id2label", "label2id", "problem_type",
    "initializer_range", "use_cache", "pad_token_id", "bos_token_id", "attention_dropout", "pretraining_tp",
    "resid_pdrop", "embd_pdrop",
}  # fmt: skip
_WINDOWS = {"use_sliding_window", "sliding_window", "max_window_layers", "layer_types"}
_GEMMA = {
    "hidden_activation", "attention_bias", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping",
    "sliding_window", "layer_types", "use_bidirectional_attention",
}  # fmt: skip
FAMILIES: dict[str, set[str]] = {  # and the further options that each one reads
    "llama": {"attention_bias", "mlp_bias"},
    "mistral": {"sliding_window"},
    "qwen2": _WINDOWS,
    "qwen3": {"attention_bias", *_WINDOWS},
    "smollm3": {"attention_bias", "mlp_bias", "no_rope_layers", "no_rope_layer_interval", *_WINDOWS},
    "granite": {
        "attention_bias", "mlp_bias", "embedding_multiplier", "attention_multiplier", "residual_multiplier",
        "logits_scaling",
    },
    "phi3": {"sliding_window", "original_max_position_embeddings"},
    "olmo2": {"attention_bias"},
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
}  # fmt: skip
_GEMMAS = ("gemma2", "gemma3_text")
ACTIVATIONS = ("silu", "gelu_pytorch_tanh")  # of the gate
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
    fused_projections: bool  # the file holds q, k and v as one tensor, gate and up as another
    activation: str  # of the gate: one of ACTIVATIONS
    norms_before: bool  # an RMSNorm on what attention and MLP read from the residual stream
    norms_after: bool  # one on what they add to it
    norm_offset: float  # a norm scales by this + its weight
    q_norm_size: int  # elements of the query that one RMSNorm covers, before the rotation: a head, all heads, 0 = none
    k_norm_size: int
    attention_scale: float
    attention_softcap: float  # c: scores become c·tanh(score / c); 0 = as they are
    embedding_multiplier: float
    residual_multiplier: float
    logits_divisor: float
    logits_softcap: float
    windows: tuple[int, ...]  # per layer: tokens a query sees, itself included; 0 = all
    ropes: tuple[dict[str, Any], ...]  # rope parameters of each kind of rotation
    layer_ropes: tuple[int | None, ...]  # per layer: which of them; None = no rotation
    rot_dim: int  # leading elements of a head that are rotated
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
        if family not in FAMILIES:
            raise UnsupportedModel(f"model_type={family!r}: the native decoder serves {', '.join(FAMILIES)}")
        _refuse_unknown(config)
        name = "hidden_activation" if family in _GEMMAS else "hidden_act"
        if getattr(config, name) not in ACTIVATIONS:
            raise UnsupportedModel(
                f"{name}={getattr(config, name)!r}: the native decoder implements {' and '.join(map(repr, ACTIVATIONS))}"
            )
        num_heads, num_layers = config.num_attention_heads, config.num_hidden_layers
        num_kv_heads = config.num_key_value_heads or num_heads
        if num_heads % num_kv_heads:
            raise UnsupportedModel(
                f"num_attention_heads={num_heads}: not a multiple of num_key_value_heads={num_kv_heads}"
            )
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
        bias = getattr(config, "attention_bias", False)
        ropes, layer_ropes = _ropes(config)
        normed_heads = {"qwen3": (1, 1), "gemma3_text": (1, 1), "olmo2": (num_heads, num_kv_heads)}.get(family, (0, 0))
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
            fused_projections=family == "phi3",
            activation=getattr(config, name),
            norms_before=family != "olmo2",
            norms_after=family in {"olmo2", *_GEMMAS},
            norm_offset=1.0 if family in _GEMMAS else 0.0,
            q_norm_size=normed_heads[0] * head_dim,
            k_norm_size=normed_heads[1] * head_dim,
            attention_scale=_attention_scale(config, head_dim),
            attention_softcap=getattr(config, "attn_logit_softcapping", None) or 0.0,
            embedding_multiplier=config.hidden_size**0.5
            if family in _GEMMAS
            else getattr(config, "embedding_multiplier", 1.0),
            residual_multiplier=getattr(config, "residual_multiplier", 1.0),
            logits_divisor=getattr(config, "logits_scaling", 1.0),
            logits_softcap=getattr(config, "final_logit_softcapping", None) or 0.0,
            windows=_windows(config),
            ropes=ropes,
            layer_ropes=layer_ropes,
            rot_dim=int(head_dim * (ropes[0].get("partial_rotary_factor") or 1.0)),
            max_position=config.max_position_embeddings,
            max_model_len=min(longest_sequence(rope, config.max_position_embeddings) for rope in ropes),
        )


def _attention_scale(config: PreTrainedConfig, head_dim: int) -> float:
    if config.model_type == "granite":
        return config.attention_multiplier
    return (config.query_pre_attn_scalar if config.model_type in _GEMMAS else head_dim) ** -0.5


def _windows(config: PreTrainedConfig) -> tuple[int, ...]:
    """The window of each layer. Mistral's and Phi-3's hold for all layers; the others say by layer type which have it."""
    size = getattr(config, "sliding_window", None) or 0
    if config.model_type in ("mistral", "phi3"):
        return (size,) * config.num_hidden_layers
    if not size or not getattr(config, "use_sliding_window", config.model_type in _GEMMAS):
        return (0,) * config.num_hidden_layers
    if unknown := set(config.layer_types) - {"sliding_attention", "full_attention"}:
        raise UnsupportedModel(f"layer_types holds {min(unknown)!r}: the native decoder has sliding and full attention")
    return tuple(size if kind == "sliding_attention" else 0 for kind in config.layer_types)


def _ropes(config: PreTrainedConfig) -> tuple[tuple[dict[str, Any], ...], tuple[int | None, ...]]:
    """The kinds of rotation, and which one each layer has. Gemma 3 has one by layer type; SmolLM3 spares some layers."""
    if config.model_type == "gemma3_text":
        kinds = sorted(set(config.layer_types))
        ropes = tuple(dict(config.rope_parameters[kind]) for kind in kinds)
        layers: tuple[int | None, ...] = tuple(kinds.index(kind) for kind in config.layer_types)
    else:
        ropes = (dict(config.rope_parameters),)
        rotates = getattr(config, "no_rope_layers", None) or [True] * config.num_hidden_layers
        layers = tuple(0 if turns else None for turns in rotates)
    for rope in ropes:
        try:
            rope_type_of(rope)
        except ValueError as error:
            raise UnsupportedModel(str(error)) from error
        if config.model_type != "phi3" and rope.get("partial_rotary_factor") not in (None, 1.0):
            raise UnsupportedModel(
                f"partial_rotary_factor={rope['partial_rotary_factor']}: this family rotates whole heads"
            )
    return ropes, layers


def _refuse_unknown(config: PreTrainedConfig) -> None:
    read = _READ | FAMILIES[config.model_type]
    if getattr(config, "is_heterogeneous", False):
        raise UnsupportedModel("per_layer_config: the native decoder implements layers of one shape only")
    if getattr(config, "use_bidirectional_attention", False):
        raise UnsupportedModel("use_bidirectional_attention=True: text is generated with causal attention only")
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
