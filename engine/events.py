"""What the engine did and why: typed records in a bounded ring with a growing index.

The engine thread appends; viewers pull with `since(index)` at their own pace and learn how many records they
missed. Needs nothing but the standard library, so that a recording can be read where torch is not installed.

| kind | about | cause | numbers |
|---|---|---|---|
| SUBMITTED | a request arrived | USER | prompt_tokens, max_tokens, n, beam_width (of a beam search) |
| REFUSED | it can never fit, or is invalid | POOL_TOO_SMALL, CONTEXT_TOO_LONG, QUEUE_FULL, DEADLINE, INVALID | needed, available |
| ADMITTED | from waiting to running | CAPACITY | prompt_tokens, cached_tokens, waited_steps |
| CACHE_HIT | prefix found, once per admission | PREFIX_MATCH | cached_tokens, prompt_tokens, blocks, computed_for (request id) |
| CACHE_MISS | prefix not (wholly) found | NEVER_SEEN, EVICTED, SALT_DIFFERS, FIRST_DIFFERENCE, FULL_BLOCKS_ONLY, NO_FREE_BLOCK (for a copy of the last block) | matched_tokens, prompt_tokens, evicted_step, at_token |
| ALLOCATED | a block was taken | PROMPT, DECODE, COPY_ON_WRITE, RECOMPUTE, RESERVED, SWAPPED_IN | logical (place in the table) |
| SHARED | one more reader of a block | PREFIX_MATCH, FORK, SWAPPED_IN | ref_count |
| FORKED | one request became n samples, or beams | PARALLEL_SAMPLING, BEAM_SEARCH | samples, shared_blocks |
| FORKED | a beam goes on from another's text, in the place of one that was dropped | BEAM_SEARCH | parent (child), shared_blocks |
| COPIED | copy-on-write; block_id is the copy | SHARED_WRITE, FORK, CACHED_WRITE | source, source_generation, tokens, bytes, reader (request id, −1 none), reader_child |
| NULLED | a block fell out of its group's window: the null block takes its place in the table | OUT_OF_WINDOW | logical, window |
| PUBLISHED | a block can now be found by its text | BLOCK_FULL, LEFT (partly filled, and its request goes) | logical, tokens |
| EVICTED | a cached block lost its text | to make room, by what the strategy saw in it: LEAST_RECENTLY_USED, LEAST_FREQUENTLY_USED, FIRST_IN, MOST_RECENTLY_USED, NOT_HIT_TWICE, LOWEST_PRIORITY; else SUPERSEDED, SAME_TEXT, CACHE_RESET, STOP_STRING, NAN_LOGITS | idle_steps; to make room: needed_by (request id), needed_by_child |
| FREED | a block lost its last reader | FINISHED, CANCELLED, PREEMPTED, FAILED, BEAM_SEARCH, OUT_OF_WINDOW, COPY_ON_WRITE | cached (1: its text stays, 0: empty) |
| PREEMPTED | a running request lost its blocks | NO_FREE_BLOCK, PRIORITY, USER | released_blocks, recompute_tokens, needed_by, needed_by_child; where the KV waits in host memory: swapped_tokens |
| SWAPPED_OUT | the blocks of preempted samples are moved to host memory, each once | as PREEMPTED | blocks, bytes, samples, used_host_blocks; of beams: beam_width |
| SWAPPED_IN | and back | CAPACITY | as SWAPPED_OUT |
| RESUMED | a preempted request runs again | CAPACITY | cached_tokens, recompute_tokens, total_tokens; from host memory: swapped_tokens |
| BLOCKED | the reason why a waiting request waits changed | NO_FREE_BLOCK, TOKEN_BUDGET, MAX_NUM_SEQS, BEHIND, AFTER_PREEMPTION, BATCH_RUNNING, DECODE_STEP, SHARED_PREFIX | needed, available, reserved, behind (request id) |
| FINISHED | one sample ended | EOS, STOP_TOKEN, STOP_STRING, LENGTH | output_tokens, cached_blocks (their text stays), freed_blocks (empty now), limit, ttft (of its request), e2e (arrival to the end of this sample), both in seconds |
| CANCELLED | it was ended from outside | USER, CLOSED, DEADLINE | output_tokens, cached_blocks, freed_blocks |
| FAILED | a fault inside a step ended it | EXCEPTION, NAN_LOGITS, OUT_OF_MEMORY | freed_blocks |
| STEP | summary of one step | — | prefill_tokens, decode_tokens, running, waiting, used_blocks, cached_blocks, used_slots, seconds, schedule_seconds, requests, sequences, preempted, padding_tokens, token_budget (the most tokens of a step), gaps (inter-token latencies observed), gap_seconds (their sum), longest_gap |
| CACHE_RESET | the prefix cache was emptied | USER | blocks |
| PAUSED / CONTINUED | the driver stopped or started | USER, ERROR, BREAKPOINT (of run_until; `text` says why) | — |
"""

from __future__ import annotations

import threading
from collections import deque
from enum import StrEnum
from typing import NamedTuple


class EventKind(StrEnum):
    SUBMITTED = "submitted"
    REFUSED = "refused"
    ADMITTED = "admitted"
    CACHE_HIT = "cache_hit"
    CACHE_MISS = "cache_miss"
    ALLOCATED = "allocated"
    SHARED = "shared"
    FORKED = "forked"
    COPIED = "copied"
    NULLED = "nulled"
    PUBLISHED = "published"
    EVICTED = "evicted"
    FREED = "freed"
    PREEMPTED = "preempted"
    SWAPPED_OUT = "swapped_out"
    SWAPPED_IN = "swapped_in"
    RESUMED = "resumed"
    BLOCKED = "blocked"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"
    STEP = "step"
    CACHE_RESET = "cache_reset"
    PAUSED = "paused"
    CONTINUED = "continued"


