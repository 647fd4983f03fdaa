"""A folder with a Llama's safetensors as one GGUF file, for llama.cpp. Needs gguf, numpy and safetensors."""

import hashlib
import json
import os

import gguf
import numpy as np
from safetensors import safe_open

NAMES = {
    "model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight", "lm_head.weight": "output.weight",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip


def converted(model, kind, folder):
    """`model` (a Path) with its matrices as `kind` ("BF16", "F32", "Q8_0"), written into `folder` unless it is there already."""
    config = json.loads((model / "config.json").read_text())
    if config["model_type"] != "llama":
        raise ValueError(f"model_type={config['model_type']!r}: this adapter writes GGUF of 'llama' alone")
    (weights,) = model.glob("*.safetensors")
    stat = weights.stat()
    key = hashlib.sha256(f"{model.resolve()} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()[:12]
    target = folder / f"llama-cpp-{key}-{kind}.gguf"
    if target.exists():
        return target
    making = target.with_name(f".{target.name}-{os.getpid()}")
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    writer = gguf.GGUFWriter(making, "llama")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_rope_freq_base((config.get("rope_parameters") or config).get("rope_theta", 10000.0))
    of_weights = gguf.GGMLQuantizationType[kind]
    with safe_open(weights, "np") as tensors:
        for name in tensors.keys():  # noqa: SIM118  (no mapping)
            value = tensors.get_tensor(name).astype(np.float32)
            for part, rows in (("q_proj", heads), ("k_proj", kv_heads)):
                if part in name:  # llama.cpp turns neighbours, transformers the two halves of a head
                    value = value.reshape(rows, 2, -1, value.shape[1]).swapaxes(1, 2).reshape(value.shape)
            into = of_weights if value.ndim > 1 else gguf.GGMLQuantizationType.F32
            writer.add_tensor(_name(name), gguf.quants.quantize(value, into), raw_dtype=into)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    making.replace(target)
    return target


def _name(name):
    if name in NAMES:
        return NAMES[name]
    _, _, layer, *parts, kind = name.split(".")
    return f"blk.{layer}.{NAMES['.'.join(parts)]}.{kind}"
