"""Any architecture that transformers knows, served through its own modelling code on our pages.

The model's forward runs as transformers wrote it, with one packed row of all the step's tokens and no cache of its own;
only the attention in the middle is ours (`adapter_attention`). Whether that is enough for a given architecture cannot
be read off its code, so every model is tried before it is served (`adapter_probe`) and refused with the reason if not.

    input ids, positions [1, T] ─▶ transformers' layers ─▶ logits [S, vocab]
                                       │  kvscope_step=…
                                       ▼
                             write K, V ─ paged attention

Slower than the native decoder (no fused projections, no packed weights), and as exact.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .adapter_attention import NAME, STEP, AttentionStep, register
from .adapter_probe import probe
from .base import ModelSpec, group_layers
from .decoder_config import UnsupportedModel
from .hub_client import first_line
from .loader import eos_token_ids, read_config
from .rope import longest_sequence
from .weight_files import fingerprint, read_header, weight_files
from .weights import shared

if TYPE_CHECKING:
    from pathlib import Path

    from kvscope.kernels.ops import Ops
    from transformers import PreTrainedConfig, PreTrainedModel

    from ..kvcache.storage import KVStorage
    from ..scheduling.batch import Batch
    from .hub import ModelFiles

_LAYER_KINDS = {"full_attention", "sliding_attention"}
_BATCH_BOUND_ROPE = {"dynamic", "longrope"}  # their frequencies follow the longest sequence of the batch


@dataclass(frozen=True, eq=False)
class AdapterWeights:
    """A module that passed the probe, and what the probe learnt. Shared by the engines of a process."""

    module: PreTrainedModel
    num_heads: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int, ...]  # of each layer; 0 = all
    num_parameters: int
    num_bytes: int
    tied_embeddings: bool


class TransformersModel:
    """A loaded model. `close()` drops this engine's hold on the weights, whoever still refers to the object."""

    def __init__(self, weights: AdapterWeights, spec: ModelSpec, kernels: Ops):
        self.spec = spec
        self.kernels = kernels
        self._weights: AdapterWeights | None = weights

    def close(self) -> None:
        self._weights = None

    @torch.inference_mode()
    def forward(self, batch: Batch, storage: KVStorage) -> torch.Tensor:
        """Write the step's K and V into `storage`, attend, return logits: float32 [S, V]."""
        if self._weights is None:
            raise RuntimeError(f"the model {self.spec.name} is closed; load it again")
        output = self._weights.module(
            input_ids=batch.input_ids[None],
            position_ids=batch.positions[None],
            use_cache=False,
            logits_to_keep=batch.logits_indices,
            **{STEP: AttentionStep(self.kernels, batch, storage)},
        )
        return output.logits[0].float()


def load_adapter(
    files: ModelFiles, *, dtype: torch.dtype, device: torch.device | str, kernels: Ops
) -> TransformersModel:
    """The model in `files.folder` through transformers. Raises UnsupportedModel (a ValueError) with the reason."""
    device = torch.device(device)
    config = read_config(files.folder)
    architecture = (config.architectures or [type(config).__name__.removesuffix("Config")])[0]
    try:
        model_class = _servable_class(config)
        key = (*fingerprint(files.folder), dtype, device, kernels.name, NAME)
        weights = shared(key, lambda: _load(files.folder, config, model_class, dtype, device, kernels))
        text = config.get_text_config()
        spec = ModelSpec(
            name=files.name,
            architecture=architecture,
            num_layers=text.num_hidden_layers,
            hidden_size=text.hidden_size,
            num_heads=weights.num_heads,
            num_kv_heads=weights.num_kv_heads,
            head_dim=weights.head_dim,
            vocab_size=weights.module.get_output_embeddings().weight.shape[0],
            max_model_len=_max_model_len(text),
            kv_groups=group_layers(weights.windows, weights.num_kv_heads, weights.head_dim),
            dtype=dtype,
            device=device,
            eos_token_ids=eos_token_ids(files.folder, config),
            num_parameters=weights.num_parameters,
            tied_embeddings=weights.tied_embeddings,
            weight_bytes=weights.num_bytes,
        )
    except UnsupportedModel as reason:
        raise UnsupportedModel(f"{files.name} ({architecture}) cannot be served: {reason}.") from reason
    return TransformersModel(weights, spec, kernels)


