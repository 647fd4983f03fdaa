"""Who computes how many tokens in the next step.

Two passes over sequences, oldest first (or as `policies` says), share one budget of tokens:

1. *Running.* Each gets what it lacks: one token when it decodes, a chunk while its prefill lasts. A chunk leaves a token
   for every decoding sequence, so a long prompt slows nobody's text. Blocks are taken here; when none is left the
   youngest running sequence is preempted: it loses its blocks and goes back to the head of the line, where prompt and
   output so far become its next prefill, or its KV waits in host memory (swap). The oldest never loses its blocks to
   another, so it always finishes.
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
from typing import TYPE_CHECKING

from ..events import Cause
from ..kvcache.prefix_cache import Hit
from ..request import Blocked, Sequence
from .plan import Plan
from .static_batching import StaticBatch

if TYPE_CHECKING:
    from .scheduler import Scheduler

_AFTER_PREEMPTION = Blocked(Cause.AFTER_PREEMPTION)
MAX_PASSING = 16  # places behind a head that cannot be admitted that are looked at in one step


class Planner:
    """Fills plans from what waits and runs in `scheduler`, which moves the sequences."""

    def __init__(self, scheduler: Scheduler):
        self.scheduler = scheduler
        self.config, self.policy = scheduler.config, scheduler.policy
        self.waiting, self.running = scheduler.waiting, scheduler.running
        self.tables, self.swap, self.victims = scheduler.tables, scheduler.swap, scheduler.victims
        self.reasons = scheduler.reasons
        share = self.config.watermark if self.tables.grows else 0
        self.watermark = math.ceil(share * (self.config.num_blocks - 1))
        self._batch = StaticBatch(self.config.max_num_batched_tokens)

    def schedule(self, plan: Plan) -> None:
        """Fill the plan: choose its rows and take their blocks. RuntimeError when nothing can be computed."""
        self.waiting.held = {}
        if self.policy.preempts:
            self._make_way(plan)
        blocked = self._fill_in_phases(plan) if self.policy.prefill_first else self._fill(plan)
        head = self.waiting.head
        self.reasons.note({} if head is None else {head: blocked} | self.waiting.held)
        plan.copies = self.tables.take_copies()
        plan.swap_out, plan.swap_in = self.swap.take_moves()
        if not plan.sequences:
            raise RuntimeError(f"nothing could be scheduled: {len(self.running)} run, {len(self.waiting)} wait")
        if self.policy.is_static:
            self._batch.pad(plan)
        plan.scheduled = time.monotonic()

    def _fill(self, plan: Plan) -> Blocked | None:
        """Both passes. Returns why the head of the line has to wait."""
        before = len(plan.preempted)
        budget, reserved = self._schedule_running(plan)
        if len(plan.preempted) == before:
            return self._admit(plan, budget, reserved)
        self._use_what_was_kept(plan)
        return _AFTER_PREEMPTION

    def _use_what_was_kept(self, plan: Plan) -> None:
        """Nobody was scheduled where those for whom the budget was kept have all been preempted."""
        while self.running and not plan.sequences:
            self._schedule_running(plan)

    def _fill_in_phases(self, plan: Plan) -> Blocked | None:
        """Prefill alone, where there is any; else a token for everybody. What comes back from host memory has no prefill left
        to do: it joins those, unless someone was preempted."""
        budget, reserved = self._schedule_running(plan, only_prefill=True)
        blocked = _AFTER_PREEMPTION if plan.preempted else self._admit(plan, budget, reserved, swapped_out=False)
        if not plan.sequences:
            before = len(plan.preempted)
            budget, reserved = self._schedule_running(plan)
            if len(plan.preempted) > before:
                self._use_what_was_kept(plan)
                return _AFTER_PREEMPTION
            if self.swap.members(self.waiting.head):
                return self._admit(plan, budget, reserved, swapped_out=True)
        return blocked

    def _schedule_running(self, plan: Plan, *, only_prefill: bool = False) -> tuple[int, int]:
        """Pass 1. Returns (tokens left of the budget, blocks that running prefills will still take)."""
        budget, reserved, running = self.config.max_num_batched_tokens, 0, self.running
        decodes = 0 if only_prefill else sum(not seq.is_prefill for seq in running)  # of those not yet looked at
        longest_chunk = self.config.long_prefill_token_threshold or budget
        i = 0
        while i < len(running) and budget:
            seq = running[i]
            together = self._together(seq)
            if seq.is_prefill:
                left = (budget - decodes) // len(together)
                num_tokens = min(seq.prefill_end - seq.num_computed_tokens, left, longest_chunk)
            elif only_prefill:
                i += len(together)
                continue
            else:
                num_tokens = min(1, budget // len(together))
                decodes -= len(together)
            if num_tokens > 0:
                while gone := self.victims.for_gang(running, i) or (
                    not self._grow(together, num_tokens) and self.victims.for_one(running, i, len(together))
                ):
                    decodes -= 0 if only_prefill else sum(not v.is_prefill for v in gone if v not in together)
                    self.scheduler.preempt(gone, Cause.NO_FREE_BLOCK, plan, needed_by=seq)
                    if seq in gone:
                        break
                if gone:  # it gave way itself: someone else stands in its place now
                    continue
                for member in together:
                    plan.add(member, num_tokens)
                budget -= num_tokens * len(together)
            if seq.is_prefill:
                reserved += sum(map(self.tables.still_to_take, together))
            i += len(together)
        reserved += sum(self.tables.still_to_take(seq) for seq in running[i:] if seq.is_prefill)
        return budget, reserved

    def _together(self, seq: Sequence) -> list[Sequence]:
        """The running sequences that stand or fall with this one, in order."""
        return seq.request.children if seq.request.advances_together else [seq]

    def _grow(self, together: list[Sequence], num_tokens: int) -> bool:
        if len(together) > 1 and self.tables.needed_to_grow(together, num_tokens) > self.tables.pool.num_free:
            return False
        return all(self.tables.grow(seq, num_tokens) for seq in together)

    def _blocks_of_beams(self, seq: Sequence) -> int:
        """What the beams of a preempted request need beside the text that they have in common, which `seq` computes first."""
        texts, tables = seq.request.beams.suspended if seq.request.beams else [], self.tables
        if not texts:
            return 0
        whole = tables.blocks_for_beams(seq.num_tokens, len(texts[0]), len(texts))
        return whole - tables.blocks_for(seq.num_tokens)

    def _admit(self, plan: Plan, budget: int, reserved: int, *, swapped_out: bool | None = None) -> Blocked | None:
        """Pass 2, for all, or for those alone whose KV is in host memory (True) or is not (False). Returns why the head of the
        line has to wait, None when the line is empty."""
        if self.policy.is_static and not self._batch.open(self.running):
            return Blocked(Cause.BATCH_RUNNING)
        seats = self.config.max_num_seqs - sum(seq.num_seats for seq in self.running)
        if seats and budget:
            self.waiting.arrange(self.tables.find_prefix, self.running, self.tables.common_size)
        longest_chunk = self.config.long_prefill_token_threshold or budget
        why_head, place = None, 0  # place: how many stand before whoever is looked at
        while seq := self.waiting.at(place):
            before = self.waiting.first_places(place)
            if any(passed.num_times_passed >= self.config.max_skips for passed in before):
                break
            if seq in self.waiting.held:
                why_head = why_head or self.waiting.held[seq]
                break
            is_out = bool(self.swap.members(seq))
            if swapped_out not in (None, is_out):
                why_head = why_head or Blocked(Cause.DECODE_STEP)
                break
            if is_out and not self.running:
                self.swap.shrink(seq)
            why, hit = self._try(seq, seats, budget, reserved)
            if why is None:
                for passed in before:
                    passed.num_times_passed += 1
                joined = self.scheduler.bring_back(seq) if is_out else self.scheduler.start(seq, hit)
                for together in [joined] if seq.request.advances_together else [[member] for member in joined]:
                    left = together[0].prefill_end - together[0].num_computed_tokens if together[0].is_prefill else 1
                    num_tokens = min(budget // len(together), left, longest_chunk)
                    if num_tokens and self._grow(together, num_tokens):
                        for member in together:
                            plan.add(member, num_tokens)
                        budget -= num_tokens * len(together)
                    seats -= sum(member.num_seats for member in together)
                    reserved += sum(map(self.tables.still_to_take, together))
                continue
            why_head = why_head or why
            if why.cause is Cause.TOKEN_BUDGET or place == MAX_PASSING or is_out:  # nobody passes what is swapped out
                break
            place += 1
        if why_head is None or why_head.cause is not Cause.TOKEN_BUDGET:
            self._batch.is_open = False
        return why_head

    def _try(self, seq: Sequence, seats: int, budget: int, reserved: int) -> tuple[Blocked | None, Hit]:
        """What keeps this sequence, and those that were swapped out with it, from being admitted now; and the cached start of its
        text, which is looked up only when a seat and a token are there."""
        unit = self.swap.members(seq)
        needed_seats = sum(member.num_seats for member in unit or [seq])
        if needed_seats > seats:
            return Blocked(Cause.MAX_NUM_SEQS, needed=needed_seats, available=seats), Hit()
        if budget < (len(unit) if seq.request.advances_together else 1):
            return Blocked(Cause.TOKEN_BUDGET, needed=seq.num_tokens), Hit()
        hit = Hit() if unit else self.tables.find_prefix(seq)
        needed = self.swap.blocks_to_return(seq) if unit else self.tables.blocks_to_admit(seq, hit)
        needed += self._blocks_of_beams(seq)
        available = self.tables.available(seq)
        kept = reserved + self.watermark if self.running else 0
        if needed + kept > available:
            return Blocked(Cause.NO_FREE_BLOCK, needed, max(0, available - kept), kept), hit
        return None, hit

    def _make_way(self, plan: Plan) -> None:
        """Whoever leads the line with a better priority takes the place of those that run with the worst, as far as it needs
        and if that is enough."""
        head, running = self.waiting.head, self.running
        worse = [seq for seq in running if head and seq.request.priority > head.request.priority]
        if not worse:
            return
        seats = self.config.max_num_seqs - sum(seq.num_seats for seq in running)
        reserved = sum(map(self.tables.still_to_take, running))
        gained_seats = sum(seq.num_seats for seq in worse)
        gained = sum(self.tables.held(seq) + self.tables.still_to_take(seq) for seq in worse)
        budget = self.config.max_num_batched_tokens
        if self._try(head, seats + gained_seats, budget, reserved - gained)[0]:
            return
        while worse and self._try(head, seats, budget, reserved)[0]:
            gone = self.victims.gang(worse[-1], running)
            del worse[-len(gone) :]
            seats += sum(victim.num_seats for victim in gone)
            reserved -= sum(map(self.tables.still_to_take, gone))
            self.scheduler.preempt(gone, Cause.PRIORITY, plan, needed_by=head)
