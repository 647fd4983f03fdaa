"""A machine that drives an EngineCore through random operations and audits it after each; see test_properties."""

from __future__ import annotations

import fake_model
import numpy as np
from cache_oracle import CacheOracle
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from kvscope.engine import EventKind, RequestRefused, SamplingParams
from kvscope.engine.events import Cause
from kvscope.engine.kvcache.eviction import STRATEGIES
from kvscope.engine.request import Request
from kvscope.engine.scheduling.policies import POLICIES
from kvscope.engine.scheduling.preemption import VICTIMS

EOS = 5
PREFIX = [7, 3, 7, 3, 1, 2, 7, 3, 9, 9, 4, 4, 8, 6]
# Few starts and few ends, so that prompts repeat, share starts, and differ at and inside block boundaries.
prompts = st.builds(
    lambda keep, tail: PREFIX[:keep] + tail,
    st.sampled_from([0, 3, 7, 8, 11, 14]),
    st.sampled_from([[2], [6], [2, 5], [2, 6, 6, 2, 1], [7, 7, 7, 7, 7, 7, 7, 7, 7]]),
)
options = st.fixed_dictionaries(
    {
        "block_size": st.sampled_from([1, 2, 3, 4, 8]),
        "num_blocks": st.integers(6, 40),
        "max_num_batched_tokens": st.sampled_from([1, 3, 7, 64]),
        "max_num_seqs": st.integers(1, 6),
        "enable_prefix_caching": st.sampled_from([True, True, False]),
        "prefix_cache": st.sampled_from(["hash", "radix"]),
        "eviction_policy": st.sampled_from(sorted(STRATEGIES)),
        "watermark": st.sampled_from([0.0, 0.01, 0.3]),
        "scheduling_policy": st.sampled_from(["fcfs", "fcfs", *POLICIES]),
        "max_skips": st.sampled_from([0, 0, 2]),
        "preemption_victim": st.sampled_from(sorted(VICTIMS)),
        "max_preemptions": st.sampled_from([0, 0, 2]),
        "num_cpu_blocks": st.sampled_from([0, 0, 1, 4, 40]),  # 0: preempted ones are computed again
        "resume_order": st.sampled_from(["oldest", "smallest"]),
        "long_prefill_token_threshold": st.sampled_from([0, 0, 2]),
        "windows": st.sampled_from([(0,), (0,), (0, 0), (0, 5), (3,), (1, 0, 8)]),
    }
)


