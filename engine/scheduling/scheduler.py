"""The line and the running list, and the ways between them: admitted, preempted, brought back, forked, over.

Each way is an event with its reason. Who takes it is decided elsewhere: planner.py says who computes how many tokens, policies.py
who goes first, preemption.py who gives way, reasons.py why the others wait.
"""

from __future__ import annotations

from bisect import insort

from ..config import EngineConfig
from ..events import Cause, EventKind, Journal
from ..kvcache.block_table import BlockTables
from ..kvcache.prefix_cache import Hit
from ..kvcache.swap import SwapSpace
from ..metrics import Metrics
from ..request import RequestStatus, Sequence
from .plan import Plan
from .planner import Planner
from .policies import POLICIES
from .preemption import VictimChoice
from .queue import WaitingQueue
from .reasons import Reasons


class Scheduler:
    """Owns the line and the running list (both by age), and moves sequences between them."""

    def __init__(self, config: EngineConfig, tables: BlockTables, journal: Journal, metrics: Metrics):
        self.config = config
        self.tables = tables
        self.journal = journal
        self.metrics = metrics
        self.policy = POLICIES[config.scheduling_policy]
        self.waiting = WaitingQueue(self.policy, smallest_first=config.resume_order == "smallest")
        self.running: list[Sequence] = []  # by the policy's run_key
        self.reasons = Reasons(self.waiting, journal, config.max_waiting_requests + config.max_num_seqs)
        self.swap = SwapSpace(config.num_cpu_blocks, tables, journal, metrics)
        self.victims = VictimChoice(config, tables)
        self._planner = Planner(self)

    def add(self, seq: Sequence) -> None:
        seq.waiting_since_step = self.journal.step
        self.waiting.add(seq)
        self.reasons.joined(seq)

    @property
    def has_work(self) -> bool:
        return bool(self.running or len(self.waiting))

    def schedule(self, plan: Plan) -> None:
        """Fill the plan of a step. RuntimeError when nothing can be computed."""
        self._planner.schedule(plan)

    # --- to the running list ----------------------------------------------------------------------------------------

    def bring_back(self, seq: Sequence) -> list[Sequence]:
        """From host memory to the running list, with those that went out with it; nothing is computed again."""
        unit = self.swap.swap_in(seq)
        for member in unit:
            self._join(member)
            total, computed = member.num_tokens, member.num_computed_tokens
            left = max(0, member.prefill_end - computed)
            self.journal.emit(EventKind.RESUMED, member.request.id, member.child, cause=Cause.CAPACITY,
                              numbers={"swapped_tokens": computed, "cached_tokens": 0, "recompute_tokens": left,
                                       "total_tokens": total})  # fmt: skip
        return unit

    def _join(self, seq: Sequence) -> None:
        self.waiting.admit(seq, self.journal.time)
        seq.status = RequestStatus.RUNNING
        seq.blocked = None
        insort(self.running, seq, key=self.policy.run_key)

    def start(self, seq: Sequence, hit: Hit) -> list[Sequence]:
        """From the line to the running list, with the cached start of its text. Returns who runs now."""
        request, child, emit = seq.request.id, seq.child, self.journal.emit
        self._join(seq)
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
            self.metrics.request_admitted(seq.request, self.journal.time)
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
        seq.prefill_end = total
        self.tables.adopt(seq, hit)
        return [seq]

    # --- leaving --------------------------------------------------------------------------------------------------

    def preempt(
        self, gone: list[Sequence], cause: Cause, plan: Plan | None = None, needed_by: Sequence | None = None
    ) -> None:
        """Take the blocks of these samples of one request and put them back in the line. Their KV goes to host memory where
        there is room for it and no other sample goes on reading it; else it will be computed again. Beams go all together, and
        of those that are computed again, what their texts have in common stands in the line."""
        request, released, computed = gone[0].request, {}, {}
        samples = sum(seq.request is request for seq in self.running)
        is_out = len(gone) == samples and self.swap.swap_out(gone, cause)
        for seq in reversed(gone):
            self.running.remove(seq)
            computed[seq] = seq.num_computed_tokens
            released[seq], _ = self.tables.release(seq, Cause.PREEMPTED)
            seq.status = RequestStatus.PREEMPTED
        if request.advances_together and not is_out:
            trunk = request.suspend_beams()
            computed = {trunk: trunk.num_tokens + sum(tokens - trunk.num_tokens for tokens in computed.values())}
            released = {trunk: sum(released.values())}
        for seq, tokens in computed.items():
            seq.num_preemptions += 1
            request.metrics.num_preemptions += 1
            seq.waiting_since_step = self.journal.step
            self.waiting.put_back(seq)
            self.reasons.joined(seq)
            self.metrics.count("vllm:num_preemptions_total")
            numbers = {
                "released_blocks": released[seq],
                "recompute_tokens": 0 if is_out else tokens,
                "needed_by": needed_by.request.id if needed_by else -1,
                "needed_by_child": needed_by.child if needed_by else 0,
            }
            if is_out:
                numbers["swapped_tokens"] = tokens
            self.journal.emit(EventKind.PREEMPTED, request.id, seq.child, cause=cause, numbers=numbers)
        if plan is not None:
            plan.preempted += computed

    def lose_moves(self) -> None:
        """The moves of the step may not have been made: whoever was on the way to host memory is computed again."""
        for request in dict.fromkeys(seq.request for seq in self.swap.lost()):
            if request.advances_together:
                for seq in request.children:
                    self.waiting.remove(seq)
                    seq.status = RequestStatus.FINISHED
                trunk = request.suspend_beams()
                trunk.status, trunk.waiting_since_step = RequestStatus.PREEMPTED, self.journal.step
                self.waiting.put_back(trunk)
                self.reasons.joined(trunk)

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
            self.swap.drop(seq)
        counts = self.tables.release(seq, cause)
        seq.text = None
        seq.blocked = None
        return counts

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
            if not seq.status.is_waiting or len(seq.block_tables[0]):
                raise RuntimeError(f"{seq} waits and holds blocks")
            if seq.request.advances_together and self.swap.members(seq) != seq.request.children:
                raise RuntimeError(f"{seq} waits and its request's beams are not all in host memory")
        self.swap.check_integrity(self.waiting)
        self.tables.check_integrity(self.running)
