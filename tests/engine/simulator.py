"""The scheduler's rules once more, as plainly as they can be said: jobs in lists, blocks as counts, everything looked up afresh.

It shares no code with the engine. It is told what is submitted, cancelled and preempted, and says of every step who computes how
many tokens, who loses its blocks, who ends, and why whoever leads the line waits. One sample a request. Without a prefix
cache the pool may be as small as one likes; with one it must be so large that nothing is ever evicted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(eq=False)
class Job:
    id: int
    text: list[int]  # the prompt
    output: int  # tokens to write
    priority: int = 0
    written: int = 0
    done: int = 0  # tokens whose KV exists
    goal: int = 0  # tokens it had when it was admitted
    blocks: int = 0
    parked: int = 0  # blocks in host memory
    lost: int = 0  # times that it lost its blocks
    passed: int = 0

    @property
    def tokens(self):
        return len(self.text) + self.written

    @property
    def whole(self):
        """Prompt and output; what is written follows from the prompt, and no prompt holds it."""
        return self.text + [(*self.text, place) for place in range(self.written)]

    @property
    def is_prefill(self):
        return self.done < self.goal


@dataclass
class Step:
    scheduled: dict[int, int] = field(default_factory=dict)
    preempted: list[int] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)
    why: str = ""  # of whoever leads the line


class Simulator:
    def __init__(self, options: dict):
        self.o = options
        self.pool = options["num_blocks"] - 1
        self.reserve = math.ceil(options["watermark"] * self.pool)
        self.running: list[Job] = []
        self.line: list[Job] = []
        self.cached: set[tuple[int, ...]] = set()  # texts, each to the end of a full block
        self.batch_is_open = False

    # --- what can be looked up ------------------------------------------------------------------------------------

    def rank(self, job):
        return (job.priority if self.o["scheduling_policy"] == "priority" else 0, job.id)

    def blocks_of(self, tokens):
        return -(-tokens // self.o["block_size"])

    def free(self):
        return self.pool - sum(job.blocks for job in self.running)

    def host_free(self):
        return self.o["num_cpu_blocks"] - sum(job.parked for job in self.line)

    def owed(self, job):
        return max(0, self.blocks_of(job.goal) - job.blocks)

    def found(self, job):
        """Tokens of its text that are cached, one short of the whole at most."""
        size, best = self.o["block_size"], 0
        while (
            self.o["enable_prefix_caching"]
            and best + size < job.tokens
            and tuple(job.whole[: best + size]) in self.cached
        ):
            best += size
        return best

    def in_order(self):
        policy = self.o["scheduling_policy"]
        back = [job for job in self.line if job.lost]
        fresh = sorted((job for job in self.line if not job.lost), key=lambda job: job.id)
        if policy == "priority":
            return sorted(self.line, key=self.rank), {}
        back.sort(key=lambda job: (job.tokens if self.o["resume_order"] == "smallest" else 0, job.id))
        if policy == "sjf":
            fresh.sort(key=lambda job: (len(job.text), job.id))
        if policy in ("lpm", "dfs-weight") and len(fresh) <= 128:
            fresh = sorted(fresh, key=lambda job: -self.found(job)) if policy == "lpm" else self.by_weight(fresh, 0)
            held = self.held_back(fresh)
            return back + [job for job in fresh if job not in held], held
        return back + fresh, {}

    def by_weight(self, jobs, depth):
        """Those whose cached text goes on, branch by branch, the branch of most jobs first; then those whose ends here."""
        size = self.o["block_size"]
        branches, ends = {}, []
        for job in jobs:
            if self.found(job) > depth:
                branches.setdefault(tuple(job.text[depth : depth + size]), []).append(job)
            else:
                ends.append(job)
        heaviest = sorted(branches.values(), key=lambda branch: (-len(branch), jobs.index(branch[0])))
        return [job for branch in heaviest for job in self.by_weight(branch, depth + size)] + ends

    def held_back(self, order):
        size, held, stretches = self.o["block_size"], [], []
        for job in order:
            end = self.found(job) + -(-32 // size) * size
            if end >= job.tokens:
                continue
            busy = [o.whole[:end] for o in self.running if o.is_prefill and o.done < end <= o.goal]
            if job.text[:end] in stretches + busy:
                held.append(job)
            stretches.append(job.text[:end])
        return held

    # --- what changes ---------------------------------------------------------------------------------------------

    def preempt(self, job, step=None):
        self.running.remove(job)
        if self.o["num_cpu_blocks"] and job.done and self.blocks_of(job.done) <= self.host_free():
            job.parked = self.blocks_of(job.done)
        else:
            job.done = 0
        job.blocks, job.lost = 0, job.lost + 1
        self.line.append(job)
        if step:
            step.preempted.append(job.id)

    def start(self, job):
        self.line.remove(job)
        if job.parked:
            job.blocks, job.parked = job.parked, 0
        else:
            job.goal, job.done = job.tokens, self.found(job)
            job.blocks = self.blocks_of(job.done)
        self.running.append(job)
        self.running.sort(key=self.rank)

    def give(self, job, tokens, step):
        job.blocks = max(job.blocks, self.blocks_of(job.done + tokens))
        step.scheduled[job.id] = tokens

    def lacks(self, job, seats, budget, owed):
        if not seats:
            return "max_num_seqs"
        if not budget:
            return "token_budget"
        if job.parked:
            needed = max(job.parked, self.blocks_of(job.tokens))
        else:
            needed = self.blocks_of(job.tokens)
            if self.o["enable_prefix_caching"]:
                return ""  # an ample pool
        kept = owed + self.reserve if self.running else 0
        return "no_free_block" if needed + kept > self.free() else ""

    # --- one step -------------------------------------------------------------------------------------------------

    def step(self):
        step, policy = Step(), self.o["scheduling_policy"]
        if policy == "priority":
            self.make_way(step)
        if policy in ("prefill-first", "static"):
            self.in_phases(step)
        else:
            before = len(step.preempted)
            budget, owed = self.serve(step)
            if len(step.preempted) > before:
                self.serve_until_someone_runs(step)
                step.why = "after_preemption"
            else:
                self.admit(step, budget, owed)
        self.finish(step)
        return step

    def in_phases(self, step):
        budget, owed = self.serve(step, only_prefill=True)
        if step.preempted:
            step.why = "after_preemption"
        else:
            self.admit(step, budget, owed, parked=False)
        if step.scheduled:
            return
        before = len(step.preempted)
        budget, owed = self.serve(step)
        if len(step.preempted) > before:
            self.serve_until_someone_runs(step)
            step.why = "after_preemption"
        elif self.line and self.in_order()[0][0].parked:
            self.admit(step, budget, owed, parked=True)

    def serve_until_someone_runs(self, step):
        while self.running and not step.scheduled:
            self.serve(step)

    def serve(self, step, only_prefill=False):
        budget = self.o["max_num_batched_tokens"]
        longest, i = self.o["long_prefill_token_threshold"] or budget, 0
        while i < len(self.running) and budget:
            job = self.running[i]
            if only_prefill and not job.is_prefill:
                i += 1
                continue
            kept = 0 if only_prefill else sum(not other.is_prefill for other in self.running[i:])
            tokens = min(job.goal - job.done, budget - kept, longest) if job.is_prefill else 1
            if tokens > 0:
                while self.blocks_of(job.done + tokens) - job.blocks > self.free():
                    victim = self.victim(i)
                    self.preempt(victim, step)
                    if victim is job:
                        break
                if job not in self.running:
                    continue
                self.give(job, tokens, step)
                budget -= tokens
            i += 1
        return budget, sum(self.owed(job) for job in self.running if job.is_prefill)

    def victim(self, i):
        job, younger, bound = self.running[i], self.running[i + 1 :], self.o["max_preemptions"]
        spared = [other for other in self.running if bound and other.lost >= bound]
        if not younger or (i and job not in spared and all(other in spared for other in younger)):
            return job
        rule = {
            "youngest": lambda other: 0,
            "most-blocks": lambda other: other.blocks,
            "least-progress": lambda other: -other.done,
            "lowest-priority": lambda other: other.priority,
        }[self.o["preemption_victim"]]
        candidates = [other for other in younger if other not in spared] or younger
        return max(candidates, key=lambda other: (rule(other), self.rank(other)))

    def admit(self, step, budget, owed, parked=None):
        if self.o["scheduling_policy"] == "static":
            self.batch_is_open = self.batch_is_open or not self.running
            if not self.batch_is_open:
                step.why = "batch_running"
                return
        seats = self.o["max_num_seqs"] - len(self.running)
        longest, why, place = self.o["long_prefill_token_threshold"] or budget, "", 0
        order, held = self.in_order() if seats and budget else ([*self.in_order()[0], *self.in_order()[1]], [])
        while place < len(order):
            job, before = order[place], order[:place]
            if any(other.passed >= self.o["max_skips"] for other in before):
                break
            if parked is not None and bool(job.parked) != parked:
                why = why or "decode_step"
                break
            lacking = self.lacks(job, seats, budget, owed)
            if lacking:
                why = why or lacking
                if lacking == "token_budget" or place == 16 or job.parked:
                    break
                place += 1
                continue
            for other in before:
                other.passed += 1
            order.remove(job)
            self.start(job)
            tokens = min(budget, max(1, job.goal - job.done), longest)
            self.give(job, tokens, step)
            budget, seats, owed = budget - tokens, seats - 1, owed + self.owed(job)
        self.batch_is_open = self.batch_is_open and why == "token_budget"
        step.why = why or ("shared_prefix" if held else "")

    def make_way(self, step):
        if not self.line:
            return
        head = min(self.line, key=self.rank)
        worse = [job for job in self.running if job.priority > head.priority]

        def fits(without):
            rest = [job for job in self.running if job not in without]
            needed = max(head.parked, self.blocks_of(head.tokens)) + sum(map(self.owed, rest))
            kept = self.reserve if self.running else 0
            room = self.free() + sum(job.blocks for job in without)
            return len(rest) < self.o["max_num_seqs"] and needed + kept <= room

        if fits(worse):
            while worse and not fits([]):
                self.preempt(worse.pop(), step)

    def finish(self, step):
        for job in [job for job in self.running if job.id in step.scheduled]:
            job.done += step.scheduled[job.id]
            size = self.o["block_size"]
            whole = job.whole[: job.done]
            self.cached |= {tuple(whole[:end]) for end in range(size, len(whole) + 1, size)}
            if job.done == job.tokens:
                job.written += 1
                if job.written == job.output:
                    self.running.remove(job)
                    step.finished.append(job.id)
