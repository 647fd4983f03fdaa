"""Who computes how many tokens in the next step.

Two passes over sequences, oldest first (or as `policies` says), share one budget of tokens:

1. *Running.* Each gets what it lacks: one token when it decodes, a chunk while its prefill lasts. A chunk leaves a token
   for every decoding sequence, so a long prompt slows nobody's text. Blocks are taken here; when none is left the
   youngest running sequence is preempted: it loses its blocks and goes back to the head of the line, where prompt and
   output so far become its next prefill. The oldest never loses its blocks to another, so it always finishes.
2. *Waiting*, unless pass 1 preempted. Strictly in order: the head is admitted when a seat, a token of the budget and
   blocks for its **whole** prefill are there, beside what running prefills still need and the watermark. Otherwise
   everyone waits, and the head knows why; or some pass it, where `max_skips` allows that, each at most so many times.

A policy may first make way for whoever waits with a better priority, or keep prefill and decode in steps of their own.

A sequence that was scheduled is never preempted in the same step: victims are younger than whoever needs the block.
The beams of a request are scheduled, and preempted, all together or not at all.
"""

from __future__ import annotations

import math
import time
from bisect import insort
from collections import deque

from ..config import EngineConfig
from ..events import Cause, EventKind, Journal
from ..kvcache.block_table import BlockTables
from ..kvcache.prefix_cache import Hit
from ..metrics import Metrics
from ..request import Blocked, RequestStatus, Sequence
from .plan import Plan
from .policies import POLICIES, choose_victim
from .queue import WaitingQueue

EXPLAINED_PER_STEP = 64  # newcomers to the line that get their first BLOCKED event in one step
MAX_PASSING = 16  # places behind a head that cannot be admitted that are looked at in one step


