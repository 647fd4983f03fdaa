"""From a checkpoint to the native decoder's weights: every tensor read once, into the matrix it ends up in.

q, k and v are read into one matrix, gate and up into another; each matrix is handed to the kernels to pack before the
next is read, so the peak is one copy of the model and one matrix. Quantized or not: a matrix is rounded while it is packed.
An embedding tied to the head is stored once: the packed head serves the lookup. A quantized head does not: the embedding is
kept in `dtype` beside it, because a row that is looked up costs no time, and its rounding would go through all layers. A parameter that no file fills is an error, and so is a weight in a file that nothing reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .decoder import DecoderWeights, Layer
from .decoder_config import DecoderConfig
from .rope import RotaryTable
from .weights import Checkpoint

if TYPE_CHECKING:
    from kvscope.kernels.ops import Ops

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


def load_decoder_weights(
    checkpoint: Checkpoint,
    config: DecoderConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    kernels: Ops,
    quantization: str | None = None,
) -> DecoderWeights:
    """Read all parameters in `dtype` onto `device`, those of products quantized. Raises ValueError naming the parameter that is missing or wrong."""
    return _Builder(checkpoint, config, dtype, device, kernels, quantization).build()


class _Builder:
    def __init__(
        self,
        checkpoint: Checkpoint,
        config: DecoderConfig,
        dtype: torch.dtype,
        device: torch.device,
        kernels: Ops,
        quantization: str | None,
    ):
        self.checkpoint, self.config, self.kernels = checkpoint, config, kernels
        self.dtype, self.device, self.quantization = dtype, device, quantization
        self.num_parameters = self.num_bytes = 0

    def build(self) -> DecoderWeights:
        c = self.config
        layers = tuple(self._layer(i) for i in range(c.num_layers))
        final_norm = self._norm("model.norm.weight", c.hidden_size)
        embedding, head = self._ends()
        if unread := [name for name in self.checkpoint.unread if not name.endswith("rotary_emb.inv_freq")]:
            raise ValueError(
                f"{self.checkpoint.folder} holds {len(unread)} tensors that a {c.model_type!r} of this config.json does not "
                f"have, {unread[0]} first: leaving them out would change what the model computes"
            )
        ropes = tuple(
            RotaryTable(rope, rot_dim=c.rot_dim, max_position=c.max_position, seq_len=0, device=self.device)
            for rope in c.ropes
        )
        return DecoderWeights(layers, embedding, final_norm, head, ropes, self.num_parameters, self.num_bytes)

    def _layer(self, i: int) -> Layer:
        c, prefix = self.config, f"model.layers.{i}."
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        if c.fused_projections:
            qkv = {f"{attention}qkv_proj": c.q_size + 2 * c.kv_size}
            gate_up = {f"{mlp}gate_up_proj": 2 * c.intermediate_size}
        else:
            qkv = {f"{attention}q_proj": c.q_size, f"{attention}k_proj": c.kv_size, f"{attention}v_proj": c.kv_size}
            gate_up = {f"{mlp}gate_proj": c.intermediate_size, f"{mlp}up_proj": c.intermediate_size}
        # A layer's second norm has one name and two places: Llama's stands before the MLP, Gemma's and OLMo's after attention.
        before_mlp = "pre_feedforward_layernorm" if c.norms_after else "post_attention_layernorm"

        def norm(name: str, size: int, present: bool) -> torch.Tensor | None:
            return self._norm(f"{name}.weight", size) if present else None

        return Layer(
            input_norm=norm(f"{prefix}input_layernorm", c.hidden_size, c.norms_before),
            qkv=self._linear(qkv, c.hidden_size, bias=c.qkv_bias),
            q_norm=norm(f"{attention}q_norm", c.q_norm_size, c.q_norm_size > 0),
            k_norm=norm(f"{attention}k_norm", c.k_norm_size, c.k_norm_size > 0),
            o=self._linear({f"{attention}o_proj": c.hidden_size}, c.q_size, bias=c.o_bias),
            attended_norm=norm(f"{prefix}post_attention_layernorm", c.hidden_size, c.norms_after),
            mlp_norm=norm(f"{prefix}{before_mlp}", c.hidden_size, c.norms_before),
            gate_up=self._linear(gate_up, c.hidden_size, bias=c.mlp_bias, gated=c.activation == "silu"),
            down=self._linear({f"{mlp}down_proj": c.hidden_size}, c.intermediate_size, bias=c.mlp_bias),
            down_norm=norm(f"{prefix}post_feedforward_layernorm", c.hidden_size, c.norms_after),
            window=c.windows[i],
            rope=c.layer_ropes[i],
        )

    def _ends(self) -> tuple[torch.Tensor | None, Any]:
        """The embedding and the head. Tied, a file may name the one matrix either way, or hold it twice."""
        c = self.config
        shape = (c.vocab_size, c.hidden_size)
        if not c.tied_embeddings:
            embedding = self.checkpoint.read(_EMBEDDING, shape, self.dtype).to(self.device)
            self._count(embedding.numel(), embedding.nbytes)
            return embedding, self._pack(self.checkpoint.read(_HEAD, shape, self.dtype), None)
        names = [name for name in (_EMBEDDING, _HEAD) if name in self.checkpoint] or [_EMBEDDING]
        matrix = self.checkpoint.read(names[0], shape, self.dtype)
        if len(names) == 2 and not torch.equal(matrix, self.checkpoint.read(_HEAD, shape, self.dtype)):
            raise ValueError(
                f"config.json says tie_word_embeddings=true, but {_EMBEDDING} and {_HEAD} of "
                f"{self.checkpoint.folder} differ; set it to false if both are meant"
            )
        head = self._pack(matrix, None)
        if self.quantization is None:
            return None, head
        embedding = matrix.to(self.device)
        self._count(0, embedding.nbytes)
        return embedding, head

    def _linear(self, parts: dict[str, int], in_features: int, *, bias: bool, gated: bool = False) -> Any:
        """Read projections {name: rows} that share an input into one matrix [sum of rows, in_features], and pack it."""
        for name, rows in parts.items():
            self.checkpoint.require(f"{name}.weight", (rows, in_features))
        weight = torch.empty(sum(parts.values()), in_features, dtype=self.dtype)
        offsets = torch.empty(len(weight), dtype=self.dtype) if bias else None
        start = 0
        for name, rows in parts.items():
            self.checkpoint.read_into(f"{name}.weight", weight[start : start + rows])
            if offsets is not None:
                self.checkpoint.read_into(f"{name}.bias", offsets[start : start + rows])
            start += rows
        return self._pack(weight, offsets, gated=gated)

    def _pack(self, weight: torch.Tensor, bias: torch.Tensor | None, *, gated: bool = False) -> Any:
        bias_there = None if bias is None else bias.to(self.device)
        packed = self.kernels.pack_linear(
            weight.to(self.device), bias_there, self.dtype, self.quantization, gated=gated
        )
        self._count(weight.numel() + (0 if bias is None else bias.numel()), packed.num_bytes)
        return packed

    def _norm(self, name: str, size: int) -> torch.Tensor:
        weight = self.checkpoint.read(name, (size,), torch.float32).to(self.device) + self.config.norm_offset
        self._count(size, weight.nbytes)
        return weight

    def _count(self, parameters: int, num_bytes: int) -> None:
        self.num_parameters += parameters
        self.num_bytes += num_bytes
