"""`SamplingParams`: how one request wants its tokens chosen. vLLM's field names and meanings."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Validated once, here; a wrong value is a ValueError that names the field, the value and the limit.

    n                           samples; n > 1 needs a temperature above 0
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
    skip_special_tokens         special tokens make no text
    """

    n: int = 1
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
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        for name, least, limit in _INTEGERS:
            self._set(name, _integer(name, getattr(self, name), least, limit))
        for name, test, limit in _REALS:
            self._set(name, _real(name, getattr(self, name), test, limit))
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            _require(isinstance(getattr(self, name), bool), name, getattr(self, name), "True or False")
        self._set("stop", _strings(self.stop))
        self._set("stop_token_ids", _token_ids(self.stop_token_ids))
        _require(self.n <= 64, "n", self.n, "an integer from 1 to 64")
        _require(self.logprobs is None or self.logprobs <= 20, "logprobs", self.logprobs, "from 0 to 20, or None")
        if self.max_tokens is not None:
            limit = f"at most max_tokens ({self.max_tokens})"
            _require(self.min_tokens <= self.max_tokens, "min_tokens", self.min_tokens, limit)
        limit = "1 when temperature is 0: all samples would be the same"
        _require(self.n == 1 or self.temperature > 0, "n", self.n, limit)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


# field, least value (None: any), what it must be; a field whose default is None may be None
_INTEGERS: tuple[tuple[str, int | None, str], ...] = (
    ("n", 1, "an integer from 1 to 64"),
    ("top_k", -1, "-1 (off), 0 (off) or more"),
    ("seed", None, "an integer or None"),
    ("max_tokens", 1, "1 or more, or None"),
    ("min_tokens", 0, "0 or more"),
    ("logprobs", 0, "from 0 to 20, or None"),
)
_REALS: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    ("temperature", lambda value: value >= 0, "0 or more"),
    ("top_p", lambda value: 0 < value <= 1, "above 0 and at most 1"),
    ("min_p", lambda value: 0 <= value <= 1, "from 0 to 1"),
)


def _integer(field: str, value: Any, least: int | None, limit: str) -> int | None:
    """A plain int, numpy's accepted, True and 2.0 not; None where the field may be None."""
    if value is None and limit.endswith("None"):
        return None
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    _require(whole and (least is None or int(value) >= least), field, value, limit)
    return int(value)


def _real(field: str, value: Any, test: Callable[[float], bool], limit: str) -> float:
    real = isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
    _require(real and test(value), field, value, limit)
    return float(value)


def _strings(stop: Any) -> tuple[str, ...]:
    values = (stop,) if isinstance(stop, str) else () if stop is None else stop
    fine = isinstance(values, list | tuple) and all(isinstance(s, str) and s for s in values)
    _require(fine, "stop", stop, "a string or a list of strings that are not empty")
    return tuple(values)


def _token_ids(ids: Any) -> tuple[int, ...]:
    values = () if ids is None else ids
    fine = isinstance(values, list | tuple | set | frozenset) and all(
        isinstance(t, numbers.Integral) and not isinstance(t, bool) and int(t) >= 0 for t in values
    )
    _require(fine, "stop_token_ids", ids, "a list of token ids, 0 or more")
    return tuple(int(t) for t in values)


def _require(ok: bool, field: str, value: object, limit: str) -> None:
    if not ok:
        raise ValueError(f"{field}={value!r}: must be {limit}")
