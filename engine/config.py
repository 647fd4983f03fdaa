"""`EngineConfig`: every option of an engine, validated once; derived values are properties."""

from __future__ import annotations

import inspect
import numbers
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypedDict

from .snapshot import size_words

_CHOICES = {
    "dtype": ("auto", "float32", "bfloat16"),
    "device": ("auto", "cpu", "cuda"),
    "kernels": ("auto", "reference", "cpu", "triton"),
    "quantization": (None, "int8", "int8-dynamic"),
    "kv_cache_dtype": ("auto",),
    "scheduling_policy": ("fcfs", "priority", "sjf", "lpm", "dfs-weight", "prefill-first", "static"),
    "preemption_victim": ("youngest", "most-blocks", "least-progress", "lowest-priority"),
    "preemption_mode": ("recompute", "swap"),
    "resume_order": ("oldest", "smallest"),
    "prefix_cache": ("hash", "radix"),
    "eviction_policy": ("lru", "lfu", "fifo", "mru", "slru", "priority"),
    "kv_allocator": ("paged", "orca-max", "orca-pow2", "orca-oracle"),
    "logprobs_mode": ("raw_logprobs", "processed_logprobs"),
}
_AT_LEAST = {
    "num_blocks": 2,
    "kv_cache_memory_bytes": 1,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "max_model_len": 1,
    "max_waiting_requests": 1,
    "max_waiting_tokens": 1,
    "long_prefill_token_threshold": 0,
    "max_skips": 0,
    "max_preemptions": 0,
    "num_cpu_blocks": 0,
    "event_capacity": 1,
    "num_threads": 1,
}


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Every option of an engine, in vLLM's names where it has one. None and "auto" are decided from the model and the
    machine; `engine.config` holds what was decided.

    model                   "default", a Hugging Face id, a local folder, or a .gguf file
    tokenizer               another folder or id to take the tokenizer from
    dtype                   of weights and KV: "float32" | "bfloat16"; "auto" is bfloat16 where the CPU multiplies it
                            natively or on a GPU, else float32
    quantization            of the weights of all products, the head's too, while they are loaded: "int8" with a scale for each
                            output | "int8-dynamic": what they multiply becomes int8 as well, with a scale for each 32
                            values; None: they stay in dtype. Only for models that the native decoder takes
    device                  "cpu" | "cuda"; "auto" takes a GPU where torch sees one
    kernels                 "cpu" (Numba) | "triton" (a GPU) | "reference" (plain torch); "auto" is the fast one of the device
    seed                    of requests that bring none
    block_size, num_blocks  tokens a block; blocks in the pool, the null block included. Default pool: the
                            smaller of 512 blocks and 10 % of free memory. A model some of whose layers have a sliding window
                            may have two sizes, {"full": 32, "sliding": 16}: all blocks have the bytes of the larger, those
                            of the smaller hold more layers, and a prefix hit (prefix_cache="hash") fills blocks of both
    kv_cache_memory_bytes   the pool by its size in bytes, in place of num_blocks
    gpu_memory_utilization  the pool by a share: weights and pool together take this much of the GPU's memory, on a CPU of what
                            was free before the model was loaded
    max_num_seqs            sequences in one step
    max_num_batched_tokens  tokens in one step, prefill and decode together (the chunked-prefill budget)
    max_model_len           longest prompt + output; default: what the model was trained for
    enable_prefix_caching   keep the KV of text and reuse it for prompts that begin alike
    prefix_cache            "hash": a chain of hashes over full blocks; "radix": a tree over tokens, so that a hit may end inside
                            a block, and the partly filled last block of a request that leaves can be found too
    eviction_policy         which cached block goes first when room is needed: "lru" unused for longest, "lfu" hit least often,
                            "fifo" cached for longest, "mru" used last, "slru" not hit twice yet, then unused for longest,
                            "priority" of the least important requests
    kv_allocator            "paged": blocks as tokens come; "orca-max" | "orca-pow2" | "orca-oracle": one contiguous run per
                            request, reserved when it is admitted, for comparison; they need enable_prefix_caching=False
    cache_salt              only requests with the same salt share cached text
    kv_cache_dtype          "auto": the model's
    scheduling_policy       "fcfs": in order of arrival; "priority": the lowest number first, and it may take the place of a
                            worse one; "sjf": the shortest prompt first; "lpm" | "dfs-weight": by what is cached;
                            "prefill-first": prompts and single tokens in steps of their own; "static": nobody joins a
                            batch before all of it have ended, and rows are padded to the longest
    long_prefill_token_threshold  most tokens of one prompt in one step; 0: as many as the budget holds
    max_skips               how often a request that cannot be admitted may be passed by others that can; 0: never
    preemption_victim       who loses its blocks when none is free: "youngest" | "most-blocks" | "least-progress" |
                            "lowest-priority", of those that are younger than whoever needs them
    gang_preemption         do all samples of a request lose their blocks at once? Default: with "swap" and "prefill-first"
    max_preemptions         who lost its blocks so often is spared while there is another; 0: no bound
    preemption_mode         "recompute": a request that lost its blocks computes them again; "swap": they wait in host memory,
                            and are computed again only where that is full
    num_cpu_blocks          blocks of host memory for "swap"
    resume_order            which preempted request comes back first, when it fits as a whole: "oldest" | "smallest"
    logprobs_mode           "raw_logprobs": logprobs are of the model's own logits; "processed_logprobs": of what the
                            token was drawn from, after masks, penalties, temperature and filters
    batch_invariant         a request's logits are the same to the last bit whatever else is in its steps, however its prompt
                            is cut into them and whatever is cached, for one dtype, block size and set of kernels; free
                            with the CPU kernels, slow with "reference", refused for GPUs and for models that
                            transformers computes
    enforce_eager           compute every decode step call by call: by default, on the CPU, the kernel calls of a step are
                            recorded and made again in steps of the same shape, which gives the same bits sooner
    watermark               share of the pool kept free when a request is admitted, for those that run to grow into; a
                            kv_allocator that reserves all memory at once keeps nothing
    max_waiting_requests    requests that may wait; one more is refused
    max_waiting_tokens      prompt tokens that may wait; a request that brings more is refused
    event_capacity          events kept for viewers; older ones are dropped
    num_threads             CPU threads of one step, for the whole process; default: the CPUs it may use
    weights_source          filled by the engine: which file the weights came from; not an option
    """

    model: str = "default"
    tokenizer: str | None = None
    dtype: str = "auto"
    quantization: str | None = None
    device: str = "auto"
    kernels: str = "auto"
    seed: int = 0
    block_size: int | Mapping[str, int] = 16
    num_blocks: int | None = None
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_model_len: int | None = None
    enable_prefix_caching: bool = True
    prefix_cache: str = "hash"
    eviction_policy: str = "lru"
    kv_allocator: str = "paged"
    cache_salt: str | None = None
    kv_cache_dtype: str = "auto"
    scheduling_policy: str = "fcfs"
    long_prefill_token_threshold: int = 0
    max_skips: int = 0
    preemption_victim: str = "youngest"
    max_preemptions: int = 0
    gang_preemption: bool | None = None
    preemption_mode: str = "recompute"
    num_cpu_blocks: int = 0
    resume_order: str = "oldest"
    logprobs_mode: str = "raw_logprobs"
    batch_invariant: bool = False
    enforce_eager: bool = False
    watermark: float = 0.01
    max_waiting_requests: int = 10_000
    max_waiting_tokens: int = 10_000_000
    event_capacity: int = 65_536
    num_threads: int | None = None
    weights_source: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.model, str | os.PathLike) or not os.fspath(self.model):
            raise ValueError(f"model={self.model!r}: must be 'default', a Hugging Face id, a folder or a .gguf file")
        object.__setattr__(self, "model", os.fspath(self.model))
        if not is_integer(self.seed):
            raise ValueError(f"seed={self.seed!r}: must be an integer")
        object.__setattr__(self, "seed", int(self.seed))
        for name in ("enable_prefix_caching", "batch_invariant", "enforce_eager"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r}: must be True or False")
        for name in ("tokenizer", "cache_salt"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise ValueError(f"{name}={value!r}: must be a string that is not empty, or None")
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise ValueError(f"{name}={value!r}: must be one of {', '.join(map(repr, choices))}")
        for name, least in _AT_LEAST.items():
            value = getattr(self, name)
            if value is None:
                continue
            if not is_integer(value) or value < least:
                raise ValueError(f"{name}={value!r}: must be an integer of at least {least}")
            object.__setattr__(self, name, int(value))
        object.__setattr__(self, "block_size", self._checked_block_size())
        if not isinstance(self.watermark, int | float) or not 0 <= self.watermark < 1:
            raise ValueError(f"watermark={self.watermark!r}: must be a share of the pool from 0 to below 1")
        share = self.gpu_memory_utilization
        if share is not None and (isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1):
            raise ValueError(f"gpu_memory_utilization={share!r}: must be a share of memory above 0, at most 1")
        sizes = ("num_blocks", "kv_cache_memory_bytes", "gpu_memory_utilization")
        given = [f"{name}={getattr(self, name)}" for name in sizes if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)}: each says how large the pool is; give one of them")
        about_the_cache = {
            "cache_salt": self.cache_salt is not None,
            "prefix_cache": self.prefix_cache != "hash",
            "eviction_policy": self.eviction_policy != "lru",
            "scheduling_policy": self.scheduling_policy in ("lpm", "dfs-weight"),
        }
        for name, is_chosen in about_the_cache.items():
            if is_chosen and not self.enable_prefix_caching:
                raise ValueError(f"{name}={getattr(self, name)!r}: needs enable_prefix_caching=True")
        if self.kv_allocator != "paged" and self.enable_prefix_caching:
            raise ValueError(
                f"kv_allocator={self.kv_allocator!r}: reserved memory is not shared; it needs enable_prefix_caching=False"
            )
        self._check_preemption()

    def _checked_block_size(self) -> int | dict[str, int]:
        """One size where all are equal."""
        value = self.block_size
        sizes = value if isinstance(value, Mapping) else {"full": value, "sliding": value}
        if sizes.keys() != {"full", "sliding"}:
            raise ValueError(f"block_size={value!r}: must be a number, or one for each of 'full' and 'sliding' layers")
        if not all(is_integer(size) and size >= 1 for size in sizes.values()):
            must = "each must" if isinstance(value, Mapping) else "must"
            raise ValueError(f"block_size={value!r}: {must} be an integer of at least 1")
        if sizes["full"] == sizes["sliding"]:
            return int(sizes["full"])
        if self.kv_allocator != "paged":
            raise ValueError(
                f"block_size={value!r}: a reserved run is of blocks of one size; two need kv_allocator='paged', not "
                f"{self.kv_allocator!r}"
            )
        return {"full": int(sizes["full"]), "sliding": int(sizes["sliding"])}

    def _check_preemption(self) -> None:
        mode, host, gangs = f"preemption_mode={self.preemption_mode!r}", self.num_cpu_blocks, self.gang_preemption
        if gangs is not None and not isinstance(gangs, bool):
            raise ValueError(f"gang_preemption={gangs!r}: must be True, False or None")
        if self.preemption_mode == "swap":
            if not host:
                raise ValueError(f"{mode}: blocks wait in host memory, and num_cpu_blocks={host} has no room for one")
            if gangs is False:
                raise ValueError(
                    f"{mode}: samples that share blocks go out together, so gang_preemption=False cannot be"
                )
            if self.kv_allocator != "paged":
                raise ValueError(
                    f"{mode}: moves single blocks; it needs kv_allocator='paged', not {self.kv_allocator!r}"
                )
        elif host:
            raise ValueError(f"num_cpu_blocks={host}: {mode} needs no host memory; 'swap' does")
        if self.resume_order == "smallest" and self.scheduling_policy == "priority":
            raise ValueError(
                "resume_order='smallest': with scheduling_policy='priority' the best priority comes back first"
            )

    @property
    def block_words(self) -> str:
        """Tokens a block, for people."""
        return size_words(self.block_size.values() if isinstance(self.block_size, Mapping) else [self.block_size])

    @property
    def heeds_priority(self) -> bool:
        """Does anything look at the priority of a request?"""
        chosen = (self.scheduling_policy, self.eviction_policy, self.preemption_victim)
        return "priority" in chosen or "lowest-priority" in chosen

    @property
    def preempts_gangs(self) -> bool:
        """Do all samples of a request lose their blocks at once?"""
        if self.gang_preemption is None:
            return self.preemption_mode == "swap" or self.scheduling_policy == "prefill-first"
        return self.gang_preemption

    @classmethod
    def from_options(cls, model: str | os.PathLike[str], options: dict[str, Any]) -> EngineConfig:
        """Build a config from keyword arguments; an unknown one is a TypeError that names it and the known ones."""
        known = set(EngineOptions.__annotations__)
        unknown = sorted(set(options) - known)
        if unknown:
            raise TypeError(f"unknown option {unknown[0]!r}; the options are {', '.join(sorted(known))}")
        return cls(model=model, **options)  # type: ignore[arg-type]


def is_integer(value: object) -> bool:
    """An int or one of numpy's; True is none."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


