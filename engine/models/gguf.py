"""A .gguf file, turned once into the folder that everything else reads.

`convert(path, folder)` writes `model.safetensors`, `config.json`, `generation_config.json` and the tokenizer's files.
The rest of the engine then knows one weight format, loads it by memory map in a fraction of a second, and never has
to think about quantization blocks, llama.cpp's tensor names or its row order again.

    blk.0.attn_q.weight  Q4_1 [576, 360 bytes] --rows back in order--> Q4_1 --16 MB at a time--> float32 --> safetensors

- **Dtype.** F32, F16 and BF16 tensors are stored as they are; everything quantized is stored as float32. A dequantized
  value is a float16 scale times a small integer: its product has up to 19 significant bits, more than float16 and
  bfloat16 hold. Stored as bfloat16, a float32 engine would compute with weights that the file does not contain. The
  price is disk space, paid once.
- **Memory.** The safetensors header follows from names and shapes alone, so tensors are dequantized and written in
  slices of rows; what is held at a time is one slice (for GPT-2, whose matrices must be transposed, one tensor).
- **Row order.** llama.cpp stores the q and k rows of some architectures with the two halves of each rotary pair
  interleaved. Quantization blocks run along a row, so rows go back in place while they are still bytes.
- **Completeness.** Names and shapes are checked against the architecture's own parameter list: a parameter that no
  tensor fills, a tensor that fills none, or a wrong shape is an error.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from gguf import GGUFReader, LlamaFileType, ReaderTensor, dequantize
from gguf.constants import MODEL_ARCH_NAMES, GGMLQuantizationType
from gguf.tensor_mapping import get_tensor_name_map
from tqdm.auto import tqdm

from .gguf_config import ARCHITECTURES, Architecture, Metadata, build_config, eos_token_ids
from .gguf_header import GGUFError, check_header
from .gguf_tokenizer import write_tokenizer
from .hub_client import first_line

SLICE_BYTES = 16 << 20  # of float32 output held at a time
_KEPT = {
    GGMLQuantizationType.F32: ("F32", np.dtype("<f4")),
    GGMLQuantizationType.F16: ("F16", np.dtype("<f2")),
    GGMLQuantizationType.BF16: ("BF16", np.dtype("<u2")),  # moved as bits: numpy has no bfloat16
}
_COMPUTED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")  # read by gguf_config


@dataclass(frozen=True, slots=True)
class Converted:
    """What `convert` found out on the way."""

    quantization: str  # "Q4_1", "Q4_K_M", "F16", …
    tokenizer_problem: str  # why there is no tokenizer in the folder; "" if there is one


@dataclass(frozen=True, slots=True)
class _Target:
    """One tensor of the output: where it comes from and what is done to it on the way."""

    name: str  # transformers' parameter name
    tensor: ReaderTensor
    dtype: str  # safetensors' name of the stored dtype
    shape: tuple[int, ...]
    num_bytes: int
    row_heads: int = 0  # > 0: rows of so many heads go back from interleaved to halves
    transpose: bool = False
    offset: float = 0.0  # added to every value


def convert(path: Path, folder: Path, *, progress: bool = True) -> Converted:
    """Write the model in the .gguf file `path` into the existing, empty `folder`. Raises GGUFError."""
    reader = open_gguf(path)
    metadata = Metadata(path, reader)
    architecture = ARCHITECTURES.get(metadata.architecture)
    if architecture is None:
        raise GGUFError(
            f"{path.name} holds a model of architecture {metadata.architecture!r}; "
            f"GGUF files can be read for {', '.join(sorted(ARCHITECTURES))}."
        )
    with _libraries_may_refuse(path, "model"):
        config = build_config(architecture, metadata)
        targets = _targets(path, reader, architecture, config)
    _write_safetensors(folder / "model.safetensors", targets, progress)
    config.save_pretrained(folder)
    generation = {"bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"), "eos_token_id": eos_token_ids(metadata)}
    kept = {name: value for name, value in generation.items() if value is not None and value != []}
    (folder / "generation_config.json").write_text(json.dumps(kept, indent=2) + "\n")
    with _libraries_may_refuse(path, "tokenizer"):
        problem = write_tokenizer(path, metadata, folder)
    return Converted(_quantization(metadata, reader), problem)


@contextmanager
def _libraries_may_refuse(path: Path, what: str) -> Iterator[None]:
    """transformers and tokenizers meet damaged values with exceptions of every kind, bare ones too."""
    try:
        yield
    except GGUFError:
        raise
    except Exception as error:
        raise GGUFError(f"{path.name} describes no {what} that can be built: {first_line(error)}.") from error


def open_gguf(path: Path) -> GGUFReader:
    """Open a .gguf file and check that every tensor lies inside it."""
    check_header(path)
    try:
        with np.errstate(over="raise"):  # a product of dimensions must not wrap around to a small one
            return GGUFReader(path)
    except KeyError as error:
        raise GGUFError(f"{path.name} is damaged: {error.args[0]}.") from error
    except (ValueError, IndexError, ArithmeticError, TypeError) as error:
        raise GGUFError(
            f"{path.name} is cut short or damaged: its {path.stat().st_size:,} bytes do not hold what its header "
            f"promises ({error})."
        ) from error


def _targets(path: Path, reader: GGUFReader, architecture: Architecture, config) -> list[_Target]:
    """Pair every parameter of the architecture with a tensor of the file, and check the shapes."""
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    parameters = _parameters(config)
    names = _gguf_names(architecture, config, parameters)
    targets, missing = [], []
    for name, shape in parameters.items():
        tensor = tensors.pop(names.get(name, ""), None)
        if tensor is None:
            missing.append(name)
            continue
        target = _target(path, name, tensor, architecture, config)
        if target.shape != shape:
            raise GGUFError(
                f"{path.name}: {tensor.name} has shape {list(target.shape)}, but {name} of this model "
                f"has {list(shape)}."
            )
        targets.append(target)
    left = [name for name in tensors if name not in _COMPUTED]
    if missing:
        raise GGUFError(f"{path.name} lacks {_some(missing)}, which a {config.model_type} model needs.")
    if left:
        raise GGUFError(
            f"{path.name} holds {_some(left)}, which has no place in a {config.model_type} model; "
            "loading the rest would give another model than the file's."
        )
    return targets


def _parameters(config) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter of the model, tied ones once, without allocating any."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def _gguf_names(architecture: Architecture, config, parameters) -> dict[str, str]:
    """Parameter name -> tensor name, by the gguf library's own table."""
    arch = next(key for key, value in MODEL_ARCH_NAMES.items() if value == architecture.gguf)
    table = get_tensor_name_map(arch, config.num_hidden_layers)
    names = {}
    for name in parameters:
        stem, _, suffix = name.rpartition(".")
        found = table.get_name(stem) or table.get_name(stem.removeprefix("model."))
        if found is not None:
            names[name] = f"{found}.{suffix}"
    return names


