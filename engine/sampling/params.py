"""`SamplingParams`: how one request wants its tokens chosen. vLLM's field names and meanings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Validated once, here; a wrong value is a ValueError that names the field, the value and the limit.

    temperature 0 is greedy. `top_k` 0 or −1 and `top_p` 1.0 mean off. `max_tokens` None means the room that is
    left: the smaller of the model's context and the pool. `seed` makes each sample reproducible; sample i of a
    request draws from (seed, i, token index), whatever else is in the batch. `stop` strings end the text before
    the match (`include_stop_str_in_output` keeps it); `min_tokens` masks every EOS and stop id until then, also
    with `ignore_eos`.
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

    def __post_init__(self):
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        _require(isinstance(self.n, int) and 1 <= self.n <= 64, "n", self.n, "an integer from 1 to 64")
        _require(_finite(self.temperature) and self.temperature >= 0, "temperature", self.temperature, "0 or more")
        _require(_finite(self.top_p) and 0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1")
        _require(isinstance(self.top_k, int) and self.top_k >= -1, "top_k", self.top_k, "-1 (off), 0 (off) or more")
        _require(_finite(self.min_p) and 0 <= self.min_p <= 1, "min_p", self.min_p, "from 0 to 1")
        _require(self.seed is None or isinstance(self.seed, int), "seed", self.seed, "an integer or None")
        _require(
            self.max_tokens is None or (isinstance(self.max_tokens, int) and self.max_tokens >= 1),
            "max_tokens", self.max_tokens, "1 or more, or None",
        )  # fmt: skip
        _require(
            isinstance(self.min_tokens, int) and self.min_tokens >= 0,
            "min_tokens",
            self.min_tokens,
            "0 or more",
        )
        _require(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            "min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})",
        )  # fmt: skip
        _require(
            self.logprobs is None or (isinstance(self.logprobs, int) and 0 <= self.logprobs <= 20),
            "logprobs", self.logprobs, "from 0 to 20, or None",
        )  # fmt: skip
        _require(all(isinstance(s, str) and s for s in stop), "stop", stop, "strings that are not empty")
        _require(
            all(isinstance(t, int) and t >= 0 for t in self.stop_token_ids),
            "stop_token_ids", self.stop_token_ids, "token ids, 0 or more",
        )  # fmt: skip
        _require(
            self.n == 1 or self.temperature > 0,
            "n",
            self.n,
            "1 when temperature is 0: all samples would be the same",
        )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def _finite(value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _require(ok: bool, field: str, value, limit: str) -> None:
    if not ok:
        raise ValueError(f"{field}={value!r}: must be {limit}")
