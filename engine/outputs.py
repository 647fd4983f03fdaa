"""What comes out of the engine: of one step (`StepOutput`) and of one request (`RequestOutput`)."""

from __future__ import annotations

from dataclasses import dataclass, field

from .latency import time_per_output_token


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step did. `finished` and `preempted` list request ids; a request with n samples is finished when
    its last sample is. `seconds` is wall time of the whole step."""

    step: int
    scheduled: dict[int, int]  # request id -> tokens computed in this step
    preempted: list[int]
    finished: list[int]
    new_tokens: dict[int, list[tuple[int, int]]]  # request id -> [(child, token id)]
    seconds: float


@dataclass(slots=True)
class RequestMetrics:
    """Times in seconds on time.monotonic(); a time that has not come yet is None, and so is what is computed from it.

    `latency` draws and defines the intervals. Of a request with n samples: the first token of any, the end of the last, and
    the longest output.
    """

    arrival: float
    scheduled: float | None = None  # when it was first admitted
    first_token: float | None = None
    finished: float | None = None
    num_output_tokens: int = 0
    num_preemptions: int = 0

    @property
    def queue_time(self) -> float | None:
        return _between(self.arrival, self.scheduled)

    @property
    def prefill_time(self) -> float | None:
        return _between(self.scheduled, self.first_token)

    @property
    def decode_time(self) -> float | None:
        return _between(self.first_token, self.finished)

    @property
    def inference_time(self) -> float | None:
        return _between(self.scheduled, self.finished)

    @property
    def ttft(self) -> float | None:
        return _between(self.arrival, self.first_token)

    @property
    def e2e(self) -> float | None:
        return _between(self.arrival, self.finished)

    @property
    def tpot(self) -> float | None:
        if self.ttft is None or self.e2e is None:
            return None
        return time_per_output_token(self.ttft, self.e2e, self.num_output_tokens)


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start


@dataclass(slots=True)
class CompletionOutput:
    """One sample. `finish_reason`: "stop" | "length" | "cancelled" | "error", None while it runs; `stop_reason`: the
    stop string or stop token id that matched, "deadline" for one that was cancelled when its time was over, else None.
    `token_times`: when each token came, in seconds on time.monotonic(); empty for a beam, whose text changes as it goes."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, float]] | None = None  # per token: {token id: log-probability}
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_times: list[float] = field(default_factory=list, compare=False)


@dataclass(slots=True)
class RequestOutput:
    """A request so far. `prompt_logprobs`, where asked for, has an entry a prompt token from the first output token on;
    nothing predicts the first one, so its entry is None."""

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    metrics: RequestMetrics
    prompt_logprobs: list[dict[int, float] | None] | None = None
    error: str | None = field(default=None)