def _target(path: Path, name: str, tensor: ReaderTensor, architecture: Architecture, config) -> _Target:
    shape = tuple(int(n) for n in reversed(tensor.shape))
    leaf = tensor.name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
    transpose = leaf in architecture.transposed and len(shape) == 2
    offset = architecture.norm_offset if leaf.endswith("norm") else 0.0
    kept = _KEPT.get(tensor.tensor_type)
    dtype, itemsize = (kept[0], kept[1].itemsize) if kept and not offset else ("F32", 4)
    if kept is None:
        try:
            dequantize(np.zeros((1, tensor.data.shape[-1]), np.uint8), tensor.tensor_type)
        except NotImplementedError:
            raise GGUFError(
                f"{path.name}: {tensor.name} is stored as {tensor.tensor_type.name}, which the gguf library "
                "does not dequantize."
            ) from None
    heads = {"attn_q": config.num_attention_heads, "attn_k": getattr(config, "num_key_value_heads", 0)}
    return _Target(
        name=name,
        tensor=tensor,
        dtype=dtype,
        shape=shape[::-1] if transpose else shape,
        num_bytes=int(np.prod(shape)) * itemsize,
        row_heads=heads.get(leaf, 0) if architecture.interleaved else 0,
        transpose=transpose,
        offset=offset,
    )


def _write_safetensors(path: Path, targets: list[_Target], progress: bool) -> None:
    """The safetensors format: 8 bytes of header length, a JSON header, then the tensors end to end."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for target in targets:
        header[target.name] = {
            "dtype": target.dtype,
            "shape": list(target.shape),
            "data_offsets": [end, end + target.num_bytes],
        }
        end += target.num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin on an 8-byte boundary
    free = shutil.disk_usage(path.parent).free
    if free < end:
        raise GGUFError(f"{path.parent} has {free / 1e6:,.0f} MB free; the unpacked model needs {end / 1e6:,.0f} MB.")
    with (
        open(path, "wb") as file,
        tqdm(total=end, unit="B", unit_scale=True, desc="converting", disable=not progress) as bar,
    ):
        file.write(len(text).to_bytes(8, "little") + text)
        for target in targets:
            for values in _values(target):
                file.write(values.tobytes())
                bar.update(values.nbytes)


def _values(target: _Target) -> Iterator[np.ndarray]:
    """The target's values in order, a slice of rows at a time."""
    data = target.tensor.data
    if target.row_heads:
        data = _halves(data, target.row_heads)
    rows = data.reshape(-1, data.shape[-1])
    row_bytes = 4 * int(target.tensor.shape[0])
    step = rows.shape[0] if target.transpose else max(1, SLICE_BYTES // row_bytes)
    for start in range(0, rows.shape[0], step):
        part = rows[start : start + step]
        kept = _KEPT.get(target.tensor.tensor_type)
        if kept is not None and not target.offset:
            values = np.ascontiguousarray(part).view(kept[1])
        else:
            values = dequantize(np.ascontiguousarray(part), target.tensor.tensor_type)
            if target.offset:
                values = values + np.float32(target.offset)
        yield np.ascontiguousarray(values.T) if target.transpose else values


def _halves(data: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from llama.cpp's (0, h, 1, h+1, …) back to (0, 1, …, h, h+1, …), h = half the head."""
    pairs = data.reshape(heads, data.shape[0] // heads // 2, 2, *data.shape[1:])
    return pairs.swapaxes(1, 2).reshape(data.shape)


def _quantization(metadata: Metadata, reader: GGUFReader) -> str:
    """The file's type as people name it: what its header says, else the type of most of its weights."""
    try:
        return LlamaFileType(metadata["general.file_type"]).name.removeprefix("MOSTLY_").removeprefix("ALL_")
    except (KeyError, ValueError):
        counts: Counter[str] = Counter()
        for tensor in reader.tensors:
            counts[tensor.tensor_type.name] += tensor.n_elements
        return counts.most_common(1)[0][0]


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
