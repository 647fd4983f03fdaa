"""A request, its samples, and the little state machine that each sample goes through.

A `Request` is what a user asked for; a `Sequence` is one sample of it and the thing that is scheduled. A request
starts as one sequence, child 0; when its prompt is computed and n > 1 it forks into n.

    waiting ──admitted──▶ running ──▶ finished | cancelled | failed
                          │     ▲
                  preempted ────┘ resumed: prompt and output so far are computed again

A sequence has no prefill or decode mode. One integer, `num_computed_tokens`, says how far its KV reaches, and each step
gives it tokens so that it catches up with `num_tokens`. Knows no block pool and no scheduler.
"""

from __future__ import annotations

from array import array
from enum import StrEnum
from typing import TYPE_CHECKING

from .blocked import Blocked
from .events import Cause
from .outputs import RequestMetrics
from .sampling.beam_search import BeamSearch, BeamSearchParams, common_prefix
from .sampling.params import SamplingParams

if TYPE_CHECKING:
    from .kvcache.prefix_cache import ExtraKeys, Text

_FINISH_REASONS = {
    Cause.EOS: "stop",
    Cause.STOP_TOKEN: "stop",
    Cause.STOP_STRING: "stop",
    Cause.LENGTH: "length",
    Cause.CANCELLED: "cancelled",
    Cause.FAILED: "error",
}


class RequestStatus(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"

    @property
    def is_waiting(self) -> bool:
        """In the line: it never ran, or it lost its blocks."""
        return self in (RequestStatus.WAITING, RequestStatus.PREEMPTED)

    @property
    def is_over(self) -> bool:
        return self in (RequestStatus.FINISHED, RequestStatus.CANCELLED, RequestStatus.FAILED)


class RequestRefused(ValueError):
    """A request that was not taken. `cause`, `needed` and `available` are the numbers of the sentence; `retry_after` is
    in seconds, None where asking again cannot help."""

    def __init__(
        self, sentence: str, cause: Cause, needed: int = 0, available: int = 0, retry_after: float | None = None
    ):
        super().__init__(sentence)
        self.cause = cause
        self.needed = needed
        self.available = available
        self.retry_after = retry_after


class Sequence:
    """One sample of a request. `token_ids` holds prompt and output; the KV of its first `num_computed_tokens` is in
    the blocks of `block_tables` (one table per KV group; the null block stands where nothing is read any more)."""

    __slots__ = (
        "block_tables",
        "blocked",
        "child",
        "cumulative_logprob",
        "finish_cause",
        "last_token_time",
        "logprobs",
        "matcher",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_preemptions",
        "num_times_passed",
        "prefill_end",
        "request",
        "status",
        "stop_reason",
        "text",
        "token_ids",
        "waiting_since_step",
    )

    def __init__(self, request: Request, child: int, token_ids: array, num_groups: int):
        self.request = request
        self.child = child
        self.token_ids = token_ids  # int64
        self.status = RequestStatus.WAITING
        self.num_computed_tokens = 0
        self.prefill_end = len(token_ids)  # tokens it had when it was admitted: below it is prefill, from it on decode
        self.num_cached_tokens = 0  # found in the prefix cache at the latest admission
        self.num_preemptions = 0
        self.num_times_passed = 0  # younger ones that were admitted while it waited at the head
        self.block_tables: tuple[array, ...] = tuple(array("i") for _ in range(num_groups))
        self.text: Text | None = None  # what the prefix cache has of it on record
        self.logprobs: list[dict[int, float]] | None = None if request.params.logprobs is None else []
        structure = request.params.structured_outputs
        self.matcher = None if structure is None or structure.compiled is None else structure.compiled.start()
        self.cumulative_logprob = 0.0
        self.finish_cause = Cause.NONE
        self.stop_reason: int | str | None = None
        self.blocked: Blocked | None = None
        self.waiting_since_step = 0
        self.last_token_time = 0.0  # seconds, time.monotonic()

    def __repr__(self) -> str:
        return f"<Sequence {self.request.id}.{self.child} {self.status} {self.num_computed_tokens}/{self.num_tokens}>"

    @property
    def key(self) -> tuple[int, int]:
        """Its place in the order of arrival: lower is older, and older goes first."""
        return (self.request.id, self.child)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.request.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.request.num_prompt_tokens :].tolist()

    @property
    def is_prefill(self) -> bool:
        """Does it still compute what it was admitted with (a resumed one: prompt and earlier output)?"""
        return self.num_computed_tokens < self.prefill_end

    @property
    def num_seats(self) -> int:
        """Places of max_num_seqs that it needs: n for a request that has yet to fork. The first beam keeps the places of
        those that are yet to come."""
        request = self.request
        if not request.has_forked:
            return request.params.n
        return 1 if request.beams is None or self.child else request.params.n + 1 - len(request.children)

    @property
    def finish_reason(self) -> str | None:
        """ "stop" | "length" | "cancelled" | "error", None while it lives."""
        return _FINISH_REASONS[self.finish_cause] if self.status.is_over else None


