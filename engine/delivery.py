"""From a step's token ids to what users see: text, stop strings, ends. Runs in the driver thread, between two steps.

A stop string needs text, which the core does not have: it is decided here, before the next schedule, and the core is told
at which token the sample ended. Text, token ids, log-probabilities and usage are cut at that same token.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

from .events import Cause
from .outputs import StepOutput
from .record import BeamRecord, RequestRecord
from .registry import RequestRegistry
from .request import Request

if TYPE_CHECKING:
    from .core import EngineCore


def deliver(core: EngineCore, registry: RequestRegistry, output: StepOutput) -> None:
    """Carry one step's results to the records of its requests, and the end to those that a fault ended before they were
    scheduled. A fault in making text ends that request alone. Requests that end here are added to `output.finished`."""
    for request_id in output.preempted:
        if record := registry.live.get(request_id):
            record.status = "preempted"
    for request_id in output.scheduled:
        if record := registry.live.get(request_id):
            request, tokens = core.get(request_id), output.new_tokens.get(request_id, [])
            record.status = "running"
            record.num_cached_tokens = request.num_cached_tokens
            try:
                if request.beams is not None:
                    _show_beams(request, record)
                elif tokens:
                    _publish(core, request, record, tokens)
            except BaseException as fault:  # a panic of the tokenizer's Rust is no Exception
                core.cancel(request_id)
                registry.end(record, "failed", fault)
    over = [request_id for request_id in output.scheduled if core.get(request_id).finished]
    output.finished.extend(request_id for request_id in over if request_id not in output.finished)
    deliver_ends(core, registry, output.finished)


def deliver_ends(core: EngineCore, registry: RequestRegistry, request_ids: Iterable[int]) -> None:
    """Tell the end of these requests, as far as they are over in the core and their handles do not know it yet."""
    for request_id in request_ids:
        with contextlib.suppress(KeyError):  # told already, or submitted a moment ago and not yet in the core
            record, request = registry.live[request_id], core.get(request_id)
            if request.finished:
                cut = (seq.stop_reason for seq in request.children if seq.finish_cause is Cause.CANCELLED)
                registry.end(record, request.status.value, request.error, stop_reason=next(cut, None))


def _show_beams(request: Request, record: RequestRecord) -> None:
    """The beams as they stand, likeliest first; when the search is over, its hypotheses, best first. While it has lost its
    blocks, the beams that it had stay."""
    if request.beams is None or not request.has_forked:
        return
    if request.finished:
        best_first = [(seq, seq.cumulative_logprob) for seq in request.children]
    else:
        beams = zip(request.children, request.beams.logprobs, strict=True)
        best_first = sorted(beams, key=lambda beam: -beam[1])
    with record.lock:
        record.prompt_logprobs = request.prompt_logprobs
        for sample, (seq, logprob) in zip(record.samples, best_first, strict=False):
            assert isinstance(sample, BeamRecord)
            sample.show(seq.output_token_ids, logprob)
            if request.finished:
                sample.finish(seq.finish_reason or "stop", seq.stop_reason)
        record.publish()


def _publish(core: EngineCore, request: Request, record: RequestRecord, tokens: list[tuple[int, int]]) -> None:
    with record.lock:
        record.prompt_logprobs = request.prompt_logprobs
        for child, token_id in tokens:
            sample, seq = record.samples[child], request.children[child]
            if sample.finish_reason is not None:  # tokens behind a stop string of the same step
                continue
            count = len(sample.token_ids) + 1
            logprobs = None if seq.logprobs is None else seq.logprobs[count - 1]
            is_last = seq.finish_cause is not Cause.NONE and count == seq.num_output_tokens
            ended_by_id = is_last and seq.finish_cause in (Cause.EOS, Cause.STOP_TOKEN)
            show = record.params.include_stop_str_in_output or not ended_by_id
            stop = sample.push(token_id, logprobs, show=show)
            if stop is not None:
                core.finish(request.id, child, count, Cause.STOP_STRING, stop)
                sample.finish("stop", stop)
            elif is_last:
                core.finish(request.id, child, count, seq.finish_cause, seq.stop_reason)
                sample.finish(seq.finish_reason or "stop", seq.stop_reason)
        record.publish()