class Schedules(RuleBasedStateMachine):
    """Over the fake model, which judges every page; another model overrides `make_core`, `check_pages` and `expected`."""

    operations = 0  # of all runs of the class, each followed by an audit; the many steps of one rule count each

    @initialize(options=options)
    def start(self, options):
        self.windows = options["windows"]
        if not options["enable_prefix_caching"]:
            options = options | {"prefix_cache": "hash", "eviction_policy": "lru"}
            if POLICIES[options["scheduling_policy"]].arrange:
                options = options | {"scheduling_policy": "fcfs"}
        if options["scheduling_policy"] == "priority":
            options = options | {"resume_order": "oldest"}
        if options["num_cpu_blocks"]:
            options = options | {"preemption_mode": "swap"}
        self.core = self.make_core(options)
        self.oracle_of_cache = CacheOracle(self.core)
        self.model = self.core.runner.model
        self.requests: dict[int, Request] = {}
        self.cut: dict[tuple[int, int], int] = {}  # samples ended from outside: (request, child) -> tokens kept
        self.faulty: set[int] = set()

    # --- what a machine with another model does differently ----------------------------------------------------------

    def make_core(self, options):
        return fake_model.make_core(eos_token_ids=[EOS], max_model_len=100, **options)

    def check_pages(self):
        """I3: the pages hold the tokens under which a block is found, and those that a running sequence computed."""
        tables, storage = self.core.tables, self.core.runner.storage
        for block in range(tables.pool.num_blocks):
            text = tables.cache.text_of(block)
            if text is not None:
                tokens = np.frombuffer(text, np.int64)
                group = tables.cache.group_of(block)
                first = (len(tokens) - 1) // tables.block_sizes[group] * tables.block_sizes[group]
                held = fake_model.read_back(storage, group, [block], len(tokens) - first)
                assert held[:, 0].tolist() == tokens[first:].tolist()
                assert held[:, 1].tolist() == list(range(first, len(tokens)))
        for seq in self.core.scheduler.running:
            for group, (table, window) in enumerate(zip(seq.block_tables, self.windows, strict=True)):
                held = fake_model.read_back(storage, group, table, seq.num_computed_tokens)
                first = max(0, seq.num_computed_tokens - window + 1) if window else 0  # what the next token sees
                assert held[first:, 0].tolist() == seq.token_ids[first : seq.num_computed_tokens].tolist()
                assert held[first:, 1].tolist() == list(range(first, seq.num_computed_tokens))

    def expected(self, request, child):
        """The sample's text when nothing but its own text decides."""
        return fake_model.reference(
            request.prompt_token_ids,
            request.params,
            max_tokens=request.max_tokens,
            request_id=request.id,
            child=child,
            windows=self.windows,
            eos_token_ids=[EOS],
        )

    # --- operations -----------------------------------------------------------------------------------------------

    @rule(
        prompt=prompts,
        max_tokens=st.one_of(st.none(), st.integers(1, 9)),
        n=st.sampled_from([1, 1, 1, 2, 4]),
        stop=st.lists(st.integers(0, fake_model.VOCAB - 1), max_size=6),
        ignore_eos=st.booleans(),
        min_tokens=st.integers(0, 1),
        salt=st.sampled_from([None, None, "a", "b"]),
        priority=st.integers(0, 2),
    )
    def submit(self, prompt, max_tokens, n, stop, ignore_eos, min_tokens, salt, priority):
        params = SamplingParams(
            n=n,
            temperature=0.0 if n == 1 else 1.0,
            max_tokens=max_tokens,
            stop_token_ids=stop,
            ignore_eos=ignore_eos,
            min_tokens=min_tokens,
        )
        try:
            priority = priority if self.core.config.heeds_priority else 0
            request_id = self.core.add_request(prompt, params, cache_salt=salt, priority=priority)
        except RequestRefused as refusal:
            assert str(refusal.needed) in str(refusal) and str(refusal.available) in str(refusal)
            return
        self.requests[request_id] = self.core.get(request_id)

    @precondition(lambda self: self.requests)
    @rule(copies=st.integers(1, 3), max_tokens=st.integers(1, 9))
    def burst(self, copies, max_tokens):
        """The latest prompt again, several times at once: nobody finds what the others have yet to compute."""
        prompt = list(self.requests.values())[-1].prompt_token_ids
        for copy in range(copies):
            self.submit(prompt, max_tokens, 1, [copy], False, 0, None, copy)

    @precondition(lambda self: self.core.has_work)
    @rule()
    def step(self):
        before = {(r.id, c.child): c.num_tokens for r in self.requests.values() for c in r.children}
        first_event = self.core.events.next_index
        output = self.core.step()
        assert output.scheduled, "I8: a step with work computes something"
        events = self.core.events.since(first_event)[0]
        entered = any(e.kind in (EventKind.ADMITTED, EventKind.RESUMED) for e in events)
        assert not (entered and any(e.kind is EventKind.PREEMPTED and e.cause is Cause.NO_FREE_BLOCK for e in events))
        assert sum(output.scheduled.values()) <= self.core.config.max_num_batched_tokens
        for request_id, tokens in output.new_tokens.items():
            for child, token_id in tokens:
                seq = self.requests[request_id].children[child]
                known = before.get((request_id, child), self.requests[request_id].num_prompt_tokens)
                assert seq.num_tokens == known + 1 and seq.token_ids[-1] == token_id
        if self.core.scheduler.waiting.head is not None:
            assert self.core.scheduler.waiting.head.blocked is not None, "I8: whoever waits knows why"

    @precondition(lambda self: self.core.has_work)
    @rule(steps=st.integers(2, 12))
    def steps(self, steps):
        for _ in range(steps):
            if self.core.has_work:
                self.step()
                self.books_balance()

    def live(self) -> list[Request]:
        return [request for request in self.requests.values() if not request.finished]

    @precondition(lambda self: self.core.has_work)
    @rule(data=st.data())
    def cancel(self, data):
        request = data.draw(st.sampled_from(self.live()))
        assert self.core.cancel(request.id) and not self.core.cancel(request.id)

    @precondition(lambda self: self.core.has_work)
    @rule(data=st.data())
    def preempt(self, data):
        self.core.preempt(data.draw(st.sampled_from(self.live())).id)

    @precondition(lambda self: self.core.has_work)
    @rule(data=st.data())
    def stop_string(self, data):
        request = data.draw(st.sampled_from(self.live()))
        seq = data.draw(st.sampled_from([c for c in request.children if not c.status.is_over]))
        if seq.num_output_tokens:
            keep = data.draw(st.integers(max(0, seq.num_output_tokens - 2), seq.num_output_tokens))
            self.cut[request.id, seq.child] = keep
            self.core.finish(request.id, seq.child, keep, Cause.STOP_STRING, "stop")

    @rule()
    def reset(self):
        idle = not self.core.scheduler.running
        assert self.core.reset_prefix_cache() or not idle

    @precondition(lambda self: self.core.has_work)
    @rule(broken_row=st.one_of(st.none(), st.integers(0, 5)))
    def fault(self, broken_row):
        if broken_row is None:
            self.model.fault = RuntimeError("the model broke")
        else:
            self.model.broken_rows = [broken_row]
        failed = self.core.step().finished
        self.faulty.update(r for r in failed if self.requests[r].status == "failed")
        self.model.broken_rows = ()

    # --- always true ----------------------------------------------------------------------------------------------

    @invariant()
    def books_balance(self):
        type(self).operations += 1
        self.core.check_integrity()
        self.oracle_of_cache.follow(self.requests)
        self.check_pages()
        for seq in self.core.scheduler.running:
            assert seq.num_cached_tokens < seq.num_tokens  # I5

    def teardown(self):
        if not hasattr(self, "core"):
            return
        for _ in range(5000):
            if not self.core.has_work:
                break
            self.step()
            self.books_balance()
        assert not self.core.has_work, "the engine does not come to an end"
        pool = self.core.tables.pool
        assert pool.num_free == pool.num_blocks - 1  # I2
        for request in self.requests.values():
            if request.status in ("cancelled", "failed"):
                assert request.status == "cancelled" or request.id in self.faulty
                continue
            for seq in request.children:
                expected = self.expected(request, seq.child)
                kept = self.cut.get((request.id, seq.child), len(expected))
                assert seq.output_token_ids == expected[:kept]  # I7


def check(machine: type[Schedules], examples: int, length: int) -> int:
    """Run it; how many operations that were is printed and returned."""
    before = machine.operations
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=length,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            derandomize=True,
        ),
    )
    done = machine.operations - before
    print(f"{machine.__name__}: {done:,} operations")
    return done