class Cause(StrEnum):
    NONE = "none"
    USER = "user"
    CLOSED = "closed"
    ERROR = "error"
    BREAKPOINT = "breakpoint"
    INVALID = "invalid"
    POOL_TOO_SMALL = "pool_too_small"
    CONTEXT_TOO_LONG = "context_too_long"
    QUEUE_FULL = "queue_full"
    CAPACITY = "capacity"
    PREFIX_MATCH = "prefix_match"
    NEVER_SEEN = "never_seen"
    SALT_DIFFERS = "salt_differs"
    FIRST_DIFFERENCE = "first_difference"
    FULL_BLOCKS_ONLY = "full_blocks_only"
    EVICTED = "evicted"
    PROMPT = "prompt"
    DECODE = "decode"
    RECOMPUTE = "recompute"
    RESERVED = "reserved"
    COPY_ON_WRITE = "copy_on_write"
    SHARED_WRITE = "shared_write"
    CACHED_WRITE = "cached_write"
    SAME_TEXT = "same_text"
    FORK = "fork"
    PARALLEL_SAMPLING = "parallel_sampling"
    BEAM_SEARCH = "beam_search"
    BLOCK_FULL = "block_full"
    LEFT = "left"
    SUPERSEDED = "superseded"
    OUT_OF_WINDOW = "out_of_window"
    LEAST_RECENTLY_USED = "least_recently_used"
    LEAST_FREQUENTLY_USED = "least_frequently_used"
    FIRST_IN = "first_in"
    MOST_RECENTLY_USED = "most_recently_used"
    NOT_HIT_TWICE = "not_hit_twice"
    LOWEST_PRIORITY = "lowest_priority"
    CACHE_RESET = "cache_reset"
    NO_FREE_BLOCK = "no_free_block"
    TOKEN_BUDGET = "token_budget"
    MAX_NUM_SEQS = "max_num_seqs"
    BEHIND = "behind"
    AFTER_PREEMPTION = "after_preemption"
    BATCH_RUNNING = "batch_running"
    DECODE_STEP = "decode_step"
    SHARED_PREFIX = "shared_prefix"
    SWAPPED_IN = "swapped_in"
    PRIORITY = "priority"
    DEADLINE = "deadline"
    EOS = "eos"
    STOP_TOKEN = "stop_token"
    STOP_STRING = "stop_string"
    LENGTH = "length"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    PREEMPTED = "preempted"
    FAILED = "failed"
    EXCEPTION = "exception"
    NAN_LOGITS = "nan_logits"
    OUT_OF_MEMORY = "out_of_memory"


class Event(NamedTuple):
    """One record. `request_id` and `block_id` are −1 where the event is not about one; `text` carries the words
    that only the engine knows (a prompt's first words, a refusal's sentence, a fault's message, the matched stop string)."""

    index: int
    step: int
    time: float  # seconds, time.monotonic()
    kind: EventKind
    request_id: int = -1
    child: int = 0
    group: int = 0
    block_id: int = -1
    generation: int = 0
    cause: Cause = Cause.NONE
    numbers: dict[str, float] = {}  # noqa: RUF012  (never mutated)
    text: str = ""


class EventLog:
    """A ring of the newest `capacity` events; `next_index` only grows. One thread appends, any thread reads."""

    def __init__(self, capacity: int = 65_536):
        if capacity < 1:
            raise ValueError(f"capacity={capacity}: the event log needs room for at least 1 event")
        self._ring: deque[Event] = deque(maxlen=capacity)
        self._lock = threading.Lock()
        self.next_index = 0

    def append(
        self,
        step: int,
        time: float,
        kind: EventKind,
        request_id: int = -1,
        child: int = 0,
        group: int = 0,
        block_id: int = -1,
        generation: int = 0,
        cause: Cause = Cause.NONE,
        numbers: dict[str, float] | None = None,
        text: str = "",
    ) -> None:
        with self._lock:
            self._ring.append(
                Event(self.next_index, step, time, kind, request_id, child, group, block_id, generation, cause,
                      numbers or {}, text)
            )  # fmt: skip
            self.next_index += 1

    def since(self, index: int) -> tuple[list[Event], int, int]:
        """Events from `index` on: (events, index to ask for next time, how many were lost in between)."""
        with self._lock:
            oldest = self.next_index - len(self._ring)
            start = max(index, oldest)
            count = self.next_index - start
            if count <= 0:
                return [], self.next_index, 0
            # The newest `count` events: walking from the right costs what is new, not what is kept.
            tail = reversed([event for event, _ in zip(reversed(self._ring), range(count), strict=False)])
            return list(tail), self.next_index, max(0, oldest - index)

    def __len__(self) -> int:
        return len(self._ring)


class Journal:
    """The engine thread's pen: stamps what it emits with the step and time at hand, so that callers name facts only."""

    def __init__(self, log: EventLog):
        self.log = log
        self.step = 0
        self.time = 0.0  # seconds, time.monotonic()

    def emit(
        self,
        kind: EventKind,
        request_id: int = -1,
        child: int = 0,
        group: int = 0,
        block_id: int = -1,
        generation: int = 0,
        cause: Cause = Cause.NONE,
        numbers: dict[str, float] | None = None,
        text: str = "",
    ) -> None:
        self.log.append(
            self.step, self.time, kind, request_id, child, group, block_id, generation, cause, numbers, text
        )
