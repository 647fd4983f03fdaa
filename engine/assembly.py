"""Building an engine: from options to a core that can run, with every None and "auto" decided.

In: an `EngineConfig` as the user wrote it. Out: `Assembly`, whose config holds no None and no "auto" that matters and
says where the weights came from. Everything slow happens here, in the caller's thread: finding the model, loading it,
compiling kernels. Knows no driver thread and no request.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from kvscope.kernels import ops
from kvscope.kernels.cpu import compiler
from kvscope.kernels.invariant import batch_invariant

from .config import EngineConfig
from .core import EngineCore
from .info import EngineInfo
from .kvcache.prefix_cache import common_block_size, unequal_sizes
from .kvcache.storage import KVStorage
from .models import hub
from .models.hub_client import first_line, is_hub_name, shortened
from .models.loader import load_model
from .pool_size import Loading, decide_num_blocks

if TYPE_CHECKING:
    from kvscope.kernels.ops import Ops
    from transformers import PreTrainedTokenizerBase

    from .models.base import Model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Assembly:
    config: EngineConfig
    core: EngineCore
    tokenizer: PreTrainedTokenizerBase | None
    info: EngineInfo


def assemble(config: EngineConfig) -> Assembly:
    """Raises ValueError or FileNotFoundError with a sentence for whatever stands in the way."""
    device = _device(config.device)
    num_threads = _set_threads(config.num_threads)
    dtype = _dtype(config.dtype, device)
    kernels = ops.resolve(config.kernels, device, dtype)
    if config.batch_invariant:
        kernels = batch_invariant(kernels)
    if kernels.name == "cpu":
        groups = ["common", str(dtype).removeprefix("torch."), *(["int8"] if config.quantization else [])]
        compiler.warm_up(groups, compiler.ProgressBar())
    files = hub.resolve(config.model)
    tokenizer = _load_tokenizer(config, files)
    loading = Loading(device)
    model = load_model(files, dtype=dtype, device=device, kernels=kernels, quantization=config.quantization)
    _give_memory_back()
    num_blocks = decide_num_blocks(config, model.spec, kernels, loading)
    max_model_len = _max_model_len(config.max_model_len, model)
    config = replace(
        config,
        device=device.type,
        dtype=str(dtype).removeprefix("torch."),
        kernels=kernels.name,
        max_model_len=max_model_len,
        num_blocks=num_blocks,
        kv_cache_memory_bytes=None,  # decided: num_blocks says it
        gpu_memory_utilization=None,
        num_threads=num_threads,
        weights_source=files.source,
    )
    storage = _storage(num_blocks, config.block_size, model, kernels, config.num_cpu_blocks)
    core = EngineCore(model, storage, config, eos_token_ids=_eos_token_ids(model, tokenizer))
    compiler.release_threads()  # this thread has packed the weights; the engine's own thread takes over
    return Assembly(config, core, tokenizer, _info(config, model, storage, num_threads, max_model_len))


def _give_memory_back() -> None:
    """What loading needed in between, up to 0.2 GB, stays in glibc's heap, where neither weights nor pool take from it."""
    with contextlib.suppress(OSError, AttributeError, TypeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device='cuda': torch sees no GPU here; use 'cpu' or 'auto'")
    return torch.device(name)


def _dtype(name: str, device: torch.device) -> torch.dtype:
    """bfloat16 where the hardware multiplies it natively, else float32."""
    if name != "auto":
        return DTYPES[name]
    if device.type == "cuda":
        return torch.bfloat16
    flags = torch.cpu.get_capabilities()
    return torch.bfloat16 if flags.get("avx512_bf16") or flags.get("amx_bf16") else torch.float32


def _set_threads(wanted: int | None) -> int:
    """Threads are a property of the process: the latest engine that names a number sets it for all.

    Torch counts the CPUs of the machine; where a container grants fewer it is held to those.
    """
    if wanted is not None:
        compiler.set_num_threads(wanted)
        torch.set_num_threads(wanted)
    elif torch.get_num_threads() > compiler.available_cpus():
        torch.set_num_threads(compiler.available_cpus())
    return compiler.num_threads()


def _load_tokenizer(config: EngineConfig, files: hub.ModelFiles) -> PreTrainedTokenizerBase | None:
    """The tokenizer named by the user, else the model's own; None where the model has none."""
    from transformers import AutoTokenizer

    if config.tokenizer is None and not files.has_tokenizer:
        return None
    source = str(files.folder) if config.tokenizer is None else config.tokenizer
    is_local = os.path.isdir(source)
    if not is_local and not is_hub_name(source):
        raise ValueError(
            f"tokenizer={shortened(source)}: is no folder here, and not the name of a hub model (org/name)"
        )
    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False, local_files_only=is_local)
    except Exception as error:  # transformers raises many kinds; all of them mean the same here
        raise ValueError(f"tokenizer={source!r} cannot be loaded: {first_line(error)}") from error


def _eos_token_ids(model: Model, tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """The union of config, generation_config and tokenizer: none of them may hide another."""
    ids = set(model.spec.eos_token_ids)
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return frozenset(i for i in ids if 0 <= i < model.spec.vocab_size)


def _max_model_len(wanted: int | None, model: Model) -> int:
    longest = model.spec.max_model_len
    if wanted is not None and wanted > longest:
        raise ValueError(f"max_model_len={wanted}: {model.spec.name} was made for at most {longest} tokens")
    return longest if wanted is None else wanted


def _storage(
    num_blocks: int, block_size: int | Mapping[str, int], model: Model, kernels: Ops, num_cpu_blocks: int
) -> KVStorage:
    spec = model.spec
    return KVStorage(
        spec.kv_groups,
        num_blocks=num_blocks,
        block_size=block_size,
        dtype=spec.dtype,
        device=spec.device,
        kernels=kernels,
        num_cpu_blocks=num_cpu_blocks,
    )


def _info(config: EngineConfig, model: Model, storage: KVStorage, num_threads: int, max_model_len: int) -> EngineInfo:
    spec = model.spec
    return EngineInfo(
        model_name=spec.name,
        architecture=spec.architecture,
        device=config.device,
        num_threads=num_threads,
        dtype=config.dtype,
        quantization=config.quantization,
        kernels=config.kernels,
        num_blocks=storage.num_blocks,
        block_size=common_block_size(storage.groups),
        block_sizes=unequal_sizes(storage.groups),
        block_bytes=storage.block_bytes,
        pool_bytes=storage.num_bytes,
        weights_source=config.weights_source,
        max_model_len=max_model_len,
        num_parameters=spec.num_parameters,
        weight_bytes=spec.weight_bytes,
        spec=replace(spec, kv_groups=storage.groups),
    )
