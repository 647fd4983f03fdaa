"""One small tokenizer of every family that decodes in its own way, made without a network."""

from tiny import tiny_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["▁", "▁▁", "▁Hello", "▁world", "wor", "ld", "é", "世", "界", "▁世", "!", ".", "'", "\n", "DEF", "G", "HI", "J"]


def _fast(core: Tokenizer, specials: list[str]) -> PreTrainedTokenizerFast:
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=specials[-1])


def _from_words(words: list[str], decoder) -> PreTrainedTokenizerFast:
    vocab = {token: i for i, token in enumerate(["<unk>", "a", *words])}
    core = Tokenizer(models.WordLevel(vocab=vocab, unk_token="<unk>"))
    if decoder is not None:
        core.decoder = decoder
    return _fast(core, ["<s>", "</s>"])


def byte_level() -> PreTrainedTokenizerFast:
    """GPT-2, Llama 3, Qwen: pieces of bytes, with an ordinary added token inside."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["héllo wörld€"])
    return tokenizer


def llama_sentencepiece() -> PreTrainedTokenizerFast:
    """Llama 2, Mistral: byte fallback, and one leading space that is stripped."""
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return _from_words([*WORDS, *BYTE_TOKENS], decoders.Sequence(steps))


def gemma_sentencepiece() -> PreTrainedTokenizerFast:
    """Gemma: byte fallback, every space kept."""
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return _from_words([*WORDS, *BYTE_TOKENS], decoders.Sequence(steps))


def unigram() -> PreTrainedTokenizerFast:
    """T5: the first token loses its marks."""
    return _from_words(WORDS, decoders.Metaspace())


def wordpiece() -> PreTrainedTokenizerFast:
    """BERT: spaces between words, none before ## and punctuation."""
    return _from_words(["hello", "world", "##ing", "##s", ".", ",", "'", "##", "do", "n't"], decoders.WordPiece())


def suffix_bpe() -> PreTrainedTokenizerFast:
    """XLM: an end-of-word mark that becomes a space, but not at the end."""
    return _from_words(["hello</w>", "wor", "ld</w>", ".</w>", "x"], decoders.BPEDecoder())


def plain() -> PreTrainedTokenizerFast:
    """No decoder at all: tokens joined with spaces."""
    return _from_words(["hello", "world", "é"], None)


class Loud(PreTrainedTokenizerFast):
    """A tokenizer whose Python class has its own decode."""

    def _decode(self, *args, **kwargs):
        return super()._decode(*args, **kwargs).upper()


def own_decode() -> PreTrainedTokenizerFast:
    return Loud(tokenizer_object=llama_sentencepiece().backend_tokenizer, eos_token="</s>")


FAMILIES = [own_decode, byte_level, llama_sentencepiece, gemma_sentencepiece, unigram, wordpiece, suffix_bpe, plain]
