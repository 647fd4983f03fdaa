"""What becomes of sequences once a step is computed: they advance, fork, get tokens, finish, or fail.

The finish decision is taken token by token, in order of position: the end of sequence, a stop id, then the length; stop
strings need text and come from outside through `finish`. So a sample that has some stays undecided at its last token until
the text is known, or the next step begins. Nothing past the last token of a sample is kept or published.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from itertools import islice

import torch

from ..events import Cause, EventKind
from ..kvcache.storage import KVStorage
from ..latency import inter_token_latency
from ..metrics import Metrics
from ..request import Request, RequestStatus, Sequence
from ..sampling.logprobs import of_prompt
from ..sampling.sampler import Sampled, SampleRow
from .plan import Plan
from .scheduler import Scheduler

_FINISHED_REASONS = {"stop": "stop", "length": "length", "cancelled": "abort", "error": "error"}  # ours -> vLLM's label
_NOTHING_LEFT = (
    "no token is left to choose: structured_outputs, allowed_token_ids, bad_words and min_tokens together forbid every "
    "one; allow more ids"
)


def sample_rows(plan: Plan) -> list[SampleRow]:
    """One row per token that the step will draw. A request that has yet to fork gives n rows that read the same logits:
    the first tokens of its samples."""
    rows = []
    for logits_row, row in enumerate(plan.sampled_rows):
        seq = plan.sequences[row]
        request, num_output = seq.request, seq.num_output_tokens
        if request.beams is not None:  # they are ranked, all at once
            continue
        masked = request.masked_token_ids if num_output < request.params.min_tokens else ()
        for child in range(seq.child, seq.child + seq.num_seats):
            rows.append(
                SampleRow(logits_row, request.params, request.id, child, num_output, masked, seq.token_ids, seq.matcher)
            )
    return rows


class Lifecycle:
    """Carries results into sequences, and ends sequences, through `scheduler`. Knows no model."""

    def __init__(self, scheduler: Scheduler, storage: KVStorage, metrics: Metrics):
        self.scheduler = scheduler
        self.tables = scheduler.tables
        self.journal = scheduler.journal
        self.storage = storage
        self._ended: list[Request] = []
        self._undecided: list[Sequence] = []
        self._gaps: list[float] = []  # between tokens of the same sample, of this step
        self.metrics = metrics

    def keep_prompt_logprobs(self, plan: Plan, logits: torch.Tensor) -> None:
        """`logits` float32 [tokens of all prompt spans, vocab], span by span."""
        start = 0
        for row, first, end in plan.prompt_spans:
            request, stop = plan.sequences[row].request, start + end - first
            known = len(request.prompt_logprobs)
            token_ids = request.prompt_token_ids[known : known + end - first]
            request.prompt_logprobs += of_prompt(logits[start:stop], token_ids, request.params.prompt_logprobs)
            start = stop

    def apply(self, plan: Plan, sampled: Sampled) -> None:
        """Advance every row of the plan and give the sampled ones their tokens, which go to `plan.new_tokens` too."""
        self.journal.time = time.monotonic()
        draws = iter(range(len(sampled.token_ids)))
        drawing = [plan.sequences[row] for row in plan.sampled_rows if plan.sequences[row].request.beams is None]
        chosen = [(seq, list(islice(draws, seq.num_seats))) for seq in drawing]
        if sampled.exhausted:
            self.fail(_drawing(sampled.exhausted, chosen), ValueError(_NOTHING_LEFT))
        if sampled.invalid:  # whoever has failed already stays as it is
            fault = FloatingPointError("the logits of the step are not finite (NaN or infinity)")
            self.fail(_drawing(sampled.invalid, chosen), fault)
        for seq, num_tokens in zip(plan.sequences, plan.num_tokens, strict=True):
            if seq.status is RequestStatus.RUNNING:
                self.tables.advance(seq, num_tokens)
        self.metrics.step_computed(plan.prefill_tokens + plan.decode_tokens, plan.padding_tokens)
        for seq, its_draws in chosen:
            if seq.status is not RequestStatus.RUNNING:
                continue
            samples = [seq] if seq.request.has_forked else self._fork(seq)
            for sample, draw in zip(samples, its_draws, strict=True):
                token_id = sampled.token_ids[draw]
                plan.new_tokens.setdefault(seq.request.id, []).append((sample.child, token_id))
                self._accept(sample, token_id, sampled.logprobs[draw])

    def _fork(self, parent: Sequence) -> list[Sequence]:
        """The prompt is computed: n samples go on from here and share every block of it, the partly filled one too."""
        request = parent.request
        numbers = {"samples": request.params.n, "shared_blocks": self.tables.held(parent) if self.tables.shares else 0}
        self.journal.emit(EventKind.FORKED, request.id, cause=Cause.PARALLEL_SAMPLING, numbers=numbers)
        request.has_forked = True
        for child in range(1, request.params.n):
            seq = Sequence(request, child, parent.token_ids[:], len(parent.block_tables))
            request.children.append(seq)
            self.scheduler.fork(parent, seq)
        return list(request.children)

    def _accept(self, seq: Sequence, token_id: int, logprobs: dict[int, float] | None) -> None:
        seq.token_ids.append(token_id)
        if logprobs is not None and seq.logprobs is not None:
            seq.logprobs.append(logprobs)
            seq.cumulative_logprob += logprobs[token_id]
        self.count_token(seq)
        cause = _end(seq, token_id)
        if cause is Cause.NONE:
            return
        stop_reason = token_id if cause is Cause.STOP_TOKEN else None
        if seq.request.params.stop:
            seq.finish_cause, seq.stop_reason = cause, stop_reason
            self._undecided.append(seq)
        else:
            self.finish(seq, cause, stop_reason)

    def settle(self) -> None:
        """Nobody has found a stop string at the last token of those that are undecided: they end for the reason they had."""
        undecided, self._undecided = self._undecided, []
        for seq in undecided:
            self.finish(seq, seq.finish_cause, seq.stop_reason)

    def count_token(self, seq: Sequence) -> None:
        """One more token came out."""
        request, now = seq.request, self.journal.time
        self.metrics.count("vllm:generation_tokens_total")
        self.note_first_token(request)
        if seq.last_token_time:
            gap = inter_token_latency(seq.last_token_time, now)
            self._gaps.append(gap)
            self.metrics.observe("vllm:inter_token_latency_seconds", gap)
        seq.last_token_time = now

    def take_gaps(self) -> dict[str, float]:
        """How many inter-token latencies were observed since the last call, their sum and the longest, as numbers of STEP."""
        gaps, self._gaps = self._gaps, []
        return {"gaps": len(gaps), "gap_seconds": sum(gaps), "longest_gap": max(gaps, default=0.0)}

    def note_first_token(self, request: Request) -> None:
        """Its first token is here, unless that was noted before."""
        if request.metrics.first_token is None:
            request.metrics.first_token = self.journal.time
            self.metrics.prompt_computed(request)

    # --- the end of a sample --------------------------------------------------------------------------------------

    def finish(self, seq: Sequence, cause: Cause, stop_reason: int | str | None, num_tokens: int | None = None) -> None:
        """End a sample, after its first `num_tokens` output tokens where given. One that is over stays as it is."""
        if seq.status.is_over:
            return
        if num_tokens is not None and num_tokens < seq.num_output_tokens:
            self._truncate(seq, num_tokens)
        seq.finish_cause, seq.stop_reason = cause, stop_reason
        self.tell_finished(seq, *self._leave(seq, RequestStatus.FINISHED, Cause.FINISHED))

    def tell_finished(self, seq: Sequence, freed: int, cached: int) -> None:
        stop_reason, times = seq.stop_reason, seq.request.metrics
        numbers = {"output_tokens": seq.num_output_tokens, "cached_blocks": cached, "freed_blocks": freed - cached,
                   "limit": seq.request.max_tokens, "ttft": times.ttft or 0.0,
                   "e2e": self.journal.time - times.arrival}  # fmt: skip
        self.journal.emit(EventKind.FINISHED, seq.request.id, seq.child, cause=seq.finish_cause, numbers=numbers,
                          text=stop_reason if isinstance(stop_reason, str) else "")  # fmt: skip

    def _truncate(self, seq: Sequence, num_tokens: int) -> None:
        keep = seq.request.num_prompt_tokens + num_tokens
        self.tables.withdraw(seq, Cause.STOP_STRING, keep)
        del seq.token_ids[keep:]
        if seq.logprobs is not None:
            del seq.logprobs[num_tokens:]
            seq.cumulative_logprob = sum(p[t] for p, t in zip(seq.logprobs, seq.output_token_ids, strict=True))

    def cancel(self, request: Request, cause: Cause) -> None:
        """End all samples that live; what they computed stays cached."""
        for seq in _live(request):
            seq.finish_cause = Cause.CANCELLED
            seq.stop_reason = "deadline" if cause is Cause.DEADLINE else None
            freed, cached = self._leave(seq, RequestStatus.CANCELLED, Cause.CANCELLED)
            numbers = {"output_tokens": seq.num_output_tokens, "cached_blocks": cached, "freed_blocks": freed - cached}
            self.journal.emit(EventKind.CANCELLED, request.id, seq.child, cause=cause, numbers=numbers)

    def fail(self, requests: Iterable[Request], fault: BaseException) -> None:
        """End all samples of these requests because of `fault`. Where logits were not finite, nobody knows since when the
        KV has been broken, so none of their text can be found from then on. Pages that became free are zeroed."""
        cause = _fault_cause(fault)
        for request, samples in [(request, live) for request in requests if (live := _live(request))]:
            request.error = fault
            self.metrics.count("vllm:corrupted_requests_total", cause is Cause.NAN_LOGITS)
            blocks = {block for seq in samples for table in seq.block_tables for block in table}
            for seq in samples:
                if cause is Cause.NAN_LOGITS:
                    self.tables.withdraw(seq, cause)
                seq.finish_cause = Cause.FAILED
                freed, _ = self._leave(seq, RequestStatus.FAILED, Cause.FAILED)
                self.journal.emit(EventKind.FAILED, request.id, seq.child, cause=cause, numbers={"freed_blocks": freed},
                                  text=f"{type(fault).__name__}: {fault}")  # fmt: skip
            pool = self.tables.pool
            self.storage.clear([b for b in blocks if pool.ref_count[b] == 0 and not pool.is_cached[b]])

    def take_ended(self) -> list[Request]:
        """The requests whose last sample has ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def _leave(self, seq: Sequence, status: RequestStatus, cause: Cause) -> tuple[int, int]:
        """Out of the scheduler, blocks returned: (blocks that became free, how many of these stay cached)."""
        counts = self.scheduler.remove(seq, cause)
        self.end(seq, status)
        return counts

    def end(self, seq: Sequence, status: RequestStatus) -> None:
        """It is over, and out of the scheduler already."""
        seq.status = status
        request = seq.request
        self.metrics.finished[_FINISHED_REASONS[seq.finish_reason]] += 1
        self.metrics.observe("vllm:request_generation_tokens", seq.num_output_tokens)
        if request.finished:
            self._ended.append(request)
            request.metrics.finished = self.journal.time
            request.metrics.num_output_tokens = max(child.num_output_tokens for child in request.children)
            if status is RequestStatus.FINISHED:
                self.metrics.request_finished(request)


def _drawing(draws: list[int], chosen: list[tuple[Sequence, list[int]]]) -> list[Request]:
    """The requests for which one of these draws was made."""
    wanted = set(draws)
    return [seq.request for seq, its_draws in chosen if not wanted.isdisjoint(its_draws)]


def _live(request: Request) -> list[Sequence]:
    return [seq for seq in request.children if not seq.status.is_over]


def _end(seq: Sequence, token_id: int) -> Cause:
    """Whether the token just accepted is the sample's last, and why."""
    request, num_output = seq.request, seq.num_output_tokens
    if num_output >= request.params.min_tokens:
        if token_id in request.eos_token_ids and not request.params.ignore_eos:
            return Cause.EOS
        if token_id in request.stop_token_ids:
            return Cause.STOP_TOKEN
    return Cause.LENGTH if num_output >= request.max_tokens else Cause.NONE


def _fault_cause(fault: BaseException) -> Cause:
    if isinstance(fault, FloatingPointError):
        return Cause.NAN_LOGITS
    out_of_memory = isinstance(fault, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(fault)
    return Cause.OUT_OF_MEMORY if out_of_memory else Cause.EXCEPTION
