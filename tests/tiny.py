"""Tiny random checkpoints, made in milliseconds with no network, and the oracle that says what they should generate.

`tiny_llama(folder)` and `tiny_model(folder, model_type)` write what a real checkpoint folder holds: config.json,
generation_config.json, safetensors, and a byte-level tokenizer. Weights are drawn wide enough (norms and biases
included) that every parameter changes the greedy text, so a dropped bias or a skipped norm cannot hide.

    ids 0–255      one token a byte (byte-level BPE alphabet, in its order)
    256 257        <|bos|> <|eos|>
    258 259        <|im_start|> <|im_end|>
    260–299        merged pairs of letters, so that a stop string can end inside a token
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

VOCAB_SIZE = 300
BOS, EOS, IM_START, IM_END = 256, 257, 258, 259
_PAIRS = "th he in er an re on at en nd ti es or te of ed is it al ar st to nt ng se ha as ou io le ve co me de hi ri ro ic ne ea"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SMALL = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": None,
    "tie_word_embeddings": True,
}


def tiny_llama(folder: Path | str, **overrides) -> Path:
    """A Llama of 2 layers, hidden 64, 4 query and 2 KV heads of 16, tied head; `overrides` go into its config."""
    return tiny_model(folder, "llama", **overrides)


def tiny_model(
    folder: Path | str,
    model_type: str,
    *,
    seed: int = 0,
    spread: float = 0.2,
    chat_template: bool = True,
    tokenizer: bool = True,
    max_shard_size: str = "1GB",
    **overrides,
) -> Path:
    """Write a random checkpoint of any architecture transformers knows; returns the folder.

    `spread` is the standard deviation of its weights, `max_shard_size` ("40KB") splits it into shards.
    """
    folder = Path(folder)
    config = AutoConfig.for_model(model_type, **{**SMALL, **overrides})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator) * spread
            parameter.copy_(1 + noise if "norm" in name and name.endswith("weight") else noise)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    if tokenizer:
        tiny_tokenizer(chat_template=chat_template).save_pretrained(folder)
    return folder


def tiny_tokenizer(*, chat_template: bool = True) -> PreTrainedTokenizerFast:
    """The byte-level tokenizer of the table above; it adds no BOS by itself."""
    pairs = _PAIRS.split()
    specials = ["<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>"]
    vocab = {char: i for i, char in enumerate([*_byte_chars(), *specials, *pairs])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[(pair[0], pair[1]) for pair in pairs]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<|bos|>", eos_token="<|eos|>", clean_up_tokenization_spaces=False
    )
    if chat_template:
        tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _byte_chars() -> list[str]:
    """The printable character that stands for each byte in byte-level BPE: itself, or the next one from 256 up."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = iter(range(256, 512))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


@functools.lru_cache(maxsize=16)
def reference_model(folder: Path | str, dtype: torch.dtype = torch.float32):
    """The transformers model of a checkpoint folder, on the CPU, for comparison only."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def oracle(folder: Path | str, prompt_ids: Sequence[int], max_new_tokens: int, *, ignore_eos: bool = True) -> list[int]:
    """Token ids that `transformers.generate` adds to one prompt: greedy, float32, unbatched."""
    model = reference_model(folder)
    stops = {"eos_token_id": None} if ignore_eos else {}
    with torch.inference_mode():
        ids = model.generate(
            torch.tensor([list(prompt_ids)]),
            attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.long),
            do_sample=False,
            max_new_tokens=max_new_tokens,
            pad_token_id=0,
            **stops,
        )
    return ids[0, len(prompt_ids) :].tolist()


def oracle_logits(folder: Path | str, ids: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Logits of transformers after every token of one sequence: float32 [len(ids), vocab]."""
    with torch.inference_mode():
        return reference_model(folder, dtype)(torch.tensor([list(ids)])).logits[0].float()
