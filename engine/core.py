"""EngineCore: requests in, tokens out, one step at a time.

Pure and deterministic: no thread, no tokenizer, no clock that decides anything; token ids in and out. One step is

    schedule   who computes how many tokens; blocks are taken, copies listed
    flatten    the plan as flat arrays
    execute    copy blocks, write KV, attend: logits for the rows that are sampled
    sample     one token for every sample that has caught up with its text
    apply      advance, publish blocks, fork, finish, free

A fault in a step (an exception, logits that are not finite) ends the requests that were in it, returns their blocks and
leaves the core usable. Not thread-safe: one thread calls everything here, between or in steps.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from heapq import heappop, heappush

import torch

from .config import EngineConfig
from .events import Cause, EventKind, EventLog, Journal
from .kvcache.contiguous import make_tables
from .kvcache.storage import KVStorage
from .metrics import Metrics
from .models.base import Model
from .models.runner import ModelRunner
from .observe import gauges, take_snapshot
from .outputs import StepOutput
from .request import Request, RequestRefused, RequestStatus
from .sampling.params import SamplingParams
from .sampling.sampler import Sampler
from .scheduling.batch import Batch
from .scheduling.beams import BeamLifecycle
from .scheduling.door import Door
from .scheduling.lifecycle import Lifecycle, sample_rows
from .scheduling.plan import Plan
from .scheduling.scheduler import Scheduler
from .snapshot import EngineSnapshot

MIN_FINISHED_KEPT = 256  # requests that are over and can still be asked for with `get`


class EngineCore:
    """`config` is resolved: num_blocks and max_model_len are numbers, and `storage` was made for them."""

    def __init__(
        self,
        model: Model,
        storage: KVStorage,
        config: EngineConfig,
        *,
        eos_token_ids: Iterable[int] = (),
        events: EventLog | None = None,
    ):
        self.config = config
        self.device = model.spec.device
        self.num_groups = len(storage.groups)
        # A tokenizer may know ids that the model has no logit for; they can neither be chosen nor masked.
        self.eos_token_ids = frozenset(t for t in eos_token_ids if 0 <= t < model.spec.vocab_size)
        self.events = EventLog(config.event_capacity) if events is None else events
        self.journal = Journal(self.events)
        self.counters = Metrics()
        self.tables = make_tables(config, storage.groups, storage.block_bytes, self.journal, self.counters)
        self.door = Door(config, vocab_size=model.spec.vocab_size, tables=self.tables)
        self.scheduler = Scheduler(config, self.tables, self.journal, self.counters)
        self.runner = ModelRunner(model, storage, enforce_eager=config.enforce_eager)
        self.sampler = Sampler(storage.kernels, model.spec.vocab_size, config.seed, config.logprobs_mode)
        self.lifecycle = Lifecycle(self.scheduler, storage, self.counters)
        self.beams = BeamLifecycle(self.lifecycle)
        self._live: dict[int, Request] = {}
        self._finished: OrderedDict[int, Request] = OrderedDict()
        self._num_finished_kept = max(MIN_FINISHED_KEPT, 2 * config.max_num_seqs)
        self._deadlines: list[tuple[float, int]] = []  # a heap of (time, request id), some of them over
        self._last_id = 0

    # --- one step -------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> StepOutput:
        """Compute one batch. Without work nothing happens and the step number stays."""
        if not self.has_work:
            return StepOutput(self.journal.step, {}, [], [], {}, 0.0)
        plan = self._open_step()
        self.lifecycle.settle()
        self._end_overdue()
        if not self.scheduler.has_work:  # all that lived were overdue, or at their end
            plan.scheduled = plan.started
            return self._close_step(plan)
        with self._faults_end_requests(plan):
            self.scheduler.schedule(plan)
            for rows in plan.padding[1:]:
                self.runner.execute(self._flatten(Plan(plan.step, padding=[rows], copies=([],) * self.num_groups)))
            logits = self.runner.execute(self._flatten(plan))
            num_sampled = len(plan.sampled_rows)
            self.lifecycle.keep_prompt_logprobs(plan, logits[num_sampled:])
            ranked = self.beams.rank(plan, logits[:num_sampled])
            sampled = self.sampler.sample(logits[:num_sampled], sample_rows(plan))
            self.lifecycle.apply(plan, sampled)
            self.beams.apply(plan, ranked)
        return self._close_step(plan)

    def _flatten(self, plan: Plan) -> Batch:
        return Batch.from_plan(plan, block_sizes=self.tables.block_sizes, device=self.device)

    def _open_step(self) -> Plan:
        self.journal.time = time.monotonic()
        self.journal.step += 1
        return Plan(step=self.journal.step, started=self.journal.time)

    def _remember_deadline(self, request: Request) -> None:
        """Those of requests that are over go when they are more than those that live."""
        heappush(self._deadlines, (request.deadline, request.id))
        if len(self._deadlines) > 2 * len(self._live):
            self._deadlines = sorted(entry for entry in self._deadlines if entry[1] in self._live)

    def _end_overdue(self) -> None:
        while self._deadlines and self._deadlines[0][0] <= self.journal.time:
            if request := self._live.get(heappop(self._deadlines)[1]):
                self.lifecycle.cancel(request, Cause.DEADLINE)

    @contextmanager
    def _faults_end_requests(self, plan: Plan) -> Iterator[None]:
        """A fault ends the requests of the plan; one before the plan stood ends those that run, or that were about to."""
        try:
            yield
        except BaseException as fault:
            self.journal.time = time.monotonic()
            self.tables.take_copies()  # they were for the sequences that end now
            self.scheduler.lose_moves()
            line = self.scheduler.waiting
            in_step = (plan.sequences if plan.scheduled else self.scheduler.running) or line.first_places(1)
            self.lifecycle.fail(dict.fromkeys(seq.request for seq in in_step), fault)
            if not isinstance(fault, Exception):  # Ctrl-C: the requests of the step end, and the caller hears of it
                self._close_step(plan)
                raise

    def _close_step(self, plan: Plan) -> StepOutput:
        tokens: dict[int, int] = {}
        for seq, num_tokens in zip(plan.sequences, plan.num_tokens, strict=True):
            tokens[seq.request.id] = tokens.get(seq.request.id, 0) + num_tokens
        finished = self._retire_ended()
        self.scheduler.swap.arrived()
        seconds = time.monotonic() - plan.started
        pool = self.tables.pool
        numbers = {
            "prefill_tokens": plan.prefill_tokens,
            "decode_tokens": plan.decode_tokens,
            "running": len(self.scheduler.running),
            "waiting": len(self.scheduler.waiting),
            "used_blocks": pool.num_used,
            "cached_blocks": pool.num_free_cached,
            "used_slots": pool.used_slots,
            "seconds": seconds,
            "schedule_seconds": plan.scheduled - plan.started,
            "requests": len(tokens),
            "sequences": len(plan.sequences),
            "preempted": len(plan.preempted),
            "padding_tokens": plan.padding_tokens,
            "token_budget": self.config.max_num_batched_tokens,
            **self.lifecycle.take_gaps(),
        }
        self.journal.emit(EventKind.STEP, numbers=numbers)
        preempted = list(dict.fromkeys(seq.request.id for seq in plan.preempted))
        return StepOutput(plan.step, tokens, preempted, finished, plan.new_tokens, seconds)

    # --- requests -------------------------------------------------------------------------------------------------

    def add_request(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        arrival: float | None = None,
        label: str = "",
        cache_salt: str | None = None,
        priority: int = 0,
        deadline: float | None = None,
        request_id: int | None = None,
    ) -> int:
        """Put a request at the end of the line and return its id: 1, 2, 3, …, never reused, spent on refused ones too.

        Whoever has promised an id before gives it as `request_id`, higher than any so far; gaps do no harm.
        `arrival` is in seconds of time.monotonic(), default now. `deadline` in seconds from there: a request that is not
        over by then is cancelled before the next step, and keeps its text. `priority`: the lowest number goes first, where
        a policy looks at it. `cache_salt` (default: the engine's) is for whoever
        runs a server: only requests with equal salts share cached text. Raises RequestRefused, a ValueError whose
        sentence holds both numbers, when the request can never be served or the line is full.
        """
        request_id = self._last_id + 1 if request_id is None else request_id
        if request_id <= self._last_id:
            raise ValueError(f"request_id={request_id}: must be above {self._last_id}, the latest one")
        self._last_id, now = request_id, time.monotonic()
        self.journal.time = now
        try:
            waited = 0.0 if arrival is None else now - arrival
            max_tokens = self.door.check(prompt_token_ids, params, priority=priority, deadline=deadline, waited=waited)
            self.door.check_queue(self.scheduler.waiting, len(prompt_token_ids), now)
        except RequestRefused as refusal:
            self._tell_refused(request_id, refusal)
            raise
        salt = self.config.cache_salt if cache_salt is None else cache_salt
        request = Request(
            request_id,
            prompt_token_ids,
            params,
            max_tokens=max_tokens,
            eos_token_ids=self.eos_token_ids,
            extra_keys=() if salt is None else (("salt", salt),),
            num_groups=self.num_groups,
            arrival=now if arrival is None else arrival,
            label=label,
            priority=priority,
            deadline=None if deadline is None else (now if arrival is None else arrival) + deadline,
        )
        self._live[request_id] = request
        if request.deadline is not None:
            self._remember_deadline(request)
        numbers = {"prompt_tokens": len(prompt_token_ids), "max_tokens": max_tokens, "n": params.n}
        if request.beams is not None:
            numbers["beam_width"] = params.n
        self.journal.emit(EventKind.SUBMITTED, request_id, cause=Cause.USER, numbers=numbers, text=label)
        self.scheduler.add(request.children[0])
        return request_id

    def refuse(self, request_id: int, refusal: RequestRefused) -> None:
        """Count and tell what whoever promised this id has refused, whatever this core would say by now."""
        self._last_id, self.journal.time = request_id, time.monotonic()
        self._tell_refused(request_id, refusal)

    def _tell_refused(self, request_id: int, refusal: RequestRefused) -> None:
        self.counters.count("kvscope:requests_refused_total")
        self.journal.emit(EventKind.REFUSED, request_id, cause=refusal.cause, text=str(refusal),
                          numbers={"needed": refusal.needed, "available": refusal.available})  # fmt: skip

    def get(self, request_id: int) -> Request:
        """A live request, or one of the last that ended (256 at least). KeyError for any other id."""
        return self._live.get(request_id) or self._finished[request_id]

    def cancel(self, request_id: int, cause: Cause = Cause.USER) -> bool:
        """End all samples of a request now; what it computed stays cached. False when it is over or unknown."""
        request = self._live.get(request_id)
        if request is None:
            return False
        self.journal.time = time.monotonic()
        self.lifecycle.cancel(request, cause)
        self._retire_ended()
        return True

    def finish(
        self, request_id: int, child: int, num_tokens: int, reason: Cause, stop_reason: int | str | None = None
    ) -> bool:
        """End one sample after its first `num_tokens` output tokens, for a reason that only text can show.

        Tokens, log-probabilities and published blocks past that point are dropped. False, and nothing changes, when the
        sample is over already. One that has stop strings is not when it comes to its last token: whoever has its text says
        why it ends, and where nobody does before the next step, it ends then for the reason that its token gave.
        """
        request = self.get(request_id)
        seq = request.children[child]
        if not 0 <= num_tokens <= seq.num_output_tokens:
            raise ValueError(f"num_tokens={num_tokens}: request {request_id} has {seq.num_output_tokens} output tokens")
        self.journal.time = time.monotonic()
        was_live = not seq.status.is_over
        self.lifecycle.finish(seq, reason, stop_reason, num_tokens)
        self._retire_ended()
        return was_live

    def preempt(self, request_id: int) -> bool:
        """Take the blocks of a running request away, as if another needed them. False when it does not run."""
        request = self._live.get(request_id)
        running = [c for c in request.children if c.status is RequestStatus.RUNNING] if request else []
        self.journal.time = time.monotonic()
        if running:
            self.scheduler.preempt(running, Cause.USER)
        return bool(running)

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache. False when running requests still hold text that can be found; theirs stays."""
        self.journal.time = time.monotonic()
        self.journal.emit(EventKind.CACHE_RESET, cause=Cause.USER, numbers={"blocks": self.tables.reset_cache()})
        return self.tables.cache.num_published == 0

    def _retire_ended(self) -> list[int]:
        """Move the requests that have ended to the finished ones, of which the newest are kept; their ids."""
        ended = self.lifecycle.take_ended()
        for request in ended:
            del self._live[request.id]
            self._finished[request.id] = request
        while len(self._finished) > self._num_finished_kept:
            _, request = self._finished.popitem(last=False)
            request.children.clear()  # they refer back: a cycle would wait for a full collection, which is rare
        return [request.id for request in ended]

    # --- for those who look ---------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    @property
    def num_live(self) -> int:
        """Requests that wait or run."""
        return len(self._live)

    def snapshot(self, state: str = "running") -> EngineSnapshot:
        """What a viewer may see, copied; `state` is the driver's word: "running", "paused" or "stopped"."""
        return take_snapshot(self, state)

    def metrics(self) -> dict[str, float]:
        """Gauges, counters, and sum and count of each histogram, under vLLM's names."""
        return self.counters.as_dict(gauges(self))

    def metrics_text(self) -> str:
        """The same and the histograms' buckets, as Prometheus text."""
        return self.counters.as_text(gauges(self), self.runner.model.spec.name)

    def check_integrity(self) -> None:
        """Raise RuntimeError where queues, tables, pool and prefix index contradict each other."""
        self.scheduler.check_integrity()
        waiting = len(self.scheduler.waiting)
        children = sum(not c.status.is_over for request in self._live.values() for c in request.children)
        if children != waiting + len(self.scheduler.running):
            raise RuntimeError(f"{children} samples live, {waiting} wait and {len(self.scheduler.running)} run")
        if not self._live and self.tables.pool.num_used:
            raise RuntimeError(f"no request lives and {self.tables.pool.num_used} blocks are in use")
