"""The wording of each event kind; `sentences.py` is the way in.

One small function a kind turns an event into a headline and one consequence. Numbers are those that the table of
event kinds names; a number that is missing reads as 0, so that a recording of an older engine can still be told.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvscope.engine.events import Cause, Event, EventKind

from .event_reasons import REASONS, because
from .markup import duration, size
from .theme import sequence_label

if TYPE_CHECKING:
    from .sentences import Context


class Sentence(NamedTuple):
    headline: str
    consequence: str


# -- small words -------------------------------------------------------------------------------------------------------


def _n(event: Event, name: str, default: int = 0) -> int:
    return int(event.numbers.get(name, default))


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _were(number: int, noun: str, verb: str = "was were") -> str:
    one, many = verb.split()
    return f"{_count(number, noun)} {one if number == 1 else many}"


def _join(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _join_names(names: Sequence[str]) -> str:
    """`requests 2 and 7`, `request 5, 11b and 11c`."""
    if len(names) > 1 and all(name.startswith("request ") for name in names):
        return f"requests {_join([name.removeprefix('request ') for name in names])}"
    return _join(names)


def _capital(words: str) -> str:
    return words[0].upper() + words[1:]


def _who(event: Event, context: Context) -> str:
    return _capital(context.name(event.request_id, event.child))


def _request(event: Event) -> str:
    return f"Request {event.request_id}" if event.request_id >= 0 else "A request"


def _needed_by(event: Event, context: Context) -> str:
    """Who needed the block: "it" where that is the subject of the sentence itself."""
    needed_by = (_n(event, "needed_by", -1), _n(event, "needed_by_child"))
    itself = event.kind is EventKind.PREEMPTED and needed_by == (event.request_id, event.child)
    return "it" if itself else context.name(*needed_by)


# -- one kind after another --------------------------------------------------------------------------------------------


def _submitted(event: Event, context: Context) -> Sentence:
    n = _n(event, "n", 1)
    samples = f"{_count(n, 'sample')} of " if n > 1 else ""
    if _n(event, "beam_width"):
        samples = f"the best of {_count(n, 'beam')}, each of "
    return Sentence(
        f"{_request(event)} arrived with {_count(_n(event, 'prompt_tokens'), 'prompt token')}.",
        f"It asks for {samples}at most {_count(_n(event, 'max_tokens'), 'new token')}.",
    )


def _refused(event: Event, context: Context) -> Sentence:
    needed, available = _n(event, "needed"), _n(event, "available")
    reason = {
        Cause.POOL_TOO_SMALL: f"it needs {_count(needed, 'block')} and the pool holds {available:,}",
        Cause.CONTEXT_TOO_LONG: f"it needs {_count(needed, 'token')} and the model reads at most {available:,}",
        Cause.QUEUE_FULL: "the queue is full",
    }.get(event.cause, REASONS[event.cause])
    invalid = event.cause is Cause.INVALID and event.text
    return Sentence(
        f"{_request(event)} was refused because {reason}.", _said(event) if invalid else "Other requests go on."
    )


def _said(event: Event) -> str:
    text = event.text.strip()
    return text if text.endswith(".") else f"{text}."


def _admitted(event: Event, context: Context) -> Sentence:
    cached, prompt, waited = _n(event, "cached_tokens"), _n(event, "prompt_tokens"), _n(event, "waited_steps") - 1
    # The first step after its arrival is not a wait.
    after = f" after waiting {_count(waited, 'step')}" if waited > 0 else ""
    return Sentence(f"{_request(event)} was admitted{after} {because(event)}.", _from_cache(cached, prompt))


def _from_cache(cached: int, prompt: int) -> str:
    if not cached:
        return f"All {_count(prompt, 'prompt token')} must be computed."
    rest = prompt - cached
    return f"{cached:,} of {prompt:,} prompt tokens came from the cache; {rest:,} {'is' if rest == 1 else 'are'} left for prefill."


def _cache_hit(event: Event, context: Context) -> Sentence:
    blocks, author = _n(event, "blocks"), _n(event, "computed_for", -1)
    source = (
        "for it before" if author == event.request_id else f"for {context.name(author)}" if author >= 0 else "earlier"
    )
    return Sentence(
        f"{_request(event)} reused {_were(blocks, 'block', 'that~was that~were').replace('~', ' ')} computed {source}.",
        _from_cache(_n(event, "cached_tokens"), _n(event, "prompt_tokens")),
    )


def _cache_miss(event: Event, context: Context) -> Sentence:
    matched, prompt, step = _n(event, "matched_tokens"), _n(event, "prompt_tokens"), _n(event, "evicted_step", -1)
    at = f" at step {step}" if step >= 0 else ""
    reason = {
        Cause.NEVER_SEEN: "no earlier text goes on in the same way"
        if matched
        else f"no earlier prompt starts with {context.opening(event.request_id)}",
        Cause.EVICTED: f"its {'next' if matched else 'first'} block was evicted{at}",
        Cause.FIRST_DIFFERENCE: f"its text differs from token {_n(event, 'at_token', matched) + 1:,} on",
        Cause.FULL_BLOCKS_ONLY: f"caching works in full blocks of {context.block_size}",
        Cause.NO_FREE_BLOCK: "no block was free for a copy of the last one",
    }.get(event.cause, REASONS[event.cause])
    if not matched:
        return Sentence(f"{_request(event)} missed the cache because {reason}.", _from_cache(0, prompt))
    rest = prompt - matched
    again = "The last block is computed again." if event.cause is Cause.FULL_BLOCKS_ONLY else (
        f"{rest:,} {'is' if rest == 1 else 'are'} left for prefill."
    )  # fmt: skip
    return Sentence(f"{_request(event)} matched only {matched:,} of {prompt:,} tokens because {reason}.", again)


def _allocated(event: Event, context: Context) -> Sentence:
    place = f"It is logical block {_n(event, 'logical')} of {context.name(event.request_id, event.child)}."
    return Sentence(f"{_who(event, context)} took block {event.block_id} {because(event)}.", place)


def _shared(event: Event, context: Context) -> Sentence:
    readers = _n(event, "ref_count")
    return Sentence(
        f"{_who(event, context)} reads block {event.block_id} too {because(event)}.",
        f"The block is stored once and has {_count(readers, 'reader')}.",
    )


def _forked(event: Event, context: Context) -> Sentence:
    samples, blocks = _n(event, "samples", 2), _n(event, "shared_blocks")
    if "parent" in event.numbers:
        name, parent = context.name(event.request_id, event.child), context.name(event.request_id, _n(event, "parent"))
        return Sentence(
            f"Beam {name} goes on from {parent} because several of the best texts begin like {parent}.",
            f"They share {_count(blocks, 'block')}. The first write into a shared block will copy it.",
        )
    what = "beams" if event.cause is Cause.BEAM_SEARCH else "samples"
    first, last = (sequence_label(event.request_id, child, forked=True) for child in (0, samples - 1))
    return Sentence(
        f"{_request(event)} split into {samples} {what}, {first} to {last}, that share {_count(blocks, 'block')}.",
        "Nothing was copied. The first write into a shared block will copy it.",
    )


def _copied(event: Event, context: Context) -> Sentence:
    source = _n(event, "source", -1)
    reader = context.name(_n(event, "reader", -1), _n(event, "reader_child"))
    why = f"{reader} still reads block {source}" if event.cause is not Cause.CACHED_WRITE else "its text stays cached"
    block = f", one block of {size(_n(event, 'bytes'))}" if _n(event, "bytes") else ""
    return Sentence(
        f"{_who(event, context)} copied block {source} to block {event.block_id} before writing, because {why}.",
        f"Copy-on-write: {_count(_n(event, 'tokens'), 'token')}{block}.",
    )


def _published(event: Event, context: Context) -> Sentence:
    size = context.block_sizes[event.group] if context.block_sizes else context.block_size
    first, tokens = _n(event, "logical") * size, _n(event, "tokens", size)
    return Sentence(
        f"Block {event.block_id} can now be found by its text {because(event)}.",
        f"It holds tokens {first + 1:,} to {first + tokens:,} of {context.name(event.request_id, event.child)}.",
    )


def _nulled(event: Event, context: Context) -> Sentence:
    name, window = context.name(event.request_id, event.child), _count(_n(event, "window"), "token")
    return Sentence(
        f"Block {event.block_id} of {name} fell out of the window of {window}.",
        "No token to come looks so far back; the null block takes its place in the table.",
    )


def _evicted(event: Event, context: Context) -> Sentence:
    if "needed_by" not in event.numbers:  # nobody took it: its text was withdrawn
        return Sentence(f"Block {event.block_id} was evicted {because(event)}.", "Its text is no longer cached.")
    idle = _n(event, "idle_steps")
    if event.cause is Cause.LEAST_RECENTLY_USED and not idle:
        chosen = "It had just lost its last reader."
    else:
        chosen = f"{_capital(REASONS[event.cause])} ({_unused(event.cause)}{_count(idle, 'step')})."
    return Sentence(
        f"Block {event.block_id} was evicted because {_needed_by(event, context)} needed a block and none was free.",
        f"{chosen} Its text is no longer cached.",
    )


def _unused(cause: Cause) -> str:
    return "" if cause is Cause.LEAST_RECENTLY_USED else "unused for "


def evicted_together(events: Sequence[Event], context: Context) -> Sentence:
    blocks = [str(e.block_id) for e in events]
    ids = f" ({_join(blocks)})" if len(blocks) <= 3 else ""
    if any("needed_by" not in e.numbers for e in events):
        return Sentence(
            f"{len(blocks)} blocks{ids} were evicted {because(events[0])}.", "Their text is no longer cached."
        )
    names = list(dict.fromkeys(_needed_by(e, context) for e in events))
    who = _join_names(names) if len(names) <= 3 else f"{len(names)} sequences"
    idle = sorted(_n(e, "idle_steps") for e in events)
    span = _count(idle[0], "step") if idle[0] == idle[-1] else f"{idle[0]:,} to {_count(idle[-1], 'step')}"
    causes = {e.cause for e in events}
    chosen = f"They {REASONS[events[0].cause].removeprefix('it ')} ({_unused(events[0].cause)}{span})."
    return Sentence(
        f"{len(blocks)} blocks{ids} were evicted because {who} needed room and none was free.",
        chosen if ids and len(causes) == 1 else f"They had been unused for {span}; the first was block {blocks[0]}.",
    )


def _freed(event: Event, context: Context) -> Sentence:
    name = context.name(event.request_id, event.child)
    reason = {
        Cause.FINISHED: f"{name} finished", Cause.CANCELLED: f"{name} was cancelled",
        Cause.PREEMPTED: f"{name} was preempted", Cause.FAILED: f"{name} failed",
        Cause.COPY_ON_WRITE: f"{name} writes into a copy now",
        Cause.BEAM_SEARCH: f"a text of {name} was no longer among the best",
        Cause.OUT_OF_WINDOW: f"{name} does not look so far back any more",
    }.get(event.cause, REASONS[event.cause])  # fmt: skip
    kept = "Its text stays cached." if _n(event, "cached") else "It is empty again."
    return Sentence(f"Block {event.block_id} lost its last reader because {reason}.", kept)


def _preempted(event: Event, context: Context) -> Sentence:
    reason = REASONS[event.cause]
    if event.cause is Cause.NO_FREE_BLOCK:
        reason = f"{_needed_by(event, context)} needed a block and none was free or evictable"
    later = f"{_count(_n(event, 'recompute_tokens'), 'token')} will be recomputed later"
    if waiting := _n(event, "swapped_tokens"):
        later = f"the KV of {_count(waiting, 'token')} waits in host memory"
    return Sentence(
        f"{_who(event, context)} was preempted because {reason}.",
        f"{_were(_n(event, 'released_blocks'), 'block')} released; {later}.",
    )


def _swapped_out(event: Event, context: Context) -> Sentence:
    used = _count(_n(event, "used_host_blocks"), "block")
    return Sentence(
        f"{_moved(event)} moved to host memory because {_samples(event, context)} lost {_its(event)} place.",
        f"{size(_n(event, 'bytes'))}, nothing to recompute; host memory holds {used} now.",
    )


def _swapped_in(event: Event, context: Context) -> Sentence:
    used = _count(_n(event, "used_host_blocks"), "block")
    return Sentence(
        f"{_moved(event)} moved back from host memory because there was room for {_samples(event, context)}.",
        f"{size(_n(event, 'bytes'))}; host memory holds {used} now.",
    )


def _moved(event: Event) -> str:
    return _were(_n(event, "blocks"), "block")


def _samples(event: Event, context: Context) -> str:
    samples = _n(event, "samples", 1)
    if samples > 1:
        return f"{_count(samples, 'beam' if _n(event, 'beam_width') else 'sample')} of {_request(event).lower()}"
    return context.name(event.request_id, event.child)


def _its(event: Event) -> str:
    return "their" if _n(event, "samples", 1) > 1 else "its"


def _resumed(event: Event, context: Context) -> Sentence:
    cached, again, total = (_n(event, k) for k in ("cached_tokens", "recompute_tokens", "total_tokens"))
    if back := _n(event, "swapped_tokens"):
        after = f"The KV of {_count(back, 'token')} came back from host memory."
    elif cached:
        after = (
            f"{cached:,} of {total:,} tokens were still cached; {again:,} {'is' if again == 1 else 'are'} recomputed."
        )
    else:
        after = f"None of its text was still cached; all {_count(total, 'token')} are recomputed."
    reason = "enough blocks had become available" if event.cause is Cause.CAPACITY else REASONS[event.cause]
    return Sentence(f"{_who(event, context)} resumed because {reason}.", after)


def _blocked(event: Event, context: Context) -> Sentence:
    needed, available, reserved = (_n(event, k) for k in ("needed", "available", "reserved"))
    room = f"{available:,} {'is' if available == 1 else 'are'} available"
    if reserved:
        room += f" and {reserved:,} {'is' if reserved == 1 else 'are'} kept in reserve"
    if event.cause is Cause.BEHIND:
        behind = _n(event, "behind")
        head = "another sample of its request" if behind == event.request_id else f"request {behind}"
        blocks = f", which needs {_count(needed, 'block')}" if needed else ""
        return Sentence(
            f"{_who(event, context)} is waiting behind {head}{blocks}.",
            f"{room}." if needed else "Requests are admitted in order of arrival.",
        )
    if event.cause is Cause.NO_FREE_BLOCK:
        return Sentence(f"{_who(event, context)} is waiting because it needs {_count(needed, 'block')}.", f"{room}.")
    return Sentence(f"{_who(event, context)} is waiting {because(event)}.", "It is tried again in the next step.")


def _finished(event: Event, context: Context) -> Sentence:
    tokens, limit = _n(event, "output_tokens"), _n(event, "limit")
    how = {
        Cause.EOS: f"the model ended its answer after {_count(tokens, 'token')}",
        Cause.LENGTH: f"it reached max_tokens ({limit:,})"
        if limit
        else f"it reached its limit of {_count(tokens, 'token')}",
        Cause.STOP_TOKEN: f"it reached a stop token after {_count(tokens, 'token')}",
        Cause.STOP_STRING: f"it wrote the stop string “{' '.join(event.text.split()[:5])}”",
    }.get(event.cause, REASONS[event.cause])
    kept, freed = _n(event, "cached_blocks"), _n(event, "freed_blocks")
    return Sentence(
        f"{_who(event, context)} finished: {how}.",
        f"{_were(kept, 'block', 'stays stay')} cached; {_were(freed, 'block')} freed.",
    )


def _cancelled(event: Event, context: Context) -> Sentence:
    tokens, freed = _n(event, "output_tokens"), _n(event, "freed_blocks")
    return Sentence(
        f"{_who(event, context)} was cancelled {because(event)}.",
        f"It had written {_count(tokens, 'token')}; {_were(freed, 'block')} freed.",
    )


def _failed(event: Event, context: Context) -> Sentence:
    freed = f"{_were(_n(event, 'freed_blocks'), 'block')} freed; other requests go on."
    return Sentence(
        f"{_who(event, context)} failed {because(event)}.", f"{_said(event)} {freed}" if event.text else freed
    )


def _step(event: Event, context: Context) -> Sentence:
    prefill, decode, sequences = (_n(event, k) for k in ("prefill_tokens", "decode_tokens", "sequences"))
    if not prefill + decode:
        return Sentence(
            f"Step {event.step} had nothing to compute.", f"{_were(_n(event, 'waiting'), 'request', 'is are')} waiting."
        )
    seconds = float(event.numbers.get("seconds", 0))
    return Sentence(
        f"Step {event.step} computed {_count(prefill + decode, 'token')} for {_count(sequences, 'sequence')}.",
        f"{decode:,} by decode and {prefill:,} by prefill, in {duration(seconds)}.",
    )


def _cache_reset(event: Event, context: Context) -> Sentence:
    blocks = _count(_n(event, "blocks"), "block")
    return Sentence(f"The prefix cache was emptied {because(event)}.", f"The text of {blocks} can no longer be found.")


def _paused(event: Event, context: Context) -> Sentence:
    stays = "Requests keep their blocks."
    if event.cause is Cause.BREAKPOINT and event.text:
        return Sentence(f"The engine was paused because {event.text}.", stays)
    return Sentence(f"The engine was paused {because(event)}.", f"{_said(event)} {stays}" if event.text else stays)


def _continued(event: Event, context: Context) -> Sentence:
    return Sentence(f"The engine continued {because(event)}.", "Requests go on where they stopped.")


WORDS: dict[EventKind, Callable[[Event, Context], Sentence]] = {
    EventKind.SUBMITTED: _submitted, EventKind.REFUSED: _refused, EventKind.ADMITTED: _admitted,
    EventKind.CACHE_HIT: _cache_hit, EventKind.CACHE_MISS: _cache_miss, EventKind.ALLOCATED: _allocated,
    EventKind.SHARED: _shared, EventKind.FORKED: _forked, EventKind.COPIED: _copied, EventKind.PUBLISHED: _published,
    EventKind.NULLED: _nulled,
    EventKind.EVICTED: _evicted, EventKind.FREED: _freed, EventKind.PREEMPTED: _preempted,
    EventKind.SWAPPED_OUT: _swapped_out, EventKind.SWAPPED_IN: _swapped_in, EventKind.RESUMED: _resumed, EventKind.BLOCKED: _blocked, EventKind.FINISHED: _finished,
    EventKind.CANCELLED: _cancelled, EventKind.FAILED: _failed, EventKind.STEP: _step,
    EventKind.CACHE_RESET: _cache_reset, EventKind.PAUSED: _paused, EventKind.CONTINUED: _continued,
}  # fmt: skip