class Request:
    """What a user asked for, and its samples in order. `max_tokens` is resolved: a number."""

    def __init__(
        self,
        request_id: int,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        max_tokens: int,
        eos_token_ids: frozenset[int],
        extra_keys: ExtraKeys = (),
        num_groups: int = 1,
        arrival: float,
        label: str = "",
        priority: int = 0,
        deadline: float | None = None,
    ):
        self.id = request_id
        self.prompt_token_ids = list(prompt_token_ids)
        self.params = params
        self.max_tokens = max_tokens
        self.stop_token_ids = frozenset(params.stop_token_ids)  # they count with ignore_eos too
        self.eos_token_ids = eos_token_ids
        self.masked_token_ids = tuple(sorted(self.stop_token_ids | eos_token_ids)) if params.min_tokens else ()
        self.extra_keys = extra_keys
        self.label = label
        self.priority = priority  # the lowest number goes first
        self.deadline = deadline  # seconds, time.monotonic(); None: it may take as long as it takes
        self.num_prompt_tokens = len(self.prompt_token_ids)
        self.beams: BeamSearch | None = None
        if isinstance(params, BeamSearchParams):
            self.beams = BeamSearch(params, max_tokens, eos_token_ids)
        self.has_forked = params.n == 1 and self.beams is None
        self.num_cached_tokens = 0  # prompt tokens whose prefill was skipped at the first admission
        # Of the prompt's tokens in order, as far as they are known; nothing predicts the first. None: not asked for.
        self.prompt_logprobs: list[dict[int, float] | None] | None = None if params.prompt_logprobs is None else [None]
        self.error: BaseException | None = None
        self.metrics = RequestMetrics(arrival=arrival)
        self.children = [Sequence(self, 0, array("q", self.prompt_token_ids), num_groups)]

    def __repr__(self) -> str:
        return (
            f"<Request {self.id} {self.status}, {self.num_prompt_tokens} prompt tokens, {len(self.children)} children>"
        )

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Are some still to come? Until they are all known the prompt is computed and never read from the prefix cache."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt_tokens

    @property
    def advances_together(self) -> bool:
        """Do its sequences compute the same number of tokens in the same steps? Beams do: they are compared."""
        return self.beams is not None and self.has_forked

    def suspend_beams(self) -> Sequence:
        """One sequence in place of the beams, which have lost their KV: it computes again what their texts have in
        common, and they will fork from it."""
        assert self.beams is not None
        first, texts = self.children[0], [child.token_ids for child in self.children]
        trunk = Sequence(self, 0, texts[0][: common_prefix(texts)], len(first.block_tables))
        trunk.status, trunk.num_preemptions, trunk.last_token_time = (
            first.status,
            first.num_preemptions,
            first.last_token_time,
        )
        self.beams.suspended, self.children, self.has_forked = texts, [trunk], False
        return trunk

    @property
    def finished(self) -> bool:
        """Every sample is over, in whatever way."""
        return all(child.status.is_over for child in self.children)

    @property
    def status(self) -> RequestStatus:
        """The status of the sample that is furthest from its end."""
        order = list(RequestStatus)
        live = [child.status for child in self.children if not child.status.is_over]
        if live:
            return RequestStatus.RUNNING if RequestStatus.RUNNING in live else live[0]
        return max((child.status for child in self.children), key=order.index)
