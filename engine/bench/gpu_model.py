"""The models of `kvscope bench gpu`: random weights made in memory, served by our core and by transformers alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from kvscope.kernels.ops import Ops

from ..config import EngineConfig
from ..core import EngineCore
from ..kvcache.storage import KVStorage
from ..models.decoder import Decoder
from ..models.decoder_config import DecoderConfig
from ..models.decoder_weights import load_decoder_weights
from ..outputs import StepOutput
from ..sampling.params import SamplingParams
from .machine import seconds_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHAPES = {
    "SmolLM2 135M": {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "vocab_size": 49_152,
    },
    "Llama 1B": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128_256,
    },
}  # fmt: skip


def random_llama(shape: dict[str, int], dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """A Llama of this shape with tied embeddings, weights as transformers initialises them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(max_position_embeddings=8192, tie_word_embeddings=True, dtype=dtype, **shape)
    torch.manual_seed(0)
    with torch.device(device):
        return LlamaForCausalLM(config).to(dtype).eval()


class StateDict:
    """The tensors of a loaded model, as `models.weights.Checkpoint` gives those of a folder."""

    folder = "memory"

    def __init__(self, model: PreTrainedModel):
        self._tensors = dict(model.state_dict())
        self._read: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    @property
    def unread(self) -> list[str]:
        return sorted(self._tensors.keys() - self._read)

    def require(self, name: str, shape: tuple[int, ...]) -> None:
        assert tuple(self._tensors[name].shape) == shape, name

    def read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        out = torch.empty(shape, dtype=dtype)
        self.read_into(name, out)
        return out

    def read_into(self, name: str, out: torch.Tensor) -> None:
        self._read.add(name)
        out.copy_(self._tensors[name])


class Served:
    """Our engine's core on the weights of a transformers model, prefix caching off so that no prompt is skipped."""

    def __init__(
        self, source: PreTrainedModel, kernels: Ops, *, max_num_seqs: int, max_num_batched_tokens: int, num_blocks: int
    ):
        dtype, device = source.dtype, source.device
        config = DecoderConfig.from_transformers(source.config)
        weights = load_decoder_weights(StateDict(source), config, dtype=dtype, device=device, kernels=kernels)  # type: ignore[arg-type]
        self.model = Decoder(
            config, weights, name="random", architecture="LlamaForCausalLM", eos_token_ids=frozenset(), dtype=dtype,
            device=device, kernels=kernels,
        )  # fmt: skip
        storage = KVStorage(
            self.model.spec.kv_groups, num_blocks=num_blocks, block_size=16, dtype=dtype, device=device, kernels=kernels
        )
        options = EngineConfig(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, num_blocks=num_blocks,
            max_model_len=self.model.spec.max_model_len, enable_prefix_caching=False,
        )  # fmt: skip
        self.core = EngineCore(self.model, storage, options)

    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        """Greedy; exactly `new_tokens` ids for each prompt."""
        params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
        made: dict[int, list[int]] = {self.core.add_request(prompt, params): [] for prompt in prompts}
        while self.core.has_work:
            for request_id, tokens in self.core.step().new_tokens.items():
                made[request_id] += [token for _, token in tokens]
        return list(made.values())

    def decode_seconds(self, prompts: list[list[int]], steps: int) -> list[float]:
        """Seconds of each of `steps` steps in which every sequence gets one token."""
        params = SamplingParams(temperature=0, max_tokens=steps + 8, ignore_eos=True)
        for prompt in prompts:
            self.core.add_request(prompt, params)
        seconds = []
        while self.core.has_work:
            outputs: list[StepOutput] = []
            taken = seconds_of(lambda o=outputs: o.append(self.core.step()))
            (out,) = outputs
            if out.scheduled and set(out.scheduled.values()) == {1} and len(out.scheduled) == len(prompts):
                seconds.append(taken)
        return seconds[4 : 4 + steps]


def transformers_generate(model: PreTrainedModel, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    """transformers' own continuous batching on the same prompts, greedy, exactly `new_tokens` ids each."""
    from transformers import GenerationConfig

    config = GenerationConfig(
        max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    sizes = {}
    if model.device.type == "cpu":  # it would take nine tenths of the machine's memory for its pool
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        pages = sum(1 + (len(prompt) + new_tokens) // 256 for prompt in prompts)
        sizes["continuous_batching_config"] = ContinuousBatchingConfig(num_blocks=pages + 1, max_batch_tokens=512)
    outputs = model.generate_batch(prompts, generation_config=config, progress_bar=False, **sizes)
    return [output.generated_tokens for output in outputs.values()]
