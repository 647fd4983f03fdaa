"""A deterministic paged engine without a model: realistic snapshots and events for the views, in milliseconds.

Sixteen requests on 127 blocks of 16 tokens: a shared system prompt, documents asked about twice, two requests that
split into samples (so blocks are shared and copied on write), and a pool small enough for evictions and preemptions.
Tokens are tuples of names, so that equal prefixes are equal text; generated tokens differ from sample to sample.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from kvscope.engine.events import Cause, Event, EventKind, EventLog
from kvscope.engine.snapshot import NOT_CACHED, ROOT, BlockState, EngineSnapshot, RequestState
from kvscope.workbench.theme import DARK, OwnerSlots
from kvscope.workbench.views.base import Frame, Selection

SECONDS_A_STEP = 0.05
BLOCK_BYTES = 720 * 1024

# (arrives at step, prompt as (text, tokens) pieces, output tokens, samples, first words)
WORK = (
    (2, (("system", 64), ("q1", 12)), 160, 1, "Explain paged memory to a ten year old"),
    (5, (("system", 64), ("q2", 28)), 190, 1, "What is the difference between latency"),
    (14, (("system", 64), ("q3", 52)), 112, 4, "Write a two line poem about a queue"),
    (24, (("atlas", 224), ("q4", 14)), 202, 1, "In 1962 the Atlas computer in Manchester"),
    (34, (("system", 64), ("q5", 18)), 242, 1, "Why does a model need to remember"),
    (44, (("system", 64), ("q6", 18)), 139, 3, "Translate into German: the cache is full"),
    (56, (("atlas", 224), ("q7", 15)), 201, 1, "In 1962 the Atlas computer in Manchester"),
    (63, (("notes", 176), ("q8", 6)), 106, 1, "Meeting notes, platform team"),
    (79, (("system", 64), ("q9", 14)), 101, 1, "Give me one exercise about fragmentation"),
    (80, (("course", 160), ("q4", 14)), 105, 1, "Course page, week five"),
    (91, (("system", 64), ("q11", 14)), 101, 3, "Name two reasons why a scheduler may stop"),
    (92, (("mail", 208), ("q4", 14)), 76, 1, "From: operations. To: everyone on call"),
    (108, (("atlas", 224), ("q13", 12)), 129, 1, "In 1962 the Atlas computer in Manchester"),
    (128, (("system", 64), ("q5", 18)), 92, 2, "Why does a model need to remember"),
    (143, (("course", 160), ("q8", 6)), 80, 1, "Course page, week five"),
    (157, (("notes", 176), ("q4", 14)), 81, 1, "Meeting notes, platform team"),
)


@dataclass
class Sequence:
    child: int
    tokens: list
    table: list[int] = field(default_factory=list)
    computed: int = 0
    done: bool = False


@dataclass
class FakeRequest:
    id: int
    arrival: int
    prompt: list
    max_tokens: int
    n: int
    label: str
    sequences: list[Sequence] = field(default_factory=list)
    status: str = "waiting"
    cached: int = 0
    blocked: str = ""
    admitted_before: bool = False
    first_token: float | None = None  # seconds
    waiting_since: int = 0


class FakeEngine:
    """`step()` once, then read `snapshot()` and `events`."""

    def __init__(self, num_blocks: int = 128, *, block_size: int = 16, budget: int = 64, work=WORK, max_seqs: int = 16):
        self.block_size, self.num_blocks, self.budget, self.max_seqs = block_size, num_blocks, budget, max_seqs
        self.events = EventLog()
        self.step_number = 0
        self.state = "running"
        self.ref = np.zeros(num_blocks, np.int32)
        self.generation = np.zeros(num_blocks, np.int32)
        self.filled = np.zeros(num_blocks, np.int32)
        self.last_used = np.zeros(num_blocks, np.int32)
        self.hits = np.zeros(num_blocks, np.int32)
        self.free = list(range(1, num_blocks))
        self.cached: list[int] = []  # the first is evicted first
        self.text_of: dict[int, tuple] = {}
        self.block_of: dict[tuple, int] = {}
        self.computed_for: dict[int, int] = {}
        self.gone: dict[tuple, int] = {}
        self.running: list[FakeRequest] = []
        self.waiting: list[FakeRequest] = []
        self.future = [self._request(i, *row) for i, row in enumerate(work, 1)]

    def _request(self, i, at, pieces, max_tokens, n, label) -> FakeRequest:
        prompt = [(name, k) for name, count in pieces for k in range(count)]
        return FakeRequest(i, at, prompt, max_tokens, n, label)

    def log(
        self,
        kind: EventKind,
        cause: Cause = Cause.NONE,
        *,
        block: int = -1,
        text: str = "",
        request=-1,
        child=0,
        **numbers,
    ):
        generation = int(self.generation[block]) if block >= 0 else 0
        self.events.append(self.step_number, self.step_number * SECONDS_A_STEP, kind, request, child, 0, block,
                           generation, cause, numbers, text)  # fmt: skip

    # -- blocks ---------------------------------------------------------------------------------------------------

    def _key(self, sequence: Sequence, logical: int) -> tuple:
        return tuple(sequence.tokens[: (logical + 1) * self.block_size])

    def _take(self, request: FakeRequest, sequence: Sequence, cause: Cause, logical: int) -> int:
        if self.free:
            block = self.free.pop(0)
        elif self.cached:
            block = self.cached.pop(0)
            text = self.text_of.pop(block)
            self.block_of.pop(text, None)
            self.gone[text] = self.step_number
            self.log(EventKind.EVICTED, Cause.LEAST_RECENTLY_USED, block=block, needed_by=request.id,
                     needed_by_child=sequence.child,
                     idle_steps=self.step_number - int(self.last_used[block]))  # fmt: skip
        else:
            return -1
        self.generation[block] += 1
        self.ref[block], self.filled[block] = 1, 0
        self.log(EventKind.ALLOCATED, cause, block=block, request=request.id, child=sequence.child, logical=logical)
        return block

    def _drop(self, request: FakeRequest, sequence: Sequence, cause: Cause) -> tuple[int, int]:
        kept = freed = 0
        for block in reversed(sequence.table):
            self.ref[block] -= 1
            if self.ref[block]:
                continue
            cached = block in self.text_of
            (self.cached if cached else self.free).append(block)
            kept, freed = kept + cached, freed + (not cached)
            if not cached:
                self.filled[block] = 0
            self.log(EventKind.FREED, cause, block=block, request=request.id, child=sequence.child, cached=int(cached))
        sequence.table = []
        return kept, freed

    # -- one step -------------------------------------------------------------------------------------------------

    def step(self) -> None:
        self.step_number += 1
        prefill = decode = 0
        for request in [r for r in self.future if r.arrival == self.step_number]:
            self.waiting.append(request)
            request.waiting_since = self.step_number - 1
            self.future.remove(request)
            self.log(EventKind.SUBMITTED, Cause.USER, request=request.id, text=request.label, prompt_tokens=len(request.prompt),
                     max_tokens=request.max_tokens, n=request.n)  # fmt: skip
        preempted = False
        for request in list(self.running):
            for sequence in request.sequences:
                if request not in self.running or sequence.done or sequence.computed < len(sequence.tokens) - 1:
                    continue
                if self._decode(request, sequence):
                    decode += 1
                else:
                    preempted = True
        budget = self.budget - decode
        for request in list(self.running):
            budget, prefill = self._prefill(request, budget, prefill)
        while self.waiting and budget > 0 and not preempted:
            if not self._admit(self.waiting[0]):
                break
            request = self.waiting.pop(0)
            self.running.append(request)
            budget, prefill = self._prefill(request, budget, prefill)
        self._finish()
        used = self.ref[1:] > 0
        self.log(EventKind.STEP, prefill_tokens=prefill, decode_tokens=decode, running=len(self.running),
                 waiting=len(self.waiting), used_blocks=int(used.sum()), cached_blocks=len(self.cached),
                 used_slots=int(self.filled[1:][used].sum()), seconds=SECONDS_A_STEP, schedule_seconds=0.0004,
                 requests=len(self.running), sequences=sum(len(r.sequences) for r in self.running),
                 preempted=sum(r.status == "preempted" for r in self.waiting), gaps=decode,
                 gap_seconds=decode * SECONDS_A_STEP, longest_gap=SECONDS_A_STEP * bool(decode))  # fmt: skip

    def _decode(self, request: FakeRequest, sequence: Sequence) -> bool:
        """Write one token; False when the request lost its blocks instead."""
        position = sequence.computed
        logical = position // self.block_size
        source = sequence.table[logical] if logical < len(sequence.table) else -1
        if source < 0 or self.ref[source] > 1:
            cause = Cause.DECODE if source < 0 else Cause.COPY_ON_WRITE
            block = self._take(request, sequence, cause, logical)
            while block < 0:
                victim = self.running[-1]
                self._preempt(victim, request, sequence)
                if victim is request:
                    return False
                block = self._take(request, sequence, cause, logical)
            if source < 0:
                sequence.table.append(block)
            else:
                reader = next(s for s in request.sequences if s is not sequence and source in s.table)
                self.ref[source] -= 1
                sequence.table[logical] = block
                self.filled[block] = position % self.block_size
                self.log(EventKind.COPIED, Cause.SHARED_WRITE, block=block, request=request.id, child=sequence.child,
                         source=source, source_generation=int(self.generation[source]), reader=request.id,
                         tokens=position % self.block_size, bytes=BLOCK_BYTES, reader_child=reader.child)  # fmt: skip
        self._write(request, sequence, position + 1)
        sequence.tokens.append(("out", request.id, sequence.child, position))
        return True

    def _write(self, request: FakeRequest, sequence: Sequence, upto: int) -> None:
        first = sequence.computed // self.block_size
        sequence.computed = upto
        for block in sequence.table:
            self.last_used[block] = self.step_number
        for logical in range(first, len(sequence.table)):
            block = sequence.table[logical]
            self.filled[block] = max(self.filled[block], min(self.block_size, upto - logical * self.block_size))
            key = self._key(sequence, logical)
            if self.filled[block] == self.block_size and block not in self.text_of and key not in self.block_of:
                self.text_of[block], self.block_of[key] = key, block
                self.computed_for[block], self.hits[block] = request.id, 0
                self.log(EventKind.PUBLISHED, Cause.BLOCK_FULL, block=block, request=request.id,
                         child=sequence.child, logical=logical, tokens=self.block_size)  # fmt: skip

    def _prefill(self, request: FakeRequest, budget: int, total: int) -> tuple[int, int]:
        sequence = request.sequences[0]
        rest = len(sequence.tokens) - sequence.computed
        if (rest <= 1 and sequence.computed) or budget <= 0 or any(s.done for s in request.sequences):
            return budget, total
        count = min(rest, budget)
        self._write(request, sequence, sequence.computed + count)
        if sequence.computed == len(sequence.tokens):
            fresh = len(sequence.tokens) == len(request.prompt)
            sequence.tokens.append(("out", request.id, sequence.child, sequence.computed))
            if request.first_token is None:
                request.first_token = self.step_number * SECONDS_A_STEP
            if fresh and request.n > 1:
                self._fork(request, sequence)
        return budget - count, total + count

    def _fork(self, request: FakeRequest, sequence: Sequence) -> None:
        for child in range(1, request.n):
            tokens = [*sequence.tokens[:-1], ("out", request.id, child, sequence.computed)]
            request.sequences.append(Sequence(child, tokens, list(sequence.table), sequence.computed))
            for block in sequence.table:
                self.ref[block] += 1
                self.log(EventKind.SHARED, Cause.FORK, block=block, request=request.id, child=child,
                         ref_count=int(self.ref[block]))  # fmt: skip
        self.log(EventKind.FORKED, Cause.PARALLEL_SAMPLING, request=request.id, samples=request.n,
                 shared_blocks=len(sequence.table))  # fmt: skip

    def _admit(self, request: FakeRequest) -> bool:
        if not request.sequences:
            request.sequences = [Sequence(0, list(request.prompt))]
        live = [s for s in request.sequences if not s.done]
        hits, misses = [], []
        for sequence in live:
            found = []
            for logical in range((len(sequence.tokens) - 1) // self.block_size):
                block = self.block_of.get(self._key(sequence, logical))
                if block is None:
                    break
                found.append(block)
            hits.append(found)
            misses.append(-(-len(sequence.tokens) // self.block_size) - len(found))
        needed, reserved = sum(misses), 3
        held = {b for found in hits for b in found}
        available = len(self.free) + sum(b not in held for b in self.cached)
        seats = self.max_seqs - sum(len(r.sequences) for r in self.running)
        if available < needed + reserved or seats < request.n:
            cause = Cause.NO_FREE_BLOCK if available < needed + reserved else Cause.MAX_NUM_SEQS
            why = f"{cause}:{needed}:{available}"
            if request.blocked != why:
                request.blocked = why
                self.log(EventKind.BLOCKED, cause, request=request.id, needed=needed, available=available,
                         reserved=reserved)  # fmt: skip
            return False
        for sequence, found in zip(live, hits, strict=True):
            self._take_prefix(request, sequence, found)
        self._say_admitted(request, live, hits, needed)
        return True

    def _take_prefix(self, request: FakeRequest, sequence: Sequence, found: list[int]) -> None:
        for block in found:
            if not self.ref[block]:
                self.cached.remove(block)
            self.ref[block] += 1
            self.hits[block] += 1
            self.last_used[block] = self.step_number
            self.log(EventKind.SHARED, Cause.PREFIX_MATCH, block=block, request=request.id, child=sequence.child,
                     ref_count=int(self.ref[block]))  # fmt: skip
        sequence.table = list(found)
        cause = Cause.RECOMPUTE if request.admitted_before else Cause.PROMPT
        for logical in range(len(found), -(-len(sequence.tokens) // self.block_size)):
            sequence.table.append(self._take(request, sequence, cause, logical))
        sequence.computed = len(found) * self.block_size
        if sequence is not request.sequences[0]:  # a resumed sample recomputes at once, to keep the fake small
            self._write(request, sequence, len(sequence.tokens) - 1)

    def _say_admitted(self, request, live, hits, needed) -> None:
        found, total = hits[0], len(live[0].tokens)
        if request.admitted_before:
            for sequence, hit in zip(live, hits, strict=True):
                cached, total = len(hit) * self.block_size, len(sequence.tokens)
                self.log(EventKind.RESUMED, Cause.CAPACITY, request=request.id, child=sequence.child, total_tokens=total,
                         cached_tokens=cached, recompute_tokens=total - cached, needed=needed)  # fmt: skip
        else:
            request.cached = len(found) * self.block_size
            self.log(EventKind.ADMITTED, Cause.CAPACITY, request=request.id, prompt_tokens=total,
                     cached_tokens=request.cached, waited_steps=self.step_number - request.arrival)  # fmt: skip
            if found:
                self.log(EventKind.CACHE_HIT, Cause.PREFIX_MATCH, request=request.id, cached_tokens=request.cached,
                         prompt_tokens=total, blocks=len(found),
                         computed_for=self.computed_for[found[-1]])  # fmt: skip
            else:
                step = self.gone.get(self._key(live[0], 0))
                self.log(EventKind.CACHE_MISS, Cause.EVICTED if step else Cause.NEVER_SEEN, request=request.id,
                         matched_tokens=0, prompt_tokens=total, evicted_step=step or -1, at_token=0)  # fmt: skip
        request.status, request.blocked, request.admitted_before = "running", "", True

    def _preempt(self, request: FakeRequest, needed_by: FakeRequest, sequence: Sequence) -> None:
        for own in [s for s in request.sequences if not s.done]:
            tokens, blocks = own.computed, len(own.table)
            own.computed = 0
            self._drop(request, own, Cause.PREEMPTED)
            self.log(EventKind.PREEMPTED, Cause.NO_FREE_BLOCK, request=request.id, child=own.child, released_blocks=blocks,
                     recompute_tokens=tokens, needed_by=needed_by.id, needed_by_child=sequence.child)  # fmt: skip
        self.running.remove(request)
        self.waiting.insert(0, request)
        request.status, request.waiting_since = "preempted", self.step_number

    def _finish(self) -> None:
        for request in list(self.running):
            for sequence in request.sequences:
                output = len(sequence.tokens) - len(request.prompt)
                if not sequence.done and output >= request.max_tokens:
                    sequence.done = True
                    kept, freed = self._drop(request, sequence, Cause.FINISHED)
                    self.log(EventKind.FINISHED, Cause.LENGTH, request=request.id, child=sequence.child,
                             output_tokens=output, cached_blocks=kept, freed_blocks=freed,
                             limit=request.max_tokens, ttft=request.first_token - request.arrival * SECONDS_A_STEP,
                             e2e=(self.step_number - request.arrival) * SECONDS_A_STEP)  # fmt: skip
            if all(s.done for s in request.sequences):
                self.running.remove(request)

    # -- what a viewer sees ---------------------------------------------------------------------------------------

    def snapshot(self) -> EngineSnapshot:
        state = np.where(self.ref > 1, BlockState.SHARED, np.where(self.ref == 1, BlockState.ACTIVE, BlockState.EMPTY))
        state[self.cached] = BlockState.CACHED
        state[0] = BlockState.PINNED
        requests, owner = [], np.full(self.num_blocks, -1, np.int32)
        for request in sorted([*self.running, *self.waiting], key=lambda r: r.id):
            sequences = [s for s in request.sequences if not s.done] or [Sequence(0, list(request.prompt))]
            for sequence in sequences:
                table = np.array(sequence.table, np.int32)
                owner[table[owner[table] < 0]] = len(requests)
                requests.append(
                    RequestState(request.id, sequence.child, request.status, request.n, len(request.prompt),
                                 sequence.computed, request.cached, len(sequence.tokens) - len(request.prompt),
                                 (table,), request.blocked, label=request.label, first_token=request.first_token,
                                 arrival=request.arrival * SECONDS_A_STEP, waiting_since_step=request.waiting_since,
                                 queue_place=self.waiting.index(request) if request in self.waiting else -1)
                )  # fmt: skip
        parent = np.full(self.num_blocks, NOT_CACHED, np.int32)
        computed_for = np.full(self.num_blocks, -1, np.int32)
        for block, key in self.text_of.items():
            parent[block] = self.block_of.get(key[: -self.block_size], ROOT)
            computed_for[block] = self.computed_for[block]
        return EngineSnapshot(
            step=self.step_number, time=self.step_number * SECONDS_A_STEP, state=self.state,
            block_size=self.block_size, num_blocks=self.num_blocks, block_state=state.astype(np.uint8),
            ref_count=self.ref.copy(), generation=self.generation.copy(), filled=self.filled.copy(), owner=owner,
            last_used_step=self.last_used.copy(), eviction_order=np.array(self.cached, np.int32), parent=parent,
            num_hits=np.where(parent == NOT_CACHED, 0, self.hits).astype(np.int32), computed_for=computed_for,
            requests=tuple(requests), counters={},
        )  # fmt: skip


class FakeSource:
    """Frames one after another, as a viewer would make them."""

    def __init__(self, engine: FakeEngine | None = None, *, state: str = "paused"):
        self.engine = engine or FakeEngine()
        self.engine.state = state
        self.slots = OwnerSlots()
        self.next_index = 0

    def frame(self, *, steps: int = 1, selection: Selection | None = None) -> Frame:
        for _ in range(steps):
            self.engine.step()
        events, self.next_index, lost = self.engine.events.since(self.next_index)
        return Frame(self.engine.snapshot(), events, lost, selection, None,
                     self.engine.step_number * SECONDS_A_STEP, self.slots)  # fmt: skip

    def frames(self, count: int):
        return (self.frame() for _ in range(count))


def seconds_of(view, line, each=lambda: None) -> tuple[list[int], Frame, FakeSource]:
    """Bytes that a running engine's view sends in each of 22 seconds, ten steps a second; the last frame, and its source.
    `each` is called after every step."""
    source, sizes = FakeSource(state="running"), []
    for i in range(220):
        frame = source.frame()
        view.update(Frame(frame.snapshot, frame.events, now=i / 10, slots=frame.slots))
        each()
        sizes.append(line.size())
    return np.add.reduceat(sizes, np.arange(0, 220, 10)).tolist(), frame, source


def read_twice(view, frame: Frame, source: FakeSource, told) -> tuple:
    """What `told()` says in another theme, and again after `view` has got all events at once, from the start on."""
    view.restyle(DARK)
    view.update(Frame(frame.snapshot, (), now=50.0, slots=frame.slots))
    said = told()
    view.reset()
    view.update(Frame(frame.snapshot, source.engine.events.since(0)[0], now=100.0, slots=frame.slots))
    return said, told()


def frame_of(core, selection: Selection | None = None) -> Frame:
    """All that a paused engine has done, as one frame."""
    return Frame(core.snapshot("paused"), core.events.since(0)[0], 0, selection, None, 1.0, OwnerSlots())


def all_events(steps: int = 290) -> list[Event]:
    engine = FakeEngine()
    for _ in range(steps):
        engine.step()
    return engine.events.since(0)[0]
