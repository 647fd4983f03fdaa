"""Loading a model: the native decoder where it implements the architecture, else the transformers adapter.

`load_model(files, …)` reads config.json through transformers (never remote code) and asks the native decoder first. What
it refuses, by an architecture or an option it does not implement, goes to the adapter; if that refuses too, its error
carries both reasons. Engines of one process with the same folder, dtype, quantization, device and kernels hold one copy of
the weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from .decoder import Decoder, DecoderWeights
from .decoder_config import DecoderConfig, UnsupportedModel
from .decoder_weights import load_decoder_weights
from .weight_files import fingerprint, stated_config
from .weights import Checkpoint, shared

if TYPE_CHECKING:
    from kvscope.kernels.ops import Ops
    from transformers import PreTrainedConfig

    from .base import Model
    from .hub import ModelFiles


MOST_LAYERS = 1_000  # a config that states more is damaged, or means to fill the memory


def load_model(
    files: ModelFiles, *, dtype: torch.dtype, device: torch.device | str, kernels: Ops, quantization: str | None = None
) -> Model:
    """The model in `files.folder`, its weights on `device` in `dtype` or quantized (`ops.pack_linear`), packed for `kernels`.

    Raises ValueError with a sentence that names the file, parameter or option that stands in the way.
    """
    device = torch.device(device)
    config = read_config(files.folder)
    try:
        decoder_config = DecoderConfig.from_transformers(config)
    except UnsupportedModel as reason:
        from .transformers_adapter import load_adapter

        if quantization is not None:
            raise ValueError(
                f"quantization={quantization!r}: {files.name} is computed by transformers, with weights as they are; the native "
                f"decoder does not take it: {reason}"
            ) from reason
        if kernels.batch_invariant:
            raise ValueError(
                f"batch_invariant=True: {files.name} is computed by transformers, whose products depend on the batch; the "
                f"native decoder does not take it: {reason}"
            ) from reason
        try:
            return load_adapter(files, dtype=dtype, device=device, kernels=kernels)
        except UnsupportedModel as error:
            raise UnsupportedModel(f"{error} The native decoder does not take it either: {reason}.") from error

    def build() -> DecoderWeights:
        with Checkpoint(files.folder) as checkpoint:
            return load_decoder_weights(
                checkpoint, decoder_config, dtype=dtype, device=device, kernels=kernels, quantization=quantization
            )

    return Decoder(
        decoder_config,
        shared((*fingerprint(files.folder), dtype, quantization, device, kernels.name), build),
        name=files.name,
        architecture=(config.architectures or [type(config).__name__.removesuffix("Config")])[0],
        eos_token_ids=eos_token_ids(files.folder, config),
        dtype=dtype,
        device=device,
        kernels=kernels,
        quantization=quantization,
    )


def read_config(folder: Path) -> PreTrainedConfig:
    """config.json as transformers understands it. Raises ValueError when it is missing, broken or of unknown type."""
    from transformers import AutoConfig

    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} holds no config.json, so nothing says what model its weights are")
    stated = stated_config(folder)
    for name in ("num_hidden_layers", "n_layer", "num_layers", "n_layers"):
        if isinstance(number := stated.get(name), int) and number > MOST_LAYERS:
            raise ValueError(
                f"config.json in {folder} states {name}={number}: at most {MOST_LAYERS:,} layers are built"
            )
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds for a broken file; all of them mean the same here
        raise ValueError(f"config.json in {folder} is not one that transformers reads: {error}") from error


def eos_token_ids(folder: Path, config: PreTrainedConfig) -> frozenset[int]:
    """End-of-sequence ids: the union of what config.json and generation_config.json name; one must not hide the other."""
    from transformers import GenerationConfig

    named = [config.eos_token_id]
    if (folder / "generation_config.json").is_file():
        named.append(GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id)
    ids: set[int] = set()
    for value in named:
        ids |= set() if value is None else {value} if isinstance(value, int) else set(value)
    return frozenset(ids)
