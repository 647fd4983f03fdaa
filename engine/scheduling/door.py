"""What is refused when it is added: a request that can never be served, or one more than the queue may hold.

The room of a request is the smaller of the model's context and the pool. The KV of the last token is never written, so
a pool of B blocks of S tokens has room for B·S + 1 tokens. `max_tokens=None` means the room that the prompt leaves; an
explicit `max_tokens` that does not fit is refused, not cut: whoever names a number gets it or a sentence with both
numbers. Of a KV group with a window a request holds a bounded number of blocks, however long it is. n samples are not
counted n times: they are preempted one by one, so the oldest always has the pool; where memory is reserved, each needs a
piece of its own from the start, and all of them must fit. Beams advance together, so all of them
must fit at once, and what they surely share is the prompt.
"""

from __future__ import annotations

import math
import numbers
from bisect import bisect_right
from collections.abc import Collection

from ..config import EngineConfig, is_integer
from ..events import Cause
from ..kvcache.block_table import BlockTables
from ..request import RequestRefused
from ..sampling.beam_search import BeamSearchParams
from ..sampling.params import SamplingParams
from .queue import WaitingQueue


class Door:
    """Checks requests against `config` (num_blocks and max_model_len resolved) for a model of `vocab_size` token ids, and
    against what `tables` can give one of them."""

    def __init__(self, config: EngineConfig, *, vocab_size: int, tables: BlockTables):
        self.config = config
        self.vocab_size = vocab_size
        self.tables = tables

    def check(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        deadline: float | None = None,
        waited: float = 0.0,
    ) -> int:
        """The request's max_tokens as a number. Raises RequestRefused when it can never be served. `deadline` is in seconds from
        arrival, since when `waited` seconds have passed."""
        if not is_integer(priority):
            raise RequestRefused(f"priority={priority!r}: must be an integer, and the lowest goes first", Cause.INVALID)
        if priority and not self.config.heeds_priority:
            raise RequestRefused(
                f"priority={priority}: nothing looks at it; the engine needs scheduling_policy='priority', "
                f"eviction_policy='priority' or preemption_victim='lowest-priority'",
                Cause.INVALID,
            )
        self._check_deadline(deadline, waited)
        num_prompt = len(prompt_token_ids)
        if not num_prompt:
            raise RequestRefused("prompt_token_ids is empty: at least 1 token is needed", Cause.INVALID, 1, 0)
        self._check_ids("prompt_token_ids", prompt_token_ids)
        self._check_ids("stop_token_ids", params.stop_token_ids)
        self._check_ids("allowed_token_ids", params.allowed_token_ids or ())
        self._check_ids("logit_bias", params.logit_bias or ())
        self._check_ids("bad_words", [token_id for word in params.bad_words for token_id in word])
        if params.structured_outputs is not None and params.structured_outputs.compiled is None:
            raise RequestRefused(
                "structured_outputs is not compiled: that needs a tokenizer, so Engine does it", Cause.INVALID
            )
        self._check_together(params)
        self._check_context(num_prompt, params)
        self._check_pool(num_prompt, params)
        max_tokens = params.max_tokens or self._room(num_prompt, params)
        if params.min_tokens > max_tokens:
            raise RequestRefused(
                f"min_tokens={params.min_tokens}: the prompt of {num_prompt} tokens leaves room for {max_tokens}",
                Cause.CONTEXT_TOO_LONG, params.min_tokens, max_tokens,
            )  # fmt: skip
        return max_tokens

    @staticmethod
    def _check_deadline(deadline: float | None, waited: float) -> None:
        if deadline is None:
            return
        if isinstance(deadline, bool) or not isinstance(deadline, numbers.Real) or not 0 < deadline < math.inf:
            raise RequestRefused(f"deadline={deadline!r}: must be more than 0 seconds from arrival", Cause.INVALID)
        if deadline <= waited:
            raise RequestRefused(
                f"deadline={deadline:g}: {waited:.3g} seconds have passed since the request arrived", Cause.DEADLINE
            )

    def _check_together(self, params: SamplingParams) -> None:
        is_search = isinstance(params, BeamSearchParams)
        if is_search and not self.tables.shares:
            raise RequestRefused(
                f"beam search forks in every step, and kv_allocator={self.config.kv_allocator!r} shares nothing: it needs "
                f"kv_allocator='paged'",
                Cause.INVALID,
            )
        for limit in ("max_num_seqs", "max_num_batched_tokens") if is_search else ("max_num_seqs",):
            most = getattr(self.config, limit)
            if params.n > most:
                who = f"beam_width={params.n}: all beams" if is_search else f"n={params.n}: all samples"
                raise RequestRefused(f"{who} run together, and {limit} allows {most}", Cause.INVALID, params.n, most)

    def _room(self, num_prompt: int, params: SamplingParams) -> int:
        """The longest output that this prompt leaves room for, at least 1."""
        outputs = range(1, self.config.max_model_len - num_prompt + 1)
        return bisect_right(outputs, self.tables.most_for_one, key=lambda n: self._blocks(num_prompt, n, params))

    def _blocks(self, num_prompt: int, max_tokens: int, params: SamplingParams) -> int:
        """The most blocks that must be had at once: for one sample, but for all beams."""
        if isinstance(params, BeamSearchParams):
            return self.tables.blocks_for_beams(num_prompt, num_prompt + max_tokens - 1, params.n)
        return self.tables.needs(num_prompt, max_tokens)

    def _check_ids(self, field: str, token_ids: Collection[int]) -> None:
        if not token_ids:
            return
        low, high = min(token_ids), max(token_ids)
        if low < 0 or high >= self.vocab_size:
            bad = low if low < 0 else high
            raise RequestRefused(
                f"{field} holds {bad}: the model's token ids go from 0 to {self.vocab_size - 1}",
                Cause.INVALID, bad, self.vocab_size - 1,
            )  # fmt: skip

    def _check_context(self, num_prompt: int, params: SamplingParams) -> None:
        limit, needed = self.config.max_model_len, num_prompt + (params.max_tokens or 1)
        if needed > limit:
            raise RequestRefused(
                f"{_what(num_prompt, params)} {needed} tokens, max_model_len is {limit}",
                Cause.CONTEXT_TOO_LONG, needed, limit,
            )  # fmt: skip

    def _check_pool(self, num_prompt: int, params: SamplingParams) -> None:
        needed, most = self._blocks(num_prompt, params.max_tokens or 1, params), self.tables.most_for_one
        if needed > most:
            raise RequestRefused(
                f"{_what(num_prompt, params)} {needed} blocks of {self.config.block_words} tokens, {self.tables.limit_words} {most}",
                Cause.POOL_TOO_SMALL, needed, most,
            )  # fmt: skip
        if not self.tables.shares and params.n > (runs := self.tables.most_samples(num_prompt, params.max_tokens or 1)):
            raise RequestRefused(
                f"n={params.n}: each sample reserves a piece of {needed} blocks from the start, and the pool has room for {runs}",
                Cause.POOL_TOO_SMALL, params.n, runs,
            )  # fmt: skip

    def check_queue(
        self, line: WaitingQueue, num_prompt: int, now: float, *, coming: int = 0, coming_tokens: int = 0
    ) -> None:
        """Raises RequestRefused, with a retry hint in seconds, when the line is full. `coming` requests with
        `coming_tokens` prompt tokens are on their way to the line and count as if they stood in it."""
        config, waiting, tokens = self.config, coming + line.num_fresh, coming_tokens + line.num_prompt_tokens
        retry_after = line.seconds_per_admission(now)
        hint = f"try again in {max(1, round(retry_after))} s"
        if waiting >= config.max_waiting_requests:
            raise RequestRefused(
                f"{waiting} requests are waiting, max_waiting_requests is {config.max_waiting_requests}: {hint}",
                Cause.QUEUE_FULL, waiting + 1, config.max_waiting_requests, retry_after,
            )  # fmt: skip
        if waiting and tokens + num_prompt > config.max_waiting_tokens:
            raise RequestRefused(
                f"{tokens} prompt tokens are waiting and this request adds {num_prompt}, max_waiting_tokens is "
                f"{config.max_waiting_tokens}: {hint}",
                Cause.QUEUE_FULL, tokens + num_prompt, config.max_waiting_tokens, retry_after,
            )  # fmt: skip


def _what(num_prompt: int, params: SamplingParams) -> str:
    tokens = "1 token" if num_prompt == 1 else f"{num_prompt} tokens"
    if isinstance(params, BeamSearchParams):
        tokens += f" with beam_width={params.n}"
    if params.max_tokens is None:
        return f"a prompt of {tokens} and one more to generate need"
    return f"a prompt of {tokens} and max_tokens={params.max_tokens} need"
