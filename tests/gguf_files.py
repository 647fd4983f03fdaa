"""Small .gguf files as llama.cpp's converter writes them, made from the checkpoints of `tiny.py`.

Written against the format, not against our reader: names come from the gguf library's table, the row order from
llama.cpp's `permute`, norms and transposes from its converters. `write_gguf(folder, path, …)` keeps vectors in F32 and
stores matrices as `kind`. Types that the gguf library can only read are filled with random valid blocks.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, dequantize, quantize
from gguf.constants import GGML_QUANT_SIZES, MODEL_ARCH_NAMES, TokenType
from gguf.tensor_mapping import get_tensor_name_map
from safetensors.torch import load_file
from transformers import AutoConfig

SHAPE = {"hidden_size": 256, "intermediate_size": 256}  # rows of 256: the block of the K types
_ARCH = {"gemma2": "gemma2", "gpt2": "gpt2", "llama": "llama", "phi3": "phi3", "qwen2": "qwen2", "qwen3": "qwen3"}
_CONV1D = ("c_attn.weight", "c_proj.weight", "c_fc.weight")


def readable_types() -> list[GGMLQuantizationType]:
    """Every type that the gguf library dequantizes."""
    found = []
    for kind in GGMLQuantizationType:
        block, size = GGML_QUANT_SIZES[kind]
        try:
            dequantize(np.zeros((1, size * (256 // block)), np.uint8), kind)
        except NotImplementedError:
            continue
        found.append(kind)
    return found


def stored(values: np.ndarray, kind: GGMLQuantizationType, rng: np.random.Generator) -> np.ndarray:
    """`values` as the type's bytes; random blocks of finite values where the library cannot quantize."""
    try:
        return quantize(values, kind)
    except NotImplementedError:
        block, size = GGML_QUANT_SIZES[kind]
        blocks = rng.integers(0, 256, (values.size // block, size), dtype=np.uint8)
        while True:
            with np.errstate(all="ignore"):
                flat = dequantize(blocks, kind)
            bad = ~np.isfinite(flat).all(axis=1) | (np.abs(flat).max(axis=1) > 1e4)
            if not bad.any():
                return blocks.reshape(*values.shape[:-1], values.shape[-1] // block * size)
            blocks[bad] = rng.integers(0, 256, (int(bad.sum()), size), dtype=np.uint8)


def llama_rows(num_rows: int, num_heads: int) -> np.ndarray:
    """Where llama.cpp puts each row of q or k: stored[i] = original[llama_rows[i]]."""
    head = num_rows // num_heads
    order = []
    for start in range(0, num_rows, head):
        for i in range(head // 2):
            order += [start + i, start + i + head // 2]
    return np.array(order)


def write_gguf(
    folder: Path,
    path: Path,
    *,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    seed: int = 0,
    metadata: dict | None = None,
    tokenizer: bool = True,
    drop: str | None = None,
    extra: dict[str, np.ndarray] | None = None,
) -> dict[str, np.ndarray]:
    """Write the checkpoint in `folder` as `path`; {transformers' name: the float32 values now in the file}.

    `metadata` adds or replaces keys (written without the architecture's prefix), `drop` leaves a tensor out.
    """
    config = AutoConfig.from_pretrained(folder)
    arch = _ARCH[config.model_type]
    writer, rng = GGUFWriter(path, arch), np.random.default_rng(seed)
    _write_metadata(writer, config, metadata or {})
    if tokenizer:
        write_tokenizer(writer, folder)
    key = next(key for key, value in MODEL_ARCH_NAMES.items() if value == arch)
    table = get_tensor_name_map(key, config.num_hidden_layers)
    values = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        stem, _, suffix = name.rpartition(".")
        gguf_name = f"{table.get_name(stem)}.{suffix}"
        array, rows = tensor.float().numpy(), None
        if arch == "gpt2" and name.endswith(_CONV1D):
            array = np.ascontiguousarray(array.T)
        if arch == "gemma2" and "norm" in name:
            array = array + 1
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            rows = llama_rows(array.shape[0], heads)
            array = array[rows]
        used = kind if array.ndim > 1 else GGMLQuantizationType.F32
        raw = stored(np.ascontiguousarray(array), used, rng)
        if gguf_name != drop:
            writer.add_tensor(gguf_name, raw, raw_dtype=used)
        back = dequantize(raw, used).reshape(array.shape)
        if rows is not None:
            original = np.empty_like(back)
            original[rows] = back
            back = original
        if arch == "gpt2" and name.endswith(_CONV1D):
            back = np.ascontiguousarray(back.T)
        values[name] = back - 1 if arch == "gemma2" and "norm" in name else back
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def _write_metadata(writer: GGUFWriter, config, overrides: dict) -> None:
    keys = {
        "context_length": config.max_position_embeddings,
        "block_count": config.num_hidden_layers,
        "embedding_length": config.hidden_size,
        "feed_forward_length": getattr(config, "intermediate_size", None) or config.n_inner,
        "attention.head_count": config.num_attention_heads,
    }
    if config.model_type == "gpt2":
        keys["attention.layer_norm_epsilon"] = config.layer_norm_epsilon
    else:
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        keys |= {
            "attention.head_count_kv": config.num_key_value_heads,
            "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
            "rope.dimension_count": head_dim,
            "rope.freq_base": config.rope_parameters["rope_theta"],
            "vocab_size": config.vocab_size,
        }
        if config.model_type in ("qwen3", "gemma2"):
            keys |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
        if config.model_type == "gemma2":
            keys["attention.sliding_window"] = config.sliding_window
            keys["attn_logit_softcapping"] = config.attn_logit_softcapping
            keys["final_logit_softcapping"] = config.final_logit_softcapping
    for key, value in {**keys, **overrides}.items():
        name = f"{writer.arch}.{key}"
        if value is None:
            continue
        if isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, list):
            writer.add_array(name, value)
        else:
            writer.add_uint32(name, value)


def write_tokenizer(writer: GGUFWriter, folder: Path, *, pre: str = "gpt-2") -> None:
    """The byte-level tokenizer of a checkpoint folder as llama.cpp stores one."""
    saved = json.loads((folder / "tokenizer.json").read_text())
    vocab = saved["model"]["vocab"]
    special = {token["content"]: token["id"] for token in saved["added_tokens"]}
    tokens = [text for text, _ in sorted({**vocab, **special}.items(), key=lambda item: item[1])]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL if token in special else TokenType.NORMAL for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in saved["model"]["merges"]])
    writer.add_bos_token_id(special["<|bos|>"])
    writer.add_eos_token_id(special["<|eos|>"])
    writer.add_add_bos_token(False)
    template = folder / "chat_template.jinja"
    if template.exists():
        writer.add_chat_template(template.read_text())
