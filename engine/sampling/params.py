"""`SamplingParams`: how one request wants its tokens chosen. vLLM's field names and meanings."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ..config import is_integer
from .structured import StructuredOutputsParams

MAX_LOGPROBS = 20
MAX_BIAS = 100.0
MAX_SAMPLES = 64


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Validated once, here; a wrong value is a ValueError that names the field, the value and the limit.

    n                           samples; n > 1 needs a temperature above 0
    presence_penalty            taken off the logit of every token that the output holds; below 0 it is favoured
    frequency_penalty           taken off once for every time that the output holds the token
    repetition_penalty          of every token of prompt or output a logit above 0 is divided by this, one below
                                multiplied; 1.0 is off
    temperature                 0 is greedy
    top_k, top_p, min_p         filters, in this order; top_k 0 or −1, top_p 1.0 and min_p 0.0 are off
    seed                        makes each sample reproducible: sample i draws token t from (seed, i, t), whatever else
                                is in the batch; None: from the engine's seed and the request id
    stop                        strings that end the text, before the match unless include_stop_str_in_output
    stop_token_ids              ids that end a sample; the id stays in token_ids, its text shows only with
                                include_stop_str_in_output
    ignore_eos                  EOS ids (of tokenizer, config and generation_config) do not end a sample
    max_tokens                  None: the room that is left, the smaller of the model's context and the pool
    min_tokens                  up to here no EOS or stop id can be chosen, also with ignore_eos, and no stop string counts
    logprobs                    log-probabilities of this many best tokens and of the chosen one, at most 20
    prompt_logprobs             the same for every prompt token but the first, whatever logprobs_mode says of the raw
                                logits; the prompt is computed whole, not read from the prefix cache
    detokenize                  False: token ids only, no text and no stop strings
    skip_special_tokens         special tokens make no text
    spaces_between_special_tokens  False: special tokens that follow each other stand without a space between them
    logit_bias                  {token id: added to its logit}, from −100 to 100
    allowed_token_ids           only these can be chosen; None: all
    bad_words                   words that are not spelled in their usual tokens, neither bare nor behind a space: the last
                                token cannot be chosen behind the others. A word may also be given as its token ids
    structured_outputs          a StructuredOutputsParams: the text follows a JSON schema, a pattern or a grammar. It ends where
                                that ends, also below min_tokens
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: Sequence[str] | str = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    max_tokens: int | None = None
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str | Sequence[int]] = ()
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        for name, least, limit in _INTEGERS:
            self._set(name, _integer(name, getattr(self, name), least, limit))
        for name, test, limit in _REALS:
            self._set(name, _real(name, getattr(self, name), test, limit))
        for name in _FLAGS:
            _require(isinstance(getattr(self, name), bool), name, getattr(self, name), "True or False")
        self._set("stop", _strings(self.stop))
        self._set("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        self._set("logit_bias", _biases(self.logit_bias))
        if self.allowed_token_ids is not None:
            self._set("allowed_token_ids", _token_ids("allowed_token_ids", self.allowed_token_ids))
            _require(bool(self.allowed_token_ids), "allowed_token_ids", (), "a list of at least one token id, or None")
        self._set("bad_words", _bad_words(self.bad_words))
        _require(self.n <= MAX_SAMPLES, "n", self.n, f"an integer from 1 to {MAX_SAMPLES}")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _require(value is None or value <= MAX_LOGPROBS, name, value, _LOGPROBS)
        limit = "empty when detokenize is False: stop strings are found in text"
        _require(self.detokenize or not self.stop, "stop", self.stop, limit)
        if self.max_tokens is not None:
            limit = f"at most max_tokens ({self.max_tokens})"
            _require(self.min_tokens <= self.max_tokens, "min_tokens", self.min_tokens, limit)
        structure = self.structured_outputs
        limit = "a StructuredOutputsParams, or None"
        _require(
            structure is None or isinstance(structure, StructuredOutputsParams), "structured_outputs", structure, limit
        )
        limit = "False with structured_outputs: only an end-of-sequence token ends them"
        _require(structure is None or not self.ignore_eos, "ignore_eos", self.ignore_eos, limit)
        limit = "1 when temperature is 0: all samples would be the same"
        _require(self.n == 1 or self.temperature > 0, "n", self.n, limit)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @cached_property
    def has_penalties(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    @cached_property
    def shapes_logits(self) -> bool:
        """Whether anything but the ends masked by min_tokens changes the logits before temperature and filters."""
        masks = self.structured_outputs or self.allowed_token_ids or self.bad_words
        return bool(self.has_penalties or self.logit_bias or masks)


_FLAGS = (
    "ignore_eos",
    "include_stop_str_in_output",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)
_LOGPROBS = f"from 0 to {MAX_LOGPROBS}, or None"
# field, least value (None: any), what it must be; a field whose default is None may be None
_INTEGERS: tuple[tuple[str, int | None, str], ...] = (
    ("n", 1, f"an integer from 1 to {MAX_SAMPLES}"),
    ("top_k", -1, "-1 (off), 0 (off) or more"),
    ("seed", None, "an integer or None"),
    ("max_tokens", 1, "1 or more, or None"),
    ("min_tokens", 0, "0 or more"),
    ("logprobs", 0, _LOGPROBS),
    ("prompt_logprobs", 0, _LOGPROBS),
)
_REALS: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    ("presence_penalty", lambda value: -2 <= value <= 2, "from -2 to 2"),
    ("frequency_penalty", lambda value: -2 <= value <= 2, "from -2 to 2"),
    ("repetition_penalty", lambda value: value > 0, "above 0"),
    ("temperature", lambda value: value >= 0, "0 or more"),
    ("top_p", lambda value: 0 < value <= 1, "above 0 and at most 1"),
    ("min_p", lambda value: 0 <= value <= 1, "from 0 to 1"),
)


def _integer(field: str, value: Any, least: int | None, limit: str) -> int | None:
    """A plain int, numpy's accepted, True and 2.0 not; None where the field may be None."""
    if value is None and limit.endswith("None"):
        return None
    _require(is_integer(value) and (least is None or int(value) >= least), field, value, limit)
    return int(value)