class EngineOptions(TypedDict, total=False):
    """The keyword arguments of `Engine`: the fields of `EngineConfig` but model and weights_source."""

    tokenizer: str | None
    dtype: str
    quantization: str | None
    device: str
    kernels: str
    seed: int
    block_size: int | Mapping[str, int]
    num_blocks: int | None
    kv_cache_memory_bytes: int | None
    gpu_memory_utilization: float | None
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int | None
    enable_prefix_caching: bool
    prefix_cache: str
    eviction_policy: str
    kv_allocator: str
    cache_salt: str | None
    kv_cache_dtype: str
    scheduling_policy: str
    long_prefill_token_threshold: int
    max_skips: int
    preemption_victim: str
    max_preemptions: int
    gang_preemption: bool | None
    preemption_mode: str
    num_cpu_blocks: int
    resume_order: str
    logprobs_mode: str
    batch_invariant: bool
    enforce_eager: bool
    watermark: float
    max_waiting_requests: int
    max_waiting_tokens: int
    event_capacity: int
    num_threads: int | None


def signature() -> inspect.Signature:
    """What `Engine(...)` takes, option by option with its default, for help() and completion in a notebook."""
    kind = inspect.Parameter.KEYWORD_ONLY
    options = [
        inspect.Parameter(f.name, kind, default=f.default, annotation=f.type)
        for f in fields(EngineConfig)
        if f.name in EngineOptions.__annotations__
    ]
    model = inspect.Parameter("model", inspect.Parameter.POSITIONAL_OR_KEYWORD, default="default", annotation="str")
    return inspect.Signature([model, *options])
