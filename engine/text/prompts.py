"""Prompts to token ids, one rule for every way in.

| prompt | becomes | special tokens |
|---|---|---|
| str | the tokenizer's ids | added: the tokenizer's BOS and what else it adds |
| token ids | themselves | none |
| chat messages | the chat template's text, then ids | none: the template writes its own |

Errors are raised here, in the caller's thread, before the engine sees the request.
"""

from __future__ import annotations

import numbers
import threading
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias, Unpack

from ..sampling.params import SamplingParams
from .chat import ChatOptions, Messages, render_chat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LABEL_LENGTH = 60
Prompt: TypeAlias = str | Sequence[int] | Messages


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    text: str | None  # None for token ids
    token_ids: list[int]
    label: str = ""  # its first words (a chat: of its last message), for the screen


class PromptEncoder:
    """Encodes for one engine; several threads may call it. `tokenizer` None takes token ids only."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int):
        self._tokenizer = tokenizer
        self.vocab_size = vocab_size
        self._lock = threading.Lock()  # a tokenizer may set its truncation while it encodes

    def encode(self, prompt: Prompt, **chat: Unpack[ChatOptions]) -> EncodedPrompt:
        """Raises TypeError for another kind of prompt or option, ValueError for one that is empty or out of vocabulary,
        and for an option of a chat beside a prompt that is none."""
        if unknown := sorted(chat.keys() - ChatOptions.__annotations__.keys()):
            raise TypeError(
                f"{unknown[0]}= is not known here: beside chat messages may stand {', '.join(ChatOptions.__annotations__)}; "
                f"how to sample is said by SamplingParams"
            )
        if is_conversation(prompt):
            return self._chat(prompt, chat)  # type: ignore[arg-type]
        if given := [name for name, value in chat.items() if value is not None]:
            raise ValueError(
                f"{given[0]}= is for chat messages, and this prompt is {'text' if isinstance(prompt, str) else 'token ids'}: "
                f"leave it out, or submit [{{'role': …, 'content': …}}]"
            )
        if isinstance(prompt, str):
            return self._text(prompt)
        return EncodedPrompt(None, self._ids(prompt))  # type: ignore[arg-type]

    def with_word_ids(self, params: SamplingParams) -> SamplingParams:
        """The same params with every bad word as token ids: as it stands at the start of a text, and behind a space. The
        engine's core knows no text. Raises ValueError for a word where there is no tokenizer."""
        if not any(isinstance(word, str) for word in params.bad_words):
            return params
        words: dict[tuple[int, ...], None] = {}  # an ordered set
        for word in params.bad_words:
            if isinstance(word, str):
                words.update(dict.fromkeys(self._word_ids(word.lstrip()) + self._word_ids(" " + word.lstrip())))
            else:
                words[tuple(word)] = None
        return replace(params, bad_words=tuple(words))

    def _word_ids(self, word: str) -> list[tuple[int, ...]]:
        """Its ids, in a list; an empty one where an id has no logit, so that the word cannot come."""
        tokenizer = self._require("a word in bad_words")
        with self._lock:
            ids = tokenizer(word, add_special_tokens=False, verbose=False)["input_ids"]
        return [tuple(ids)] if ids and max(ids) < self.vocab_size else []

    def _text(self, prompt: str) -> EncodedPrompt:
        if not prompt:
            raise ValueError("prompt='': must not be empty")
        ids = self._tokenize(prompt, add_special_tokens=True)
        bos = getattr(self._tokenizer, "bos_token_id", None)
        if bos is not None and ids[:2] == [bos, bos]:
            warnings.warn(
                f"the prompt begins with {self._tokenizer.bos_token!r} and the tokenizer adds another; "  # type: ignore[union-attr]
                f"leave it out of the text, or submit token ids",
                stacklevel=4,
            )
        return EncodedPrompt(prompt, ids, _first_words(prompt))

    def _chat(self, messages: Messages, options: ChatOptions) -> EncodedPrompt:
        text = render_chat(self._require("chat messages"), messages, **options)
        last = messages[-1].get("content")
        label = _first_words(last if isinstance(last, str) else text)
        return EncodedPrompt(text, self._tokenize(text, add_special_tokens=False), label)

    def _tokenize(self, text: str, *, add_special_tokens: bool) -> list[int]:
        tokenizer = self._require("a text prompt")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"prompt holds {text[error.start]!r} at position {error.start}: half of a surrogate pair is no "
                f"character; text read with errors='replace' has none"
            ) from None
        with self._lock:
            ids = tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
        if not ids:
            raise ValueError(f"prompt={text[:40]!r}: the tokenizer makes no tokens of it")
        return self._in_vocabulary(list(ids))

    def _ids(self, prompt: Sequence[int]) -> list[int]:
        values = prompt.tolist() if hasattr(prompt, "tolist") else prompt
        if not isinstance(values, list | tuple):
            raise TypeError(
                f"prompt of type {type(prompt).__name__}: must be a string, a list of token ids, or a list of chat "
                f"messages {{'role': …, 'content': …}}"
            )
        if not values:
            raise ValueError("prompt=[]: must hold at least one token id")
        for value in values:
            if not isinstance(value, numbers.Integral) or isinstance(value, bool):
                raise TypeError(f"prompt holds {value!r}: token ids must be integers")
        return self._in_vocabulary([int(value) for value in values])

    def _in_vocabulary(self, ids: list[int]) -> list[int]:
        for token_id in (min(ids), max(ids)):
            if not 0 <= token_id < self.vocab_size:
                raise ValueError(f"prompt holds token id {token_id}: must be from 0 to {self.vocab_size - 1}")
        return ids

    def _require(self, what: str) -> PreTrainedTokenizerBase:
        if self._tokenizer is None:
            raise ValueError(
                f"this model has no tokenizer, so {what} cannot be read; submit token ids, or set tokenizer="
            )
        return self._tokenizer


def _first_words(text: str) -> str:
    words = " ".join(text[:200].split())
    return words if len(words) <= LABEL_LENGTH else words[: LABEL_LENGTH - 1] + "…"


def is_conversation(prompt: object) -> bool:
    """True for a list whose items are all messages (mappings)."""
    return isinstance(prompt, list | tuple) and bool(prompt) and all(isinstance(m, Mapping) for m in prompt)


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """The prompts of a batch call: one string, one list of token ids or one conversation is a batch of one."""
    if isinstance(prompts, str) or is_conversation(prompts):
        return [prompts]  # type: ignore[list-item]
    if hasattr(prompts, "tolist"):
        prompts = prompts.tolist()
    if not isinstance(prompts, Sequence):
        raise TypeError(f"prompts of type {type(prompts).__name__}: must be a prompt or a list of prompts")
    items = list(prompts)
    if items and all(isinstance(item, numbers.Integral) for item in items):
        return [prompts]  # type: ignore[list-item]
    return items  # type: ignore[return-value]
