"""Phases of requests over steps: waiting, prefill, decode, preempted, finished, and why.

Which phase a request is in comes from the snapshots, so a viewer that missed events is right again with the next
frame; the step where a phase begins, and the reason, come from the events. One frame with all events gives what many
frames gave, step by step; only where samples of a request were preempted apart and one has ended since, the border between
its recompute and decode is an estimate.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvscope.engine.events import Event, EventKind
from kvscope.engine.snapshot import RequestState

from ..sentences import Context, sentence
from .base import ENDED, Frame

_KEPT = 2000  # spans
_ENDS = (EventKind.FINISHED, EventKind.CANCELLED, EventKind.FAILED)
_BEGINS = (EventKind.SUBMITTED, EventKind.ADMITTED, EventKind.RESUMED, EventKind.PREEMPTED)


@dataclass
class Span:
    """A phase of one request; `lanes` are the last steps of its samples while it decodes."""

    phase: str  # waiting | prefill | decode | preempted | finished
    first: int
    last: int
    why: str = ""
    cached: float = 0.0  # share of a prefill that came from the cache
    open: bool = True
    lanes: dict[int, int] | None = None
    number: int = 0  # in order of creation
    goal: int = 0  # tokens that a prefill has to catch up with

    def about(self) -> str:
        """For the hover: the phase, since when, and why."""
        return f"{self.phase} from step {self.first}. {self.why}".strip()


class Phases:
    """`spans[request id]` lists the phases of a request, oldest first; only the last may be open."""

    def __init__(self) -> None:
        self.context = Context()
        self.spans: dict[int, list[Span]] = {}
        self.changes = 0  # grows when anything but the last step of an open span changes
        self._count = 0
        self._running: dict[int, set[int]] = {}  # by request: its samples that run, as events told

    def update(self, frame: Frame) -> None:
        ends: dict[int, Event] = {}
        for event in frame.events:
            self.context.learn((event,))
            if event.kind in _ENDS:
                ends[event.request_id] = event
                self._end_lane(event, event.step)
            elif event.kind in _BEGINS:
                if not self._others_run(event):
                    self._begin(event)
            elif event.kind is EventKind.FORKED and "samples" in event.numbers:
                self._fork(event)
            elif event.kind is EventKind.BLOCKED and event.request_id in self.spans:
                span = self.spans[event.request_id][-1]
                if span.phase == "waiting":
                    span.why = sentence(event, self.context).headline
                    self.changes += 1
        self.context.learn(snapshot=frame.snapshot)
        self._follow(frame, ends)

    def _end_lane(self, event: Event, last: int) -> None:
        """A sample decodes until the step that its end names, however long ago the last snapshot was: of a prefill whose end
        was not seen it is kept for the decode that follows."""
        self._running.get(event.request_id, set()).discard(event.child)
        span = self.spans[event.request_id][-1] if event.request_id in self.spans else None
        if span is not None and span.phase in ("prefill", "decode"):
            span.lanes = (span.lanes or {}) | {event.child: max(span.first, last)}
            self.changes += 1

    def _others_run(self, event: Event) -> bool:
        """Whether the request as a whole goes on as it was, because other samples of it run all the while."""
        if event.kind is EventKind.SUBMITTED:
            return False
        running = self._running.setdefault(event.request_id, set())
        if event.kind is EventKind.PREEMPTED:
            running.discard(event.child)
            if running:
                self._end_lane(event, event.step - 1)
            return bool(running)
        others = bool(running)
        running.add(event.child)
        return others

    @staticmethod
    def _take_lanes(prefill: Span, begin: int) -> dict[int, int]:
        """Of samples that ended in a decode from step `begin` on that nobody saw begin."""
        lanes, prefill.lanes = prefill.lanes or {}, None
        return {child: last for child, last in lanes.items() if last >= begin}

    @staticmethod
    def _end(span: Span, phase: str, now: int, request: RequestState) -> int:
        """The last step of a span that has given way to `phase`: after a prefill, each step of decode computes one token."""
        if span.phase == "prefill" and phase == "decode":
            end = now - (request.num_computed_tokens - (span.goal or request.num_prompt_tokens))
            return end if span.first <= end <= now else now
        return max(span.first, now - 1)

    def _fork(self, event: Event) -> None:
        """The prompt is computed with this step, and each sample decodes in a lane of its own from the next one on."""
        spans = self.spans.get(event.request_id)
        if spans and spans[-1].open and spans[-1].phase == "prefill":
            spans[-1].open, spans[-1].last = False, event.step
            lanes = dict.fromkeys(range(int(event.numbers["samples"])), event.step)
            self._running.setdefault(event.request_id, set()).update(lanes)
            self._add(event.request_id, Span("decode", event.step + 1, event.step, lanes=lanes))

    def _begin(self, event: Event) -> None:
        """A phase whose first step an event names."""
        spans = self.spans.setdefault(event.request_id, [])
        why = "" if event.kind is EventKind.SUBMITTED else sentence(event, self.context).headline
        phase = {EventKind.SUBMITTED: "waiting", EventKind.PREEMPTED: "preempted"}.get(event.kind, "prefill")
        cached, total = (
            event.numbers.get("cached_tokens", 0),
            event.numbers.get("prompt_tokens") or event.numbers.get("total_tokens", 0),
        )
        if spans and spans[-1].open and spans[-1].phase == "decode" and spans[-1].first >= event.step:
            spans.pop()  # it ended before its first step
        if spans and spans[-1].open:
            seen, last = spans[-1].last, max(spans[-1].first, event.step - 1)
            spans[-1].open, spans[-1].last = False, last
            spans[-1].lanes = spans[-1].lanes and {c: last if s == seen else s for c, s in spans[-1].lanes.items()}
            if phase == "preempted":
                if spans[-1].phase == "prefill":
                    spans[-1].lanes = (spans[-1].lanes or {}) | {event.child: last}
                computed = event.numbers.get("swapped_tokens") or event.numbers.get("recompute_tokens", 0)
                self._split(event.request_id, computed - spans[-1].goal)
            if spans[-1].phase == "waiting" and event.step - spans[-1].first <= 1:
                spans.pop()  # admitted in the first step after its arrival: it never waited
        share = cached / total if total else 0.0
        self._add(event.request_id, Span(phase, event.step, event.step, why, share, goal=total))

    def _split(self, request_id: int, decode_steps: int) -> None:
        """Of a prefill that has ended unseen, by a viewer that came later or too seldom, give the last steps to decode:
        it writes one token in each, and the event that ended it counted them."""
        span = self.spans[request_id][-1]
        if span.phase == "prefill" and 0 < decode_steps <= span.last - span.first:
            end, span.last = span.last, span.last - decode_steps
            lanes = self._take_lanes(span, span.last + 1) or {0: end}
            self._add(request_id, Span("decode", span.last + 1, end, open=False, lanes=lanes))

    def _add(self, request_id: int, span: Span) -> None:
        self._count += 1
        self.changes += 1
        span.number = self._count
        self.spans.setdefault(request_id, []).append(span)

    def _follow(self, frame: Frame, ends: dict[int, Event]) -> None:
        """Bring the open phases up to the step of the frame."""
        now, live = frame.snapshot.step, {}
        for request in frame.snapshot.requests:
            if request.status not in ENDED:
                live.setdefault(request.id, []).append(request)
        for request_id, samples in live.items():
            running = [r for r in samples if r.status == "running"]
            first = (running or samples)[0]
            status = first.status
            rest = first.num_prompt_tokens + first.num_output_tokens - first.num_computed_tokens
            decoding = status == "running" and first.num_output_tokens > 0 and rest <= 1
            phase = "decode" if decoding else "prefill" if status == "running" else status
            spans = self.spans.setdefault(request_id, [])
            if not spans or not spans[-1].open or spans[-1].phase != phase:
                begin, lanes = now, None
                if spans and spans[-1].open:
                    spans[-1].open = False
                    spans[-1].last = self._end(spans[-1], phase, now, first)
                    begin = spans[-1].last + 1
                    lanes = self._take_lanes(spans[-1], begin) if phase == "decode" else None
                self._add(request_id, Span(phase, begin, now, lanes=lanes))
                spans = self.spans[request_id]
            span = spans[-1]
            span.last = now
            if phase == "decode":
                lanes = (span.lanes or {}) | {r.child: now for r in running}
                self.changes += lanes.keys() != (span.lanes or {}).keys()
                span.lanes = lanes
        for request_id, spans in self.spans.items():
            if request_id not in live and spans[-1].open and spans[-1].phase != "finished":
                self._running.pop(request_id, None)
                event = ends.get(request_id)
                spans[-1].open = False
                spans[-1].last = max(spans[-1].first, event.step if event else spans[-1].last)
                why = sentence(event, self.context).headline if event else ""
                if event:
                    prompt = next((s.goal for s in spans if s.phase == "prefill"), 0)
                    before = spans[-1].goal - prompt  # tokens that it had written when it was preempted
                    self._split(request_id, event.numbers.get("output_tokens", 0) - before - 1)
                    spans = self.spans[request_id]
                self._add(request_id, Span("finished", spans[-1].last, spans[-1].last, why, open=False))
        if sum(map(len, self.spans.values())) > _KEPT:
            oldest = next(iter(self.spans))
            del self.spans[oldest]
