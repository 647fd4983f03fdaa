"""`EngineInfo`: the facts of an engine that do not change while it lives, for headers and reports."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from .snapshot import size_words

if TYPE_CHECKING:
    from .models.base import ModelSpec


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Plain values: what a recording holds too."""

    model_name: str  # "SmolLM2-135M-Instruct"
    architecture: str  # "LlamaForCausalLM"
    device: str  # "cpu" | "cuda"
    num_threads: int  # CPU threads of one step
    dtype: str  # "float32" | "bfloat16"
    quantization: str | None  # of the weights: "int8" | "int8-dynamic"
    kernels: str  # which implementation serves: "reference" | "cpu" | "triton"
    num_blocks: int  # the null block included
    block_size: int  # tokens; where KV groups differ, those of a common block
    block_bytes: int  # K and V of one block over all layers
    pool_bytes: int  # of all blocks
    weights_source: str  # which file the weights came from: "hub, bfloat16", …
    max_model_len: int  # tokens, prompt and output together
    num_parameters: int
    weight_bytes: int  # as held in memory, tied tensors once
    block_sizes: tuple[int, ...] = field(default=(), kw_only=True)  # of the KV groups, where they differ

    @property
    def block_words(self) -> str:
        """Tokens a block, for people."""
        return size_words(self.block_sizes or [self.block_size])

    @property
    def precision(self) -> str:
        """The element type, and how the weights are quantized, for people: "bfloat16", "bfloat16, int8 weights"."""
        kinds = {None: "", "int8": ", int8 weights", "int8-dynamic": ", int8 weights and products"}
        return f"{self.dtype}{kinds[self.quantization]}"

    def plain(self) -> EngineFacts:
        return EngineFacts(**{f.name: getattr(self, f.name) for f in fields(EngineFacts)})


@dataclass(frozen=True, slots=True)
class EngineInfo(EngineFacts):
    spec: ModelSpec  # the shape of the model, its KV groups as this engine has them
