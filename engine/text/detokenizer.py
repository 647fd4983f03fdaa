"""Token ids to text, one token at a time, equal to decoding them all at once.

In: the ids of one sample, in order. Out: pieces of text that never change once given, and whose concatenation after
`flush()` is `tokenizer.decode(ids)` exactly, for byte-level BPE, sentencepiece with byte fallback, WordPiece and any
other tokenizer whose decode is local. The prompt is no part of it.

Decoding is not a sum over tokens: a character may spread over several tokens, and the first token of a decode may lose
its leading space. So a short window of ids is decoded, and only what cannot change any more is given out:

    ids   … | context (given out) | new ids
            └────────── window ──────────┘     decode(window) = text given out before + new text + held tail

* a tail of U+FFFD may be the start of a character, so it is held until later bytes decide;
* a run of byte-fallback tokens (`<0xE2>`) is valid or invalid as a whole, so it is held until it ends;
* the window restarts behind its context only when nothing is held and the context has text, so that a leading space
  is cut from the context in both decodes and never from new text.

With `spaces_between_special_tokens=False` a special token right behind another one is written as its bare content, as in
vLLM, whatever the tokenizer would put between them; everything else stays the full decode.

An incomplete character at the very end (a sample cut by max_tokens) becomes U+FFFD in `flush()`, as in the full decode.
Each id is decoded at most three times; while a long tail stays undecided it is looked at again only when it has doubled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\ufffd"
_PATIENCE = 32  # undecided ids up to which every new id is tried at once


class Decoder:
    """What a tokenizer's decode needs to know once: shared by all samples of an engine."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer = tokenizer
        self._core = _plain_core(tokenizer)
        # Special tokens that a fast tokenizer leaves out; others decide inside decode().
        self.special_text = {i: token.content for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.byte_ids = frozenset(self._byte_fallback_ids())
        letter = tokenizer.encode("a", add_special_tokens=False)[-1:]
        self._letter = letter, self.decode(letter)

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        """`tokenizer.decode` without the clean-up of spaces, which would take back text that was given out."""
        if self._core is not None:
            return self._core.decode(ids, skip_special_tokens=skip_special_tokens)
        return str(
            self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
        )

    def token_text(self, token_id: int) -> str:
        """One token as it reads inside a text: a leading space stays, special tokens show, a part of a character is U+FFFD."""
        letter, text = self._letter
        return self.decode([*letter, token_id])[len(text) :]

    def _byte_fallback_ids(self) -> list[int]:
        vocab = self._tokenizer.get_vocab()
        return [vocab[name] for name in (f"<0x{byte:02X}>" for byte in range(256)) if name in vocab]


def _plain_core(tokenizer: PreTrainedTokenizerBase) -> Tokenizer | None:
    """The Rust tokenizer where transformers' decode does nothing but call it; six times faster to ask it directly."""
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    kind = type(tokenizer)
    plain = (
        isinstance(tokenizer, PreTrainedTokenizerFast)
        and kind.decode is PreTrainedTokenizerBase.decode
        and kind._decode is PreTrainedTokenizerFast._decode
    )
    return tokenizer.backend_tokenizer if plain else None


class Detokenizer:
    """The text of one sample."""

    def __init__(self, decoder: Decoder, skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True):
        self._decoder = decoder
        self._skip = skip_special_tokens
        self._join_special = not (skip_special_tokens or spaces_between_special_tokens)
        self._behind_special = False
        self._window: list[int] = []
        self._num_context = 0  # ids of the window whose text was all given out
        self._num_given = 0  # characters of decode(window) that were given out

    def push(self, token_id: int) -> str:
        """Text that became certain with this token; often the token's own, sometimes none or more."""
        special = token_id in self._decoder.special_text
        if self._skip and special:
            return ""
        joins, self._behind_special = special and self._behind_special, special
        if joins and self._join_special:
            return self._join(token_id)
        self._window.append(token_id)
        if token_id in self._decoder.byte_ids or not self._worth_trying():
            return ""
        text = self._decode(self._window)
        certain = text.rstrip(REPLACEMENT)
        piece = certain[self._num_given :]
        self._num_given = max(self._num_given, len(certain))
        if piece and len(certain) == len(text):
            self._restart()
        return piece

    def _join(self, token_id: int) -> str:
        """Give out what is held and the bare content of this special token, which becomes the context of what follows."""
        piece = self.flush() + self._decoder.special_text[token_id]
        self._window, self._num_context = [token_id], 1
        self._num_given = len(self._decode(self._window))
        return piece

    def pending(self) -> str:
        """What `flush()` would give now, without giving it."""
        return self._decode(self._window)[self._num_given :] if len(self._window) > self._num_context else ""

    def flush(self) -> str:
        """The held tail: the window is empty afterwards."""
        text = self.pending()
        self._window, self._num_context, self._num_given = [], 0, 0
        return text

    @property
    def in_byte_run(self) -> bool:
        """True while the newest token is a byte-fallback token, so that certain text may still be held."""
        return bool(self._window) and self._window[-1] in self._decoder.byte_ids

    def _worth_trying(self) -> bool:
        undecided = len(self._window) - self._num_context
        return undecided <= _PATIENCE or undecided & (undecided - 1) == 0

    def _restart(self) -> None:
        context = self._window[self._num_context :]
        text = self._decode(context)
        if text:
            self._window, self._num_context, self._num_given = context, len(context), len(text)

    def _decode(self, ids: list[int]) -> str:
        return self._decoder.decode(ids, self._skip)