class Scheduler:
    """Owns the line and the running list (both by age), and moves sequences between them."""

    def __init__(self, config: EngineConfig, tables: BlockTables, journal: Journal, metrics: Metrics):
        self.config = config
        self.tables = tables
        self.journal = journal
        self.metrics = metrics
        self.policy = POLICIES[config.scheduling_policy]
        self.waiting = WaitingQueue(self.policy)
        self.running: list[Sequence] = []  # by the policy's run_key
        self._batch: list[Sequence] = []  # static batching: who joined since nobody ran
        self._batch_is_open = False
        self.watermark = math.ceil(config.watermark * (config.num_blocks - 1))
        # In the line since the last steps, without a reason yet; bounded although nobody may ever take a step.
        self._unexplained: deque[Sequence] = deque(maxlen=config.max_waiting_requests + config.max_num_seqs)
        self._blocked_head: Sequence | None = None

    def add(self, seq: Sequence) -> None:
        seq.waiting_since_step = self.journal.step
        self.waiting.add(seq)
        self._unexplained.append(seq)

    @property
    def has_work(self) -> bool:
        return bool(self.running or len(self.waiting))

    # --- one step -------------------------------------------------------------------------------------------------

    def schedule(self, plan: Plan) -> None:
        """Fill the plan: choose its rows and take their blocks. RuntimeError when nothing can be computed."""
        prefill_first = self.policy.prefill_first
        if self.policy.preempts:
            self._make_way(plan)
        displaced = len(plan.preempted)
        budget, reserved = self._schedule_running(plan, only_prefill=prefill_first)
        blocked = None if len(plan.preempted) > displaced else self._admit(plan, budget, reserved)
        if prefill_first and not plan.sequences:
            self._schedule_running(plan)
        if len(plan.preempted) > displaced:
            blocked = Blocked(Cause.AFTER_PREEMPTION)
            while self.running and not plan.sequences:  # whoever the budget was kept for has just left
                self._schedule_running(plan)
        if self.policy.is_static:
            plan.padding_tokens = self._padding(plan)
        self._explain(blocked)
        plan.copies = self.tables.take_copies()
        if not plan.sequences:
            raise RuntimeError(f"nothing could be scheduled: {len(self.running)} run, {len(self.waiting)} wait")
        plan.scheduled = time.monotonic()

    def _schedule_running(self, plan: Plan, *, only_prefill: bool = False) -> tuple[int, int]:
        """Pass 1. Returns (tokens left of the budget, blocks that running prefills will still take)."""
        budget, reserved, running = self.config.max_num_batched_tokens, 0, self.running
        decodes = 0 if only_prefill else sum(not seq.is_prefill for seq in running)  # of those not yet looked at
        longest_chunk = self.config.long_prefill_token_threshold or budget
        i = 0
        while i < len(running) and budget:
            seq = running[i]
            together = self._together(seq)
            i += len(together)
            if seq.is_prefill:
                left = (budget - decodes) // len(together)
                num_tokens = min(seq.prefill_end - seq.num_computed_tokens, left, longest_chunk)
                cause = Cause.RECOMPUTE if seq.num_preemptions else Cause.PROMPT
            elif only_prefill:
                continue
            else:
                num_tokens, cause = min(1, budget // len(together)), Cause.DECODE
                decodes -= len(together)
            if num_tokens > 0:
                while not (has_blocks := self._grow(together, num_tokens, cause)):
                    victim = choose_victim(
                        running[i:] or [seq], self.config.preemption_victim, self.config.max_preemptions
                    )
                    decodes -= 0 if victim is seq or victim.is_prefill else len(self._together(victim))
                    self.preempt(victim, Cause.NO_FREE_BLOCK, needed_by=seq)
                    plan.preempted.append(victim)
                    if victim is seq:
                        break
                if not has_blocks:
                    break
                for member in together:
                    plan.add(member, num_tokens)
                budget -= num_tokens * len(together)
            if seq.is_prefill:
                reserved += sum(map(self.tables.still_to_take, together))
        reserved += sum(self.tables.still_to_take(seq) for seq in running[i:] if seq.is_prefill)
        return budget, reserved

    def _together(self, seq: Sequence) -> list[Sequence]:
        """The running sequences that stand or fall with this one, in order."""
        return seq.request.children if seq.request.advances_together else [seq]

    def _grow(self, together: list[Sequence], num_tokens: int, cause: Cause) -> bool:
        if len(together) > 1 and self.tables.needed_to_grow(together, num_tokens) > self.tables.pool.num_free:
            return False
        return all(self.tables.grow(seq, num_tokens, cause) for seq in together)

    def _blocks_of_beams(self, seq: Sequence) -> int:
        """What the beams of a preempted request need beside the text that they have in common, which `seq` computes first."""
        texts, tables = seq.request.beams.suspended if seq.request.beams else [], self.tables
        if not texts:
            return 0
        whole = tables.blocks_for_beams(seq.num_tokens, len(texts[0]), len(texts))
        return whole - tables.blocks_for(seq.num_tokens)

    def _admit(self, plan: Plan, budget: int, reserved: int) -> Blocked | None:
        """Pass 2. Returns why the head of the line has to wait, None when the line is empty."""
        if self.policy.is_static and not self._open_batch():
            return Blocked(Cause.BATCH_RUNNING)
        seats = self.config.max_num_seqs - sum(seq.num_seats for seq in self.running)
        if seats and budget:
            self.waiting.arrange(self.tables.find_prefix)
        longest_chunk = self.config.long_prefill_token_threshold or budget
        why_head, place = None, 0  # place: how many stand before whoever is looked at
        while seq := self.waiting.at(place):
            before = self.waiting.first_places(place)
            if any(passed.num_times_passed >= self.config.max_skips for passed in before):
                break
            hit = self.tables.find_prefix(seq)
            why = self._why_not(seq, hit, seats, budget, reserved)
            if why is None:
                for passed in before:
                    passed.num_times_passed += 1
                self._start(seq, hit)
                num_tokens = min(budget, seq.num_tokens - seq.num_computed_tokens, longest_chunk)
                self.tables.grow(seq, num_tokens, Cause.RECOMPUTE if seq.num_preemptions else Cause.PROMPT)
                plan.add(seq, num_tokens)
                budget -= num_tokens
                seats -= seq.num_seats
                reserved += self.tables.still_to_take(seq)
                continue
            why_head = why_head or why
            if why.cause is Cause.TOKEN_BUDGET or place == MAX_PASSING:
                break
            place += 1
        if why_head is None or why_head.cause is not Cause.TOKEN_BUDGET:
            self._batch_is_open = False
        return why_head

    def _why_not(self, seq: Sequence, hit: Hit, seats: int, budget: int, reserved: int) -> Blocked | None:
        """What keeps this sequence from being admitted now."""
        if seq.num_seats > seats:
            return Blocked(Cause.MAX_NUM_SEQS, needed=seq.num_seats, available=seats)
        if not budget:
            return Blocked(Cause.TOKEN_BUDGET, needed=seq.num_tokens)
        needed = self.tables.blocks_to_admit(seq, hit) + self._blocks_of_beams(seq)
        available = self.tables.available(seq)
        kept = reserved + self.watermark if self.running else 0
        if needed + kept > available:
            return Blocked(Cause.NO_FREE_BLOCK, needed, max(0, available - kept), kept)
        return None

    def _make_way(self, plan: Plan) -> None:
        """Whoever leads the line with a better priority takes the place of those that run with the worst, as far as it needs
        and if that is enough."""
        head, running = self.waiting.head, self.running
        if head is None:
            return
        hit = self.tables.find_prefix(head)
        worse = [seq for seq in running if seq.request.priority > head.request.priority]
        seats = self.config.max_num_seqs - sum(seq.num_seats for seq in running)
        reserved = sum(map(self.tables.still_to_take, running))
        gained_seats = sum(seq.num_seats for seq in worse)
        gained = sum(self.tables.held(seq) + self.tables.still_to_take(seq) for seq in worse)
        if self._why_not(head, hit, seats + gained_seats, 1, reserved - gained):
            return
        while worse and self._why_not(head, hit, seats, 1, reserved):
            together = list(self._together(worse[-1]))
            victim = together[0]
            del worse[-len(together) :]
            seats += sum(seq.num_seats for seq in together)
            reserved -= sum(map(self.tables.still_to_take, together))
            self.preempt(victim, Cause.PRIORITY, needed_by=head)
            plan.preempted.append(victim)

    def _open_batch(self) -> bool:
        """Static batching: may anyone join? From when nobody runs until the batch is full or cannot be filled further."""
        if not self.running:
            self._batch, self._batch_is_open = [], True
        return self._batch_is_open

    def _padding(self, plan: Plan) -> int:
        """What a batch of rectangular arrays computes beside the tokens of this step: the shorter prompts are filled up to the
        longest when the batch is complete, and whoever has ended goes on until all have."""
        joined = [seq for seq in plan.sequences if seq not in self._batch]
        self._batch += joined
        if plan.prefill_tokens:
            prompts = [seq.prefill_end for seq in self._batch]
            return 0 if self._batch_is_open or not joined else len(prompts) * max(prompts) - sum(prompts)
        return sum(seq.status is not RequestStatus.RUNNING for seq in self._batch)

    def _start(self, seq: Sequence, hit: Hit) -> None:
        """From the line to the running list, with the cached start of its text."""
        request, child, emit = seq.request.id, seq.child, self.journal.emit
        self.waiting.admit(seq, self.journal.time)
        insort(self.running, seq, key=self.policy.run_key)
        reads_cache = self.tables.reads_cache(seq)
        miss = self.tables.explain_miss(seq, hit) if reads_cache else None
        cached, total = hit.num_tokens, seq.num_tokens
        if seq.num_preemptions:
            emit(EventKind.RESUMED, request, child, cause=Cause.CAPACITY,
                 numbers={"cached_tokens": cached, "recompute_tokens": total - cached, "total_tokens": total})  # fmt: skip
        else:
            waited = self.journal.step - seq.waiting_since_step
            emit(EventKind.ADMITTED, request, child, cause=Cause.CAPACITY,
                 numbers={"prompt_tokens": total, "cached_tokens": cached, "waited_steps": waited})  # fmt: skip
            seq.request.num_cached_tokens = cached
            self.metrics.count("vllm:prompt_tokens_total", total)
            self.metrics.observe("vllm:request_queue_time_seconds", self.journal.time - seq.request.metrics.arrival)
        if cached:
            emit(EventKind.CACHE_HIT, request, child, cause=Cause.PREFIX_MATCH,
                 numbers={"cached_tokens": cached, "prompt_tokens": total, "blocks": len(hit.tables[0]),
                          "computed_for": hit.computed_for})  # fmt: skip
        if miss:
            emit(EventKind.CACHE_MISS, request, child, cause=miss.cause,
                 numbers={"matched_tokens": cached, "prompt_tokens": total, "evicted_step": miss.evicted_step,
                          "at_token": miss.at_token})  # fmt: skip
        if reads_cache:
            which = "kvscope:preempted_prefix_cache" if seq.num_preemptions else "vllm:prefix_cache"
            self.metrics.count(f"{which}_queries_total", total)
            self.metrics.count(f"{which}_hits_total", cached)
        seq.status = RequestStatus.RUNNING
        seq.blocked = None
        seq.prefill_end = total
        self.tables.adopt(seq, hit)

    # --- leaving --------------------------------------------------------------------------------------------------

    def preempt(self, seq: Sequence, cause: Cause, needed_by: Sequence | None = None) -> None:
        """Take a running sequence's blocks and put it back in the line; what it computed will be computed again. Beams go all
        together; what their texts have in common stands in the line for them."""
        released, recompute, together = 0, seq.num_computed_tokens, self._together(seq)
        for member in reversed(together):
            self.running.remove(member)
            released += self.tables.release(member, Cause.PREEMPTED)[0]
            member.status = RequestStatus.PREEMPTED
        if seq.request.advances_together:
            seq = seq.request.suspend_beams()
            recompute = seq.num_tokens + len(together) * (recompute - seq.num_tokens)
        seq.num_preemptions += 1
        seq.waiting_since_step = self.journal.step
        self.waiting.put_back(seq)
        self._unexplained.append(seq)
        self.metrics.count("vllm:num_preemptions_total")
        numbers = {
            "released_blocks": released,
            "recompute_tokens": recompute,
            "needed_by": needed_by.request.id if needed_by else -1,
            "needed_by_child": needed_by.child if needed_by else 0,
        }
        self.journal.emit(EventKind.PREEMPTED, seq.request.id, seq.child, cause=cause, numbers=numbers)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """`child` runs from now on, beside its parent and with its blocks."""
        self.tables.fork(parent, child)
        child.status = RequestStatus.RUNNING
        insort(self.running, child, key=self.policy.run_key)

    def remove(self, seq: Sequence, cause: Cause) -> tuple[int, int]:
        """Forget a sequence that is over. Returns (blocks that became free, how many of these stay cached)."""
        if seq.status is RequestStatus.RUNNING:
            self.running.remove(seq)
        else:
            self.waiting.remove(seq)
        counts = self.tables.release(seq, cause)
        seq.text = None
        seq.blocked = None
        return counts

    # --- why they wait --------------------------------------------------------------------------------------------

    def blocked(self, seq: Sequence) -> Blocked | None:
        """Why this sequence waits, now; None when no step has looked at it since it came or since it leads the line."""
        head = self.waiting.head
        if seq is not head:
            return Blocked(Cause.BEHIND, behind=head.request.id)
        return None if head.blocked is None or head.blocked.cause is Cause.BEHIND else head.blocked

    def blocked_because(self, seq: Sequence) -> str:
        """The words after "is waiting because"; "" for one that runs."""
        if seq.status is RequestStatus.RUNNING:
            return ""
        blocked = self.blocked(seq)
        return "no step has begun since it came to the head of the line" if blocked is None else blocked.sentence()

    def _explain(self, blocked: Blocked | None) -> None:
        """Note why the line does not move, and tell those for whom the kind of reason changed. Only the head's reason is
        kept: all others are behind it, so that this does not depend on the length of the line."""
        head = self.waiting.head
        if self._blocked_head is not None and self._blocked_head is not head:
            self._unexplained.append(self._blocked_head)
        self._blocked_head = head
        if head is not None:
            self._tell(head, blocked)
        for _ in range(min(EXPLAINED_PER_STEP, len(self._unexplained))):
            seq = self._unexplained.popleft()
            if seq is not head and seq.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
                self._tell(seq, Blocked(Cause.BEHIND, behind=head.request.id))

    def _tell(self, seq: Sequence, blocked: Blocked) -> None:
        changed = seq.blocked is None or seq.blocked.cause is not blocked.cause
        seq.blocked = blocked
        if changed:
            self.journal.emit(EventKind.BLOCKED, seq.request.id, seq.child, cause=blocked.cause,
                              numbers={"needed": blocked.needed, "available": blocked.available,
                                       "reserved": blocked.reserved, "behind": blocked.behind})  # fmt: skip

    def check_integrity(self) -> None:
        self.waiting.check_integrity()
        keys = [self.policy.run_key(seq) for seq in self.running]
        if keys != sorted(set(keys)):
            raise RuntimeError(f"the running list is out of order: {keys}")
        seats = sum(seq.num_seats for seq in self.running)
        if seats > self.config.max_num_seqs:
            raise RuntimeError(f"{seats} seats are taken, max_num_seqs is {self.config.max_num_seqs}")
        for seq in self.running:
            if seq.status is not RequestStatus.RUNNING or seq.num_computed_tokens >= seq.num_tokens:
                raise RuntimeError(f"{seq} runs without anything to compute")
        for seq in self.waiting:
            if seq.status not in (RequestStatus.WAITING, RequestStatus.PREEMPTED) or len(seq.block_tables[0]):
                raise RuntimeError(f"{seq} waits and holds blocks")
        self.tables.check_integrity(self.running)
