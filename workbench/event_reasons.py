"""What stands behind "because": the words for each cause of an event."""

from __future__ import annotations

from kvscope.engine.events import Cause, Event

REASONS = {
    Cause.NONE: "the engine decided so", Cause.USER: "the user asked for it", Cause.CLOSED: "the engine was closed",
    Cause.ERROR: "an error occurred", Cause.BREAKPOINT: "a breakpoint was reached", Cause.INVALID: "its options are not valid",
    Cause.POOL_TOO_SMALL: "the pool is too small", Cause.CONTEXT_TOO_LONG: "it is longer than the model reads",
    Cause.QUEUE_FULL: "the queue is full", Cause.CAPACITY: "there was room for it",
    Cause.PREFIX_MATCH: "its text starts in the same way", Cause.NEVER_SEEN: "this text was never seen before",
    Cause.SALT_DIFFERS: "its cache salt differs", Cause.FIRST_DIFFERENCE: "its text differs from there on",
    Cause.FULL_BLOCKS_ONLY: "caching works in full blocks", Cause.EVICTED: "its text was evicted",
    Cause.PROMPT: "its prompt needs room", Cause.DECODE: "its next token needs room",
    Cause.RECOMPUTE: "its tokens are computed again", Cause.RESERVED: "all that it may need is reserved", Cause.COPY_ON_WRITE: "it wrote into a shared block",
    Cause.SHARED_WRITE: "another reader still needs the old one", Cause.FORK: "it split into samples",
    Cause.CACHED_WRITE: "cached text is never written over", Cause.SAME_TEXT: "another block holds the same text",
    Cause.LEFT: "its request leaves it", Cause.SUPERSEDED: "a fuller block holds its tokens too",
    Cause.PARALLEL_SAMPLING: "several samples were asked for", Cause.BEAM_SEARCH: "beam search keeps several beams",
    Cause.BLOCK_FULL: "it is full", Cause.OUT_OF_WINDOW: "no token to come looks so far back",
    Cause.LEAST_RECENTLY_USED: "it had been unused for longest",
    Cause.LEAST_FREQUENTLY_USED: "it had been used least often", Cause.FIRST_IN: "it had been cached for longest",
    Cause.MOST_RECENTLY_USED: "it had been used last", Cause.NOT_HIT_TWICE: "it had not been found twice",
    Cause.LOWEST_PRIORITY: "it had served only the least important requests",
    Cause.CACHE_RESET: "the cache was reset", Cause.NO_FREE_BLOCK: "no block was free or evictable",
    Cause.TOKEN_BUDGET: "the token budget of this step is used up",
    Cause.MAX_NUM_SEQS: "the step already holds as many sequences as it may", Cause.BEHIND: "others came first",
    Cause.AFTER_PREEMPTION: "a step that preempts admits nobody",
    Cause.SHARED_PREFIX: "another is about to compute what both begin with",
    Cause.DECODE_STEP: "a step that decodes takes in no prefill",
    Cause.SWAPPED_IN: "its KV came back from host memory",
    Cause.BATCH_RUNNING: "the static batch still runs",
    Cause.PRIORITY: "another with a better priority needed its place", Cause.DEADLINE: "its deadline has passed", Cause.EOS: "the model ended its answer",
    Cause.STOP_TOKEN: "it reached a stop token", Cause.STOP_STRING: "it reached a stop string",
    Cause.LENGTH: "it reached its longest length", Cause.FINISHED: "its reader finished",
    Cause.CANCELLED: "its reader was cancelled", Cause.PREEMPTED: "its reader was preempted",
    Cause.FAILED: "its reader failed", Cause.EXCEPTION: "an error occurred inside the step",
    Cause.NAN_LOGITS: "the model returned numbers that are not finite", Cause.OUT_OF_MEMORY: "memory ran out",
}  # fmt: skip


def because(event: Event) -> str:
    """because its text was evicted"""
    return f"because {REASONS[event.cause]}"