def _servable_class(config: PreTrainedConfig) -> Any:
    """The class that generates text for this config; refuses what its config alone shows to be out of reach, with all that
    stands in the way."""
    from transformers import AutoModelForCausalLM

    reasons = []
    if config.is_encoder_decoder:
        reasons.append("it is an encoder-decoder, whose cross-attention is not over pages")
    if getattr(config, "quantization_config", None):
        reasons.append("its weights are quantized in a way that only its own library can undo")
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ()) - _LAYER_KINDS
    if kinds:
        reasons.append(f"it has layers of the kind {', '.join(sorted(kinds))}, whose state is not K and V pages")
    for kind in _rope_types(getattr(text, "rope_parameters", None)):
        if kind in _BATCH_BOUND_ROPE:
            reasons.append(
                f"transformers computes rope_type={kind!r} from the longest sequence of the batch, so a request's text "
                "would depend on its batch mates"
            )
    model_class: Any = AutoModelForCausalLM._model_mapping.get(type(config), None)
    if model_class is None:
        reasons.append(f"transformers has no text-generating class for model_type={config.model_type!r}")
    else:
        parameters = inspect.signature(model_class.forward).parameters
        lacking = [name for name in ("position_ids", "logits_to_keep") if name not in parameters]
        if lacking:
            reasons.append(f"{model_class.__name__}.forward takes no {' and no '.join(lacking)}")
    if reasons:
        raise UnsupportedModel("; ".join(reasons))
    return model_class


def _load(
    folder: Path, config: PreTrainedConfig, model_class: Any, dtype: torch.dtype, device: torch.device, kernels: Ops
) -> AdapterWeights:
    register()
    try:
        _check_size(folder, config, model_class)
        module, report = model_class.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=NAME,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below, with the name
        )
    except KeyError as error:
        reason = "it looks its attention up in a table of its own" if error.args == (NAME,) else f"it lacks {error}"
        raise UnsupportedModel(reason) from error
    except Exception as error:  # a hundred architectures, each with its own way to say no
        raise UnsupportedModel(first_line(error)) from error
    for problem, phrase in (
        ("missing_keys", "no file fills its parameter"),
        ("mismatched_keys", "the files give another shape to its parameter"),
        ("unexpected_keys", "it has no place for the tensor"),
    ):
        if names := sorted(map(_name, report.get(problem) or ())):
            more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            raise UnsupportedModel(f"{phrase} {names[0]}{more}")
    module = module.to(device).eval().requires_grad_(False)
    try:
        calls = probe(module, dtype=dtype, kernels=kernels)
    except UnsupportedModel:
        raise
    except Exception as error:
        raise UnsupportedModel(f"its forward fails on a packed step: {first_line(error)}") from error
    parameters = {tensor.data_ptr(): tensor for tensor in module.parameters()}.values()
    embedding, head = module.get_input_embeddings().weight, module.get_output_embeddings().weight
    return AdapterWeights(
        module=module,
        num_heads=calls[0].num_heads,
        num_kv_heads=calls[0].num_kv_heads,
        head_dim=calls[0].head_dim,
        windows=tuple(call.window for call in calls),
        num_parameters=sum(tensor.numel() for tensor in parameters),
        num_bytes=sum(tensor.numel() * tensor.itemsize for tensor in parameters),
        tied_embeddings=embedding.data_ptr() == head.data_ptr(),
    )


def _check_size(folder: Path, config: PreTrainedConfig, model_class: Any) -> None:
    """Before transformers makes what no file fills: up to the memory's end, if config.json says so."""
    entries = [entry for file in weight_files(folder) for entry in read_header(file).values()]
    held = sum(math.prod(entry.shape) for entry in entries)
    with torch.device("meta"):
        wanted = sum(parameter.numel() for parameter in model_class(config).parameters())
    if wanted > 2 * held:
        raise UnsupportedModel(f"config.json makes it {wanted:,} parameters, and its files hold {held:,}")


def _rope_types(parameters: Any) -> set[str]:
    """Every rope_type in a config, also where each kind of layer has its own."""
    if not isinstance(parameters, dict):
        return set()
    own = parameters.get("rope_type") or parameters.get("type")
    nested = (kind for value in parameters.values() for kind in _rope_types(value))
    return {kind for kind in (own, *nested) if kind}


def _max_model_len(config: PreTrainedConfig) -> int:
    longest = getattr(config, "max_position_embeddings", None)
    if not longest:
        raise UnsupportedModel("its config does not state max_position_embeddings, the longest text it can take")
    parameters = getattr(config, "rope_parameters", None)
    if isinstance(parameters, dict) and (parameters.get("rope_type") or parameters.get("type")):
        return longest_sequence(parameters, longest)
    return longest


def _name(key: Any) -> str:
    return str(key[0] if isinstance(key, tuple) else key)
