"""The only place that turns events into words.

A headline says what happened and why: the subject first, past tense, the reason after "because" in the same sentence,
at most 20 words, block ids and request numbers named. One short consequence follows, with numbers and units. Terms of
the field (prefill, decode, preempted, copy-on-write) are used as they are. `Context` knows what single events do not:
which requests have split into samples, how prompts begin, and how large a block is. The wording of each kind stands in
event_words.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvscope.engine.events import Cause, Event, EventKind
from kvscope.engine.snapshot import EngineSnapshot

from .event_words import WORDS, Sentence, evicted_together
from .theme import sequence_label

__all__ = ["Context", "Sentence", "Story", "lines", "sentence", "story"]


class Story(NamedTuple):
    """One line of the log, or of the story: what to say, about which events, and how many others it stands for."""

    headline: str
    consequence: str
    kind: EventKind
    step: int
    events: tuple[Event, ...]
    others: int = 0


class Context:
    """What sentences need beyond the event; `learn` it from events and snapshots as they come."""

    _REMEMBERED = 4096

    def __init__(self, *, block_size: int = 16):
        self.block_size = block_size
        self.block_sizes: tuple[int, ...] = ()
        self._forked: dict[int, None] = {}
        self._prompts: dict[int, str] = {}

    def learn(self, events: Iterable[Event] = (), snapshot: EngineSnapshot | None = None) -> None:
        for event in events:
            if event.kind is EventKind.FORKED:
                self._forked[event.request_id] = None
            elif event.kind is EventKind.SUBMITTED and event.text:
                self._prompts[event.request_id] = event.text
        if snapshot is not None:
            self.block_size, self.block_sizes = snapshot.block_size, snapshot.block_sizes
            for request in snapshot.requests:
                if request.child:
                    self._forked[request.id] = None
                if request.label:
                    self._prompts[request.id] = request.label
        for known in (self._forked, self._prompts):
            while len(known) > self._REMEMBERED:
                del known[next(iter(known))]

    def name(self, request_id: int, child: int = 0) -> str:
        """`request 3`, or `3b` for a sample of a request that has split."""
        if request_id < 0:
            return "a request"
        if child or request_id in self._forked:
            return sequence_label(request_id, child, forked=True)
        return f"request {request_id}"

    def opening(self, request_id: int) -> str:
        """The first words of a prompt, in quotes, for "no earlier prompt starts with …"."""
        words = " ".join(self._prompts.get(request_id, "").split()[:3]).rstrip(".,:;")
        return f"“{words} …”" if words else "the same text"


def sentence(event: Event, context: Context | None = None) -> Sentence:
    """Words for one event."""
    return WORDS[event.kind](event, context or Context())


# -- several events ----------------------------------------------------------------------------------------------------

# What the story tells first when a step has several events; kinds that are not listed are never told on their own.
_IMPORTANCE = (
    EventKind.FAILED, EventKind.PREEMPTED, EventKind.REFUSED, EventKind.CANCELLED, EventKind.CACHE_RESET,
    EventKind.COPIED, EventKind.FORKED, EventKind.SWAPPED_OUT, EventKind.SWAPPED_IN, EventKind.RESUMED, EventKind.CACHE_HIT, EventKind.CACHE_MISS,
    EventKind.FINISHED, EventKind.EVICTED, EventKind.ADMITTED, EventKind.BLOCKED, EventKind.SUBMITTED,
)  # fmt: skip
_RANK = {kind: rank for rank, kind in enumerate(_IMPORTANCE)}
_SAYS_ADMITTED = (EventKind.CACHE_HIT, EventKind.CACHE_MISS)
_HIT_SAYS_ENOUGH = (Cause.NEVER_SEEN, Cause.FIRST_DIFFERENCE)  # where a prefix ends because the texts differ


def lines(events: Sequence[Event], context: Context | None = None) -> list[Story]:
    """The log of these events, oldest first; evictions of one step merge into one line. `context` learns them on the way, so
    that an old event is worded as it was when it was new."""
    context = context or Context()
    told: list[Story] = []
    evictions: dict[int, tuple[int, list[Event]]] = {}  # by step: which line tells them
    hit_or_miss = {(e.step, e.request_id) for e in events if e.kind in _SAYS_ADMITTED}
    hits = {(e.step, e.request_id) for e in events if e.kind is EventKind.CACHE_HIT}
    for event in events:
        context.learn((event,))
        if event.kind not in _RANK:
            continue
        if event.kind is EventKind.ADMITTED and (event.step, event.request_id) in hit_or_miss:
            continue
        if (
            event.kind is EventKind.CACHE_MISS
            and event.cause in _HIT_SAYS_ENOUGH
            and (event.step, event.request_id) in hits
        ):
            continue
        if event.kind is EventKind.EVICTED:
            if event.cause is Cause.CACHE_RESET:
                continue  # the reset itself is told
            place, merged = evictions.setdefault(event.step, (len(told), []))
            merged.append(event)
            if len(merged) > 1:
                told[place] = Story(*evicted_together(merged, context), event.kind, event.step, tuple(merged))
                continue
        told.append(Story(*sentence(event, context), event.kind, event.step, (event,)))
    return told


def story(events: Sequence[Event], context: Context | None = None) -> Story | None:
    """The most important line of one step's events, and how many others there are; None when there is nothing."""
    told = lines(events, context)
    if told:
        best = min(told, key=lambda line: _RANK[line.kind])
        return best._replace(others=len(told) - 1)
    quiet = [e for e in events if e.kind in (EventKind.PAUSED, EventKind.CONTINUED, EventKind.STEP)]
    if not quiet:
        return None
    return Story(*sentence(quiet[-1], context), quiet[-1].kind, quiet[-1].step, (quiet[-1],))
