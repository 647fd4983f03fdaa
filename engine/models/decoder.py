"""The native decoder: Llama-like models on the operations of `kvscope.kernels`.

    input ids ─ embedding ─▶ residual stream, float32 [T, hidden]
        each layer:  (norm) ─ qkv ─ (q and k norms) ─ (rotary) ─ write K, V ─ paged attention ─ o ─ (norm) ─▶ += residual
                     (norm) ─ gate | up ─ act(gate)·up ─ down ─ (norm)                                     ─▶ += residual
    norm ─ head ─ (soft cap) ─▶ logits, float32, only for the rows that are sampled

What stands in parentheses is there in some families only; `DecoderConfig` says in which.

One call does a step: any mix of prompts, pieces of prompts and single tokens, told apart only by the arrays of the batch.
The model holds no state of a step, so engines that share weights may run at once. Activations are in the model's dtype;
the residual stream, norms and softmax are float32. In the last layer everything after the K and V of the step is
computed for the sampled rows alone.

Letters: T tokens of the step, S sampled rows, H hidden, Hq query heads, Hk KV heads, d head size, I intermediate, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from kvscope.kernels.invariant import row_by_row
from torch.nn import functional

from .base import ModelSpec, group_layers
from .decoder_config import DecoderConfig
from .rope import RotaryTable

if TYPE_CHECKING:
    from kvscope.kernels.ops import Ops

    from ..kvcache.storage import KVStorage
    from ..scheduling.batch import Batch


@dataclass(frozen=True, slots=True)
class Layer:
    """The parameters of one layer; the projections are packed by the kernels that will read them."""

    input_norm: torch.Tensor | None  # float32 [H], as are the three below; on what attention reads
    qkv: Any  # [(Hq + 2·Hk)·d, H]: q, k and v in one product
    q_norm: torch.Tensor | None  # float32 [d], over each head by itself, or [Hq·d], over all of them at once
    k_norm: torch.Tensor | None  # float32 [d] or [Hk·d]
    o: Any  # [H, Hq·d]
    attended_norm: torch.Tensor | None  # on what attention adds
    mlp_norm: torch.Tensor | None  # on what the MLP reads
    gate_up: Any  # [2·I, H]: gate and up in one product
    down: Any  # [H, I]
    down_norm: torch.Tensor | None  # on what the MLP adds
    window: int  # tokens a query sees, itself included; 0 = all
    rope: int | None  # which of the model's rotary tables; None = no rotation


@dataclass(frozen=True)
class DecoderWeights:
    """All parameters of a model on one device, in one dtype, packed for one kernel implementation."""

    layers: tuple[Layer, ...]
    embedding: torch.Tensor | None  # [V, H]; None when the head serves the lookup too: tied to it, and not quantized
    final_norm: torch.Tensor
    head: Any  # [V, H]
    ropes: tuple[RotaryTable, ...]
    num_parameters: int
    num_bytes: int


class Decoder:
    """A loaded model. `close()` drops this engine's hold on the weights, whoever still refers to the object."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: DecoderWeights,
        *,
        name: str,
        architecture: str,
        eos_token_ids: frozenset[int],
        dtype: torch.dtype,
        device: torch.device,
        kernels: Ops,
        quantization: str | None = None,
    ):
        self.config = config
        self.kernels = kernels
        self._weights: DecoderWeights | None = weights
        self.spec = ModelSpec(
            name=name,
            architecture=architecture,
            num_layers=config.num_layers,
            hidden_size=config.hidden_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            vocab_size=config.vocab_size,
            max_model_len=config.max_model_len,
            kv_groups=group_layers(config.windows, config.num_kv_heads, config.head_dim),
            dtype=dtype,
            device=device,
            eos_token_ids=eos_token_ids,
            num_parameters=weights.num_parameters,
            tied_embeddings=config.tied_embeddings,
            weight_bytes=weights.num_bytes,
            quantization=quantization,
        )

    @property
    def weights(self) -> DecoderWeights:
        if self._weights is None:
            raise RuntimeError(f"the model {self.spec.name} is closed; load it again")
        return self._weights

    def close(self) -> None:
        self._weights = None

    @torch.inference_mode()
    def forward(self, batch: Batch, storage: KVStorage) -> torch.Tensor:
        """Write the step's K and V into `storage`, attend, return logits: float32 [S, V]."""
        return self.logits(self.layers(self.embed(batch.input_ids), self.rotary_tables(batch), batch, storage))

    def layers(
        self, residual: torch.Tensor, tables: list[torch.Tensor], batch: Batch, storage: KVStorage
    ) -> torch.Tensor:
        """What the head reads, [S, H], from what the embedding gave, float32 [T, H], which is used up; `tables` are those of the
        batch. In most families these are kernels alone, so that it can be captured."""
        w = self.weights
        x = self._read_stream(residual, w.layers[0].input_norm)
        last = len(w.layers) - 1
        for i, layer in enumerate(w.layers):
            attended = self._attention(i, layer, x, tables, batch, storage)  # [T, Hq·d]
            if i == last and not batch.is_decode:
                attended, residual = attended[batch.logits_indices], residual[batch.logits_indices]  # [S, …]
            x = self._to_stream(attended, layer.o, layer.attended_norm, residual, layer.mlp_norm)
            x = self._gate(x, layer.gate_up)
            norm = w.final_norm if i == last else w.layers[i + 1].input_norm
            x = self._to_stream(x, layer.down, layer.down_norm, residual, norm)
        return x

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Through the head: [S, H] -> float32 [S, V]."""
        c = self.config
        logits = self.kernels.linear(x, self.weights.head, out_dtype=torch.float32)
        if c.logits_divisor != 1.0:
            logits = logits / c.logits_divisor
        return logits if not c.logits_softcap else torch.tanh(logits / c.logits_softcap) * c.logits_softcap

    def rotary_tables(self, batch: Batch) -> list[torch.Tensor]:
        """Of the model's rotary embeddings, float32 [at least the positions of the batch, rot_dim]."""
        num_positions = self._num_positions(batch)
        return [rope.upto(num_positions) for rope in self.weights.ropes]

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Rows of the embedding as the residual stream begins: float32 [T, H]."""
        w, multiplier = self.weights, self.config.embedding_multiplier
        rows = w.head.rows if w.embedding is None else w.embedding.__getitem__
        residual = rows(input_ids).to(torch.float32, copy=True)
        if multiplier != 1.0:
            residual *= torch.tensor(multiplier, dtype=self.spec.dtype).item()  # as the model was trained: rounded
        return residual

    def _attention(
        self, index: int, layer: Layer, x: torch.Tensor, tables: list[torch.Tensor], batch: Batch, storage: KVStorage
    ) -> torch.Tensor:
        """Project, rotate, store K and V, attend over everything stored: [T, Hq·d]."""
        k, c = self.kernels, self.config
        heads = k.linear(x, layer.qkv).view(
            x.shape[0], c.num_heads + 2 * c.num_kv_heads, c.head_dim
        )  # [T, Hq + 2·Hk, d]
        query, key, value = heads.split((c.num_heads, c.num_kv_heads, c.num_kv_heads), dim=1)
        if layer.q_norm is not None:
            query = self._head_norm(query, layer.q_norm)
        if layer.k_norm is not None:
            key = self._head_norm(key, layer.k_norm)
        if layer.rope is not None:
            k.rotary(query, key, batch.positions, tables[layer.rope])
        group = storage.group_of(index)
        pages, layout = storage.pages(index)
        k.write_kv(key, value, pages, layout, batch.slot_mapping[group])
        attended = k.paged_attention(
            query,
            pages,
            layout,
            batch.block_tables[group],
            batch.query_start_loc,
            batch.seq_lens,
            scale=c.attention_scale,
            window=layer.window,
            softcap=c.attention_softcap,
        )
        return attended.view(x.shape[0], c.q_size)

    def _head_norm(self, heads: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMSNorm of [T, heads, d], over as many elements at once as there are weights: one head, or all."""
        flat = heads.reshape(-1, weight.shape[0])
        return self.kernels.rms_norm(flat, weight, self.config.rms_norm_eps, out_dtype=heads.dtype).view(heads.shape)

    def _gate(self, x: torch.Tensor, gate_up: Any) -> torch.Tensor:
        """act(gate)·up of the two halves of the product: [T, H] -> [T, I]."""
        if self.config.activation == "silu":
            return self.kernels.linear_silu_mul(x, gate_up)
        gate, up = self.kernels.linear(x, gate_up).chunk(2, dim=-1)
        # Torch ends a stretch of memory with scalars, whose last bit differs from its vectors': here the stretch is a row.
        gelu = row_by_row(functional.gelu) if self.kernels.batch_invariant else functional.gelu
        return gelu(gate, approximate="tanh").mul_(up)

    def _read_stream(self, residual: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
        """What a block reads from the residual stream, in the model's dtype."""
        if norm is None:
            return residual.to(self.spec.dtype)
        return self.kernels.rms_norm(residual, norm, self.config.rms_norm_eps, out_dtype=self.spec.dtype)

    def _to_stream(
        self,
        x: torch.Tensor,
        packed: Any,
        norm: torch.Tensor | None,
        residual: torch.Tensor,
        next_norm: torch.Tensor | None,
    ) -> torch.Tensor:
        """Add a block's last product, normed where the family norms it, to the residual stream (in place), and return
        what the next block reads. The product is float32, so that it is not rounded on its way to the stream."""
        k, c = self.kernels, self.config
        if norm is None and c.residual_multiplier == 1.0:
            k.linear_add(x, packed, residual)
            return self._read_stream(residual, next_norm)
        x = k.linear(x, packed, out_dtype=torch.float32)
        if norm is not None:
            x = k.rms_norm(x, norm, c.rms_norm_eps, out_dtype=torch.float32)
        if c.residual_multiplier != 1.0:
            x = x * c.residual_multiplier
        if next_norm is not None:
            return k.add_rms_norm(x, residual, next_norm, c.rms_norm_eps, out_dtype=self.spec.dtype)
        residual += x
        return residual.to(self.spec.dtype)

    def _num_positions(self, batch: Batch) -> int:
        """Rows of the rotary table that the step needs; on a GPU the whole table, since looking would wait for it."""
        if self.spec.device.type != "cpu":
            return self.spec.max_model_len
        return int(batch.positions.max()) + 1 if batch.num_tokens else 0
