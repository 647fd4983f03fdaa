"""The tokenizer inside a .gguf file, written out as transformers' files.

transformers rebuilds vocabulary, merges and special tokens from the metadata. What it does not know is every way of
cutting text before the merges apply: for a name it has never heard of it silently cuts as GPT-2 does, and the same
text becomes other ids. So names are checked here: digit-by-digit vocabularies get their own splitter, and an unknown
name leaves the tokenizer out, with the reason, instead of writing a wrong one.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .gguf_config import Metadata

# llama.cpp's names (tokenizer.ggml.pre) of byte-level splitters
_AS_GPT2 = {
    "", "default", "gpt-2", "gpt2", "phi-2", "mpt", "olmo", "jais", "trillion", "jina-es", "jina-de", "jina-v1-en",
    "jina-v2-es", "jina-v2-de", "jina-v2-code", "gigachat", "a.x-4.0", "mellum", "modern-bert", "roberta-bpe",
}  # fmt: skip
_DIGIT_BY_DIGIT = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
_BY_TRANSFORMERS = {
    "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano", "dbrx",
    "smaug-bpe", "tekken", "qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "gpt-4o", "llama4", "kanana2",
}  # fmt: skip


def write_tokenizer(path: Path, metadata: Metadata, folder: Path) -> str:
    """Write the file's tokenizer and chat template into `folder`; "" or the reason why there is none."""
    from tokenizers import pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if "tokenizer.ggml.tokens" not in metadata:
        return f"{path.name} holds no tokenizer; give one with tokenizer=."
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "")
    if kind == "gpt2" and pre not in _AS_GPT2 | _DIGIT_BY_DIGIT | _BY_TRANSFORMERS:
        return f"{path.name} splits text in a way named {pre!r}, which kvscope does not know; give tokenizer=."
    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(str(path.parent), gguf_file=path.name)
    except (ValueError, KeyError, ImportError) as error:
        return f"The tokenizer of {path.name} cannot be built ({error}); give one with tokenizer=."
    if kind == "gpt2" and pre in _DIGIT_BY_DIGIT:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    tokenizer.save_pretrained(str(folder))
    return ""