def _real(field: str, value: Any, test: Callable[[float], bool], limit: str) -> float:
    _require(isinstance(value, numbers.Real) and not isinstance(value, bool), field, value, limit)
    try:
        number = float(value)
    except OverflowError:  # an integer or a fraction beyond all floats
        number = math.inf
    _require(math.isfinite(number) and test(number), field, value, limit)
    return number


def _strings(stop: Any) -> tuple[str, ...]:
    values = (stop,) if isinstance(stop, str) else () if stop is None else stop
    fine = isinstance(values, list | tuple) and all(isinstance(s, str) and s for s in values)
    _require(fine, "stop", stop, "a string or a list of strings that are not empty")
    return tuple(values)


def _token_ids(field: str, ids: Any) -> tuple[int, ...]:
    values = () if ids is None else ids
    fine = isinstance(values, list | tuple | set | frozenset) and all(map(_is_token_id, values))
    _require(fine, field, ids, "a list of token ids, 0 or more")
    return tuple(int(t) for t in values)


def _is_token_id(value: Any) -> bool:
    return is_integer(value) and int(value) >= 0


def _biases(biases: Any) -> dict[int, float] | None:
    if biases is None:
        return None
    limit = f"a dict from token ids, 0 or more, to biases from {-MAX_BIAS:g} to {MAX_BIAS:g}, or None"
    fine = isinstance(biases, Mapping) and all(
        _is_token_id(token)
        and isinstance(bias, numbers.Real)
        and not isinstance(bias, bool)
        and -MAX_BIAS <= bias <= MAX_BIAS
        for token, bias in biases.items()
    )
    _require(fine, "logit_bias", biases, limit)
    return {int(token): float(bias) for token, bias in biases.items()}


def _bad_words(words: Any) -> tuple[str | tuple[int, ...], ...]:
    values = () if words is None else words
    fine = isinstance(values, list | tuple) and all(
        bool(word.strip()) if isinstance(word, str) else _is_sequence(word) for word in values
    )
    _require(fine, "bad_words", words, "a list of words that are not blank; a word may be a list of its token ids")
    return tuple(word if isinstance(word, str) else tuple(int(t) for t in word) for word in values)


def _is_sequence(word: Any) -> bool:
    return isinstance(word, list | tuple) and bool(word) and all(map(_is_token_id, word))


def _require(ok: bool, field: str, value: object, limit: str) -> None:
    if not ok:
        raise ValueError(f"{field}={value!r}: must be {limit}")
