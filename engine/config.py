"""`EngineConfig`: every option of an engine, validated once; derived values are properties."""

from __future__ import annotations

from dataclasses import dataclass, fields

_CHOICES = {
    "dtype": ("auto", "float32", "bfloat16"),
    "device": ("auto", "cpu", "cuda"),
    "kernels": ("auto", "reference", "cpu"),
    "kv_cache_dtype": ("auto",),
    "scheduling_policy": ("fcfs",),
    "preemption_mode": ("recompute",),
}
_AT_LEAST = {
    "block_size": 1,
    "num_blocks": 2,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "max_model_len": 1,
    "max_waiting_requests": 1,
    "max_waiting_tokens": 1,
    "event_capacity": 1,
    "num_threads": 1,
}


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Names follow vLLM where it has one. None means: decided from the model and the machine.

    model                   "default", a Hugging Face id, a local folder, or a .gguf file
    tokenizer               another folder or id to take the tokenizer from
    dtype                   "auto" is bfloat16 where the CPU has it natively or on a GPU, else float32
    block_size, num_blocks  tokens a block; blocks in the pool, the null block included. Default pool: the
                            smaller of 512 blocks and 10 % of free memory
    max_num_seqs            sequences in one step
    max_num_batched_tokens  tokens in one step, prefill and decode together (the chunked-prefill budget)
    max_model_len           longest prompt + output; default: what the model was trained for
    watermark               share of the pool kept free when a request is admitted
    kernels                 "auto" is "cpu" on a CPU and "reference" elsewhere
    cache_salt              only requests with the same salt share cached text
    num_threads             CPU threads of one step; default: one per core
    weights_source          filled by the engine: which file the weights came from; not an option
    """

    model: str = "default"
    tokenizer: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    kernels: str = "auto"
    seed: int = 0
    block_size: int = 16
    num_blocks: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_model_len: int | None = None
    enable_prefix_caching: bool = True
    cache_salt: str | None = None
    kv_cache_dtype: str = "auto"
    scheduling_policy: str = "fcfs"
    preemption_mode: str = "recompute"
    watermark: float = 0.01
    max_waiting_requests: int = 10_000
    max_waiting_tokens: int = 10_000_000
    event_capacity: int = 65_536
    num_threads: int | None = None
    weights_source: str = ""

    def __post_init__(self):
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise ValueError(f"{name}={value!r}: must be one of {', '.join(map(repr, choices))}")
        for name, least in _AT_LEAST.items():
            value = getattr(self, name)
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name}={value!r}: must be an integer of at least {least}")
        if not 0 <= self.watermark < 1:
            raise ValueError(f"watermark={self.watermark!r}: must be a share of the pool from 0 to below 1")
        if self.cache_salt is not None and not self.enable_prefix_caching:
            raise ValueError(f"cache_salt={self.cache_salt!r}: needs enable_prefix_caching=True")

    @classmethod
    def from_options(cls, model: str, options: dict) -> EngineConfig:
        """Build a config from keyword arguments; an unknown one is an error that names it and its neighbours."""
        known = {f.name for f in fields(cls)} - {"weights_source"}
        unknown = sorted(set(options) - known)
        if unknown:
            raise TypeError(f"unknown option {unknown[0]!r}; the options are {', '.join(sorted(known - {'model'}))}")
        return cls(model=model, **options)
