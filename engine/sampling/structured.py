"""Structured output: which tokens may come next so that the whole text is what a schema, a pattern or a grammar describes.

    StructuredOutputsParams ──GrammarCompiler, at submit──▶ Grammar ──start(), once a sample──▶ Matcher
                                                                       allowed(output so far) ──▶ a mask over the vocabulary

Parsing is llguidance's: masks are computed from the parser's state while it runs, so a grammar is ready in milliseconds
and nothing is compiled in a step. A matcher follows its sample by the sample's ids alone: it reads what it has not read
yet, so it need not know of preemption or of n. EOS is allowed exactly where the text may end, and alone where it must.

Needs the extra `kvscope[structured]`; importing this file does not. Knows no request and no logits.
"""

from __future__ import annotations

import importlib
import json
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_GRAMMARS = 64  # that a compiler keeps
_FORMATS = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}  # ours -> llguidance's


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """What the text must be: exactly one of these. A wrong one is a ValueError when the request is submitted.

    json        a JSON schema, as a dict or as JSON text
    regex       a regular expression that the whole text matches; no look-around
    choice      a list of strings, one of which is the text
    grammar     a context-free grammar in Lark's syntax (`start: …`) or in GBNF (`root ::= …`)
    """

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    compiled: Grammar | None = None  # filled by the engine at submit; not an option

    def __post_init__(self) -> None:
        given = [kind for kind in _FORMATS if getattr(self, kind) is not None]
        if len(given) != 1:
            raise ValueError(
                f"structured_outputs has {', '.join(given) or 'nothing'}: must have one of {', '.join(_FORMATS)}"
            )
        value = getattr(self, given[0])
        if given[0] == "choice":
            fine = isinstance(value, list | tuple) and bool(value) and all(isinstance(c, str) and c for c in value)
            limit = "a list of strings that are not empty"
        elif given[0] == "json":
            fine, limit = isinstance(value, dict | str) and bool(value), "a JSON schema: a dict, or its JSON text"
        else:
            fine, limit = isinstance(value, str) and bool(value), "a string that is not empty"
        if not fine:
            raise ValueError(f"structured_outputs.{given[0]}={value!r}: must be {limit}")

    @property
    def kind(self) -> str:
        """Which one it has: "json" | "regex" | "choice" | "grammar"."""
        return next(kind for kind in _FORMATS if getattr(self, kind) is not None)

    @property
    def text(self) -> str:
        """It as text; equal texts of a kind mean the same."""
        value = getattr(self, self.kind)
        return value if isinstance(value, str) else json.dumps(value, default=_not_json)

    def __hash__(self) -> int:
        return hash((self.kind, self.text))


def _not_json(value: object) -> None:
    raise ValueError(f"structured_outputs.json holds {value!r}, which is no JSON")


class GrammarCompiler:
    """For one engine; several threads may call it. The tokenizer's bytes are read with the first grammar (half a second
    for 50,000 tokens), in the thread that submits it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, eos_token_ids: Iterable[int]):
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._lock = threading.Lock()
        self._vocabulary: Any = None  # llguidance's LLTokenizer
        self._grammars: OrderedDict[tuple[str, str], Grammar] = OrderedDict()  # the latest used last

    def compile(self, params: StructuredOutputsParams) -> StructuredOutputsParams:
        """The same params with `compiled`. ValueError for what is no schema, pattern or grammar, ImportError without
        llguidance."""
        key = (params.kind, params.text)
        with self._lock:
            if key not in self._grammars:
                self._grammars[key] = self._compile(*key)
            self._grammars.move_to_end(key)
            while len(self._grammars) > MAX_GRAMMARS:
                self._grammars.popitem(last=False)
            return replace(params, compiled=self._grammars[key])

    def _compile(self, kind: str, text: str) -> Grammar:
        library = _library()
        if self._vocabulary is None:
            self._vocabulary = self._read_vocabulary()
        try:
            grammar = library.grammar_from(_FORMATS[kind], text)
            is_error, messages = library.LLMatcher.validate_grammar_with_warnings(grammar, self._vocabulary)
        except ValueError as error:
            is_error, messages = True, [str(error)]
        if is_error:
            raise ValueError(f"structured_outputs.{kind}={_short(text)}: {_one_line(messages[0])}")
        return Grammar(library.LLMatcher(self._vocabulary, grammar, log_level=0), self._vocab_size)

    def _read_vocabulary(self) -> Any:
        if self._tokenizer is None:
            raise ValueError("structured_outputs needs a tokenizer, and this model has none; set tokenizer=")
        if not self._eos_token_ids:
            raise ValueError("structured_outputs needs an end-of-sequence token, and this model has none")
        wrapper = importlib.import_module("llguidance.hf")
        size = max(self._vocab_size, len(self._tokenizer))
        try:
            return wrapper.from_tokenizer(self._tokenizer, n_vocab=size, eos_token=self._eos_token_ids)
        except Exception as error:  # the library raises many kinds; all of them mean the same here
            raise ValueError(f"structured_outputs: this tokenizer cannot be used: {_one_line(str(error))}") from error


class Grammar:
    """A grammar over one vocabulary, ready to use; never changes."""

    def __init__(self, matcher: Any, vocab_size: int):
        self._matcher = matcher  # llguidance's LLMatcher, at the start
        self._vocab_size = vocab_size

    def start(self) -> Matcher:
        """A matcher for one more sample."""
        return Matcher(self._matcher.deep_copy(), self._vocab_size)


class Matcher:
    """Where one sample stands in its grammar."""

    def __init__(self, matcher: Any, vocab_size: int):
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._num_read = 0

    def allowed(self, output: Sequence[int]) -> np.ndarray:
        """Which tokens may follow `output`, all ids of the sample so far: bool [vocab]. Nothing may where the grammar has
        become too complex to go on."""
        for token_id in output[self._num_read :]:
            self._matcher.consume_token(token_id)
        self._num_read = len(output)
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)  # a bit for each token
        if self._matcher.is_error():
            return np.zeros(self._vocab_size, bool)
        return np.unpackbits(mask, count=self._vocab_size, bitorder="little").view(bool)

    @property
    def is_complete(self) -> bool:
        """The text is whole: nothing but EOS may follow what was read."""
        return self._matcher.is_stopped()


def _library() -> Any:
    try:
        return importlib.import_module("llguidance")
    except ImportError:
        raise ImportError('structured_outputs needs llguidance: pip install "kvscope[structured]"') from None


def _one_line(message: str) -> str:
    return " ".join(message.split())


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:59] + "…")
