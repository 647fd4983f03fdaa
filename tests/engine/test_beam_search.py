"""Beam search in the engine: what is shared, forked, copied, freed and told, on a model whose tokens depend on every page."""

import dataclasses
import math
from array import array
from types import SimpleNamespace

import pytest
from fake_model import VOCAB, greedy, make_core, reference, run
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from kvscope.engine import BeamSearchParams, Cause, EventKind, RequestRefused, SamplingParams
from kvscope.engine.sampling.beam_search import MAX_LENGTH_PENALTY, BeamSearch, Continuation, common_prefix
from kvscope.workbench.sentences import Context, sentence
from schedules import EOS, Schedules, check, options, prompts
from searching import PROMPT, alone, assert_same, found, search


def events_of(core, kind):
    return [event for event in core.events.since(0)[0] if event.kind is kind]


def distinct_blocks(core, request_id):
    return len({block for child in core.get(request_id).children for table in child.block_tables for block in table})


# --- results, whatever becomes of the blocks


@pytest.mark.parametrize("windows", [(0,), (0, 5), (3,)])
@pytest.mark.parametrize("cache", ["hash", "radix"])
@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
def test_the_search_is_the_one_that_its_texts_alone_give(block_size, cache, windows):
    core = make_core(windows=windows, block_size=block_size, num_blocks=500, prefix_cache=cache)
    ends = [*range(40)]
    wanted = [search(4), search(3, length_penalty=0.0), search(1), search(5, early_stopping=True, stop_token_ids=ends)]
    for params in wanted:
        core.add_request(PROMPT, params)
    core.add_request(PROMPT, greedy(12))
    run(core)
    for request_id, params in enumerate(wanted, 1):
        assert_same(found(core, request_id), alone(PROMPT, params, windows=windows))
    assert core.get(5).children[0].output_token_ids == reference(PROMPT, greedy(12), windows=windows)
    assert core.tables.pool.num_used == 0


def test_ends_have_their_reasons():
    core = make_core(num_blocks=200, eos_token_ids=[EOS])
    core.add_request(PROMPT, search(6, stop_token_ids=[*range(20, 60)], early_stopping="never"))
    run(core)
    children = core.get(1).children
    for child in children:
        last = child.output_token_ids[-1]
        reason = "stop" if last == EOS or 20 <= last < 60 else "length"
        assert (child.finish_reason, child.stop_reason) == (reason, last if 20 <= last < 60 else None)
    assert "stop" in {child.finish_reason for child in children}
    told = [(e.child, e.cause, e.numbers["output_tokens"]) for e in events_of(core, EventKind.FINISHED)]
    assert told == [(c.child, c.finish_cause, c.num_output_tokens) for c in children]


@pytest.mark.parametrize("after", range(1, 14))
def test_a_search_is_preempted_and_resumed_as_a_whole(after):
    """Also while it is being computed again, in a budget that computes it in pieces."""
    core = make_core(num_blocks=200, max_num_batched_tokens=5)
    core.add_request(PROMPT, search(4))
    for again in range(2):
        for _ in range(after):
            if core.has_work:
                core.step()
        if core.preempt(1):
            assert core.tables.pool.num_used == 0 and not core.scheduler.running and len(core.scheduler.waiting) == 1
            assert core.get(1).status == "preempted" and core.get(1).children[0].num_preemptions == again + 1
            core.check_integrity()
    run(core)
    assert_same(found(core, 1), alone(PROMPT, search(4)))


def test_the_oldest_search_finishes_in_the_smallest_pool_that_takes_it():
    params, others = search(3, max_tokens=9), [search(2, max_tokens=9), greedy(9), search(3, max_tokens=9)]
    needed = make_core().tables.blocks_for_beams(10, 18, 3)
    core = make_core(num_blocks=1 + needed, enable_prefix_caching=False)
    for one in (params, *others):
        core.add_request(PROMPT, one)
    run(core)
    told = sum(core.get(request_id).metrics.num_preemptions for request_id in (1, 2, 3, 4))
    assert (
        told == core.metrics()["vllm:num_preemptions_total"] == core.metrics()["vllm:request_num_preemptions_sum"] > 0
    )
    for request_id, one in ((1, params), (2, others[0]), (4, others[2])):
        assert_same(found(core, request_id), alone(PROMPT, one))
    assert all(event.request_id > 1 for event in events_of(core, EventKind.PREEMPTED))
    with pytest.raises(
        RequestRefused, match=f"beam_width=4 and max_tokens=9 need {needed + 3} blocks of 4 tokens, the pool"
    ):
        core.add_request(PROMPT, search(4, max_tokens=9))


def test_beams_advance_together_or_not_at_all():
    core = make_core(num_blocks=200, max_num_batched_tokens=6)
    for params in (greedy(20), greedy(20), greedy(20), search(4, max_tokens=8)):
        core.add_request([1, 2], params)
    while core.has_work:
        tokens = core.step().scheduled.get(4, 0)
        core.check_integrity()
        children = core.get(4).children
        if core.get(4).has_forked and not core.get(4).finished:
            assert len({(c.num_tokens, c.num_computed_tokens) for c in children}) == 1
            assert tokens in (0, 2, 4)  # nothing, the prompt, all beams
    assert_same(found(core, 4), alone([1, 2], search(4, max_tokens=8)))


def test_beams_that_leave_free_the_budget_that_was_kept_for_them():
    """An older prefill gets no token, since all are kept for the beams; they find no blocks and go: now it gets them."""
    core = make_core(block_size=1, num_blocks=14, max_num_batched_tokens=3, enable_prefix_caching=False)
    core.add_request([1], greedy(7))
    core.step()
    core.add_request(PROMPT, search(3, max_tokens=2))
    core.step()
    core.preempt(1)  # its three tokens come back with the last of the prompt, before the beams fork
    run(core)
    assert [event.request_id for event in events_of(core, EventKind.PREEMPTED)] == [1, 2]
    assert core.get(1).children[0].output_token_ids == reference([1], greedy(7))
    assert_same(found(core, 2), alone(PROMPT, search(3, max_tokens=2)))


# --- sharing


def test_a_step_copies_at_most_one_block_a_child_and_moves_nothing():
    core = make_core(num_blocks=200)
    core.add_request(PROMPT, search(4, max_tokens=20))
    while core.has_work:
        tables = {id(child): (child, list(child.block_tables[0])) for child in core.get(1).children}
        first = core.events.next_index
        core.step()
        copied = [e.child for e in core.events.since(first)[0] if e.kind is EventKind.COPIED]
        assert len(copied) == len(set(copied)) <= 3  # the last of four readers writes in place
        for child, before in tables.values():
            if child in core.get(1).children and child.block_tables[0]:
                full = max(0, len(before) - 1)
                assert list(child.block_tables[0][:full]) == before[:full]
    assert core.metrics()["kvscope:blocks_copied_total"] == len(events_of(core, EventKind.COPIED)) > 0


def test_forks_and_dropped_beams_are_told_in_words():
    core = make_core(num_blocks=200, enable_prefix_caching=False)
    core.add_request(PROMPT, search(4, max_tokens=20))
    run(core)
    causes = {event.cause for event in events_of(core, EventKind.FREED)}
    assert Cause.BEAM_SEARCH in causes and Cause.FINISHED in causes
    split, *continued = events_of(core, EventKind.FORKED)
    assert split.numbers["samples"] == 4 and all("parent" in event.numbers for event in continued) and continued
    context = Context(block_size=4)
    context.learn([split])
    freed = next(event for event in events_of(core, EventKind.FREED) if event.cause is Cause.BEAM_SEARCH)
    assert "was no longer among the best." in sentence(freed, context).headline
    place, parent = "abcd"[continued[0].child], "abcd"[int(continued[0].numbers["parent"])]
    headline = f"Beam 1{place} goes on from 1{parent} because several of the best texts begin like 1{parent}."
    assert sentence(continued[0], context).headline == headline and len(headline.split()) <= 20
    assert sentence(split, context).headline == "Request 1 split into 4 beams, 1a to 1d, that share 3 blocks."
    submitted = sentence(events_of(core, EventKind.SUBMITTED)[0], context)
    assert submitted.consequence == "It asks for the best of 4 beams, each of at most 20 new tokens."


def test_the_saving_of_four_beams():
    """1 − physical blocks / sum of logical blocks, averaged over the steps (arXiv 2309.06180, figure 15)."""
    savings = []
    for prompt in (PROMPT, PROMPT * 6):
        core = make_core(block_size=4, num_blocks=500, enable_prefix_caching=False)
        core.add_request(prompt, search(4, max_tokens=64))
        ratios = []
        while core.has_work:
            core.step()
            children = core.get(1).children
            logical = sum(len(child.block_tables[0]) for child in children)
            if len(children) == 4 and logical:
                assert core.tables.pool.num_used == distinct_blocks(core, 1)
                ratios.append(1 - core.tables.pool.num_used / logical)
        savings.append(sum(ratios) / len(ratios))
    print(
        "beam width 4, 64 new tokens: {:.0%} of the blocks saved with a prompt of 10, {:.0%} with one of 60".format(
            *savings
        )
    )
    assert 0.2 < savings[0] < savings[1] < 0.75


@pytest.mark.parametrize("block_size", [1, 3, 16, 32])
def test_four_samples_of_a_prompt_of_64_use_the_blocks_of_the_closed_form(block_size):
    """At each step: the prompt's full blocks once, and per sample what lies behind them."""
    core = make_core(block_size=block_size, num_blocks=600, enable_prefix_caching=False)
    core.add_request([i % VOCAB for i in range(64)], SamplingParams(n=4, seed=1, max_tokens=64))
    core.step()
    assert core.tables.pool.num_used == -(-64 // block_size)
    shared = 64 // block_size
    for written in range(1, 63):  # output tokens whose KV is written; the step that writes the 63rd ends all samples
        core.step()
        blocks = shared + 4 * (-(-(64 + written) // block_size) - shared)
        assert core.tables.pool.num_used == blocks == distinct_blocks(core, 1), written
    assert core.metrics()["kvscope:blocks_copied_total"] == (3 if 64 % block_size else 0)
    core.step()
    assert not core.has_work and core.tables.pool.num_used == 0


@pytest.mark.parametrize("penalty", [-MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY])
def test_the_strongest_length_penalty_still_scores_a_text_of_a_million_tokens(penalty):
    params, text = search(1, length_penalty=penalty, max_tokens=2**21), list(range(2**20))
    beams = BeamSearch(params, params.max_tokens, frozenset({EOS}))
    beams.advance([Continuation(0, EOS, -1e6), Continuation(0, EOS + 1, -2e6)], [text])
    (best,) = beams.hypotheses
    assert math.isfinite(best.score) and best.score < 0 and beams.done


# --- what is refused


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({"beam_width": 0}, "beam_width=0: must be an integer from 1 to 64"),
        ({"beam_width": 65}, "beam_width=65: must be an integer from 1 to 64"),
        ({"beam_width": 2, "length_penalty": float("nan")}, "length_penalty=nan: must be a number from -40 to 40"),
        ({"beam_width": 2, "length_penalty": -41}, "length_penalty=-41: must be a number from -40 to 40"),
        ({"beam_width": 2, "early_stopping": "always"}, "early_stopping='always': must be True, False or 'never'"),
        ({"beam_width": 2, "n": 3}, "n=3: must be left out"),
        ({"beam_width": 2, "temperature": -0.5}, "temperature=-0.5: must be 0 or more"),
        ({"beam_width": 2, "temperature": float("inf")}, "temperature=inf: must be 0 or more"),
        ({"beam_width": 2, "top_k": 5}, "top_k=5: must be left out"),
        ({"beam_width": 2, "stop": ["a"]}, r"stop=\['a'\]: must be left out"),
        ({"beam_width": 2, "logprobs": 3}, "logprobs=3: must be left out"),
    ],
)
def test_params_are_refused(options, limit):
    with pytest.raises(ValueError, match=limit):
        BeamSearchParams(**options)


def test_defaults_are_vllms_and_a_copy_keeps_its_width():
    params = BeamSearchParams(beam_width=3)
    assert (params.temperature, params.length_penalty, params.ignore_eos) == (0.0, 1.0, False)
    assert not params.include_stop_str_in_output
    changed = dataclasses.replace(params, temperature=0.7)
    assert (changed.n, changed.beam_width, changed.temperature) == (3, 3, 0.7)


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        ({"max_num_seqs": 3}, "beam_width=4: all beams run together, and max_num_seqs allows 3"),
        ({"max_num_batched_tokens": 3}, "beam_width=4: all beams run together, and max_num_batched_tokens allows 3"),
        (
            {"kv_allocator": "orca-max", "enable_prefix_caching": False, "max_model_len": 60},
            "it needs kv_allocator='paged'",
        ),
    ],
)
def test_an_engine_refuses_what_it_cannot_search(config, limit):
    with pytest.raises(RequestRefused, match=limit):
        make_core(**config).add_request(PROMPT, search())


def test_broken_logits_fail_the_search_alone():
    core = make_core(num_blocks=200)
    for params in (search(4), greedy(12)):
        core.add_request(PROMPT, params)
    core.step()
    core.step()
    core.runner.model.broken_rows = [2]
    core.step()
    core.check_integrity()
    assert core.get(1).status == "failed" and "not finite" in str(core.get(1).error)
    run(core)
    assert core.get(2).children[0].output_token_ids == reference(PROMPT, greedy(12))


# --- for users


def test_a_search_that_ends_in_the_step_of_its_prompt_has_a_first_token():
    core = make_core()
    core.add_request([1, 2, 3], BeamSearchParams(beam_width=2, max_tokens=1))
    run(core)
    assert core.get(1).status == "finished" and core.get(1).metrics.ttft is not None
    assert core.metrics()["vllm:time_to_first_token_seconds_count"] == 1


def test_a_handle_shows_the_beams_and_then_the_hypotheses(make_engine):
    engine = make_engine()
    engine.pause()
    handle = engine.submit("Say: ", BeamSearchParams(beam_width=3, max_tokens=10))
    assert [sample.token_ids for sample in handle.partial().outputs] == [[], [], []]
    for _ in range(4):
        engine.step()
    beams = handle.partial().outputs
    assert [len(beam.token_ids) for beam in beams] == [4, 4, 4] and len({tuple(beam.token_ids) for beam in beams}) == 3
    logprobs = [beam.cumulative_logprob for beam in beams]
    assert logprobs == sorted(logprobs, reverse=True)
    assert all(beam.text == engine.tokenizer.decode(beam.token_ids) and beam.finish_reason is None for beam in beams)
    engine.step()
    assert handle.partial().outputs[0].cumulative_logprob < logprobs[0]
    engine.resume()
    output = handle.result(30)
    assert len(output.outputs) == 3 and all(sample.finish_reason in ("stop", "length") for sample in output.outputs)
    scores = [sample.cumulative_logprob / len(sample.token_ids) for sample in output.outputs]
    assert scores == sorted(scores, reverse=True)
    assert "".join(handle) == output.outputs[0].text
    shown = [sample.token_ids[: -1 if sample.finish_reason == "stop" else None] for sample in output.outputs]
    assert [sample.text for sample in output.outputs] == [engine.tokenizer.decode(ids) for ids in shown]


@pytest.mark.parametrize(("include", "text"), [(False, "AB"), (True, "ABC")])
def test_the_id_that_ends_a_hypothesis_shows_only_when_asked(make_scripted, include, text):
    engine, _ = make_scripted([*b"ABCD"])
    params = BeamSearchParams(beam_width=1, max_tokens=4, stop_token_ids=[67], include_stop_str_in_output=include)
    (output,) = engine.generate([1], params)
    (best,) = output.outputs
    assert (best.text, best.token_ids, best.finish_reason) == (text, [*b"ABC"], "stop")


def test_a_cancelled_search_keeps_its_beams(engine):
    engine.pause()
    handle = engine.submit([1, 2, 3], BeamSearchParams(beam_width=2, max_tokens=50, ignore_eos=True))
    for _ in range(3):
        engine.step()
    before = handle.partial().outputs
    engine._driver.call(lambda core: core.preempt(handle.request_id))
    handle.cancel()
    engine.resume()
    output = handle.result(30)
    assert [o.finish_reason for o in output.outputs] == ["cancelled"] * 2
    assert [(o.token_ids, o.text) for o in output.outputs] == [(o.token_ids, o.text) for o in before]
    engine.wait_idle(10)
    assert engine.snapshot().num_used_blocks == 0


def test_generate_takes_both_kinds_of_params(engine):
    both = [SamplingParams(temperature=0, max_tokens=5), BeamSearchParams(beam_width=2, max_tokens=5)]
    sampled, searched = engine.generate(["hello", "hello"], both)
    assert len(sampled.outputs) == 1 and len(searched.outputs) == 2


# --- at any time, anything


class Searches(Schedules):
    """Random schedules with searches among the samples."""

    @initialize(options=options)
    def start(self, options):
        room = {"max_num_seqs": 3, "max_num_batched_tokens": 3, "num_blocks": 30, "num_cpu_blocks": 8}  # for some beams
        super().start(options | {name: options[name] and options[name] + more for name, more in room.items()})
        # It looks a cached block's text up by request and child, after the step; a beam may have lost its place by then.
        self.oracle_of_cache = SimpleNamespace(follow=lambda requests: None)

    @rule(
        prompt=prompts,
        width=st.sampled_from([1, 2, 3, 4, 4]),
        max_tokens=st.sampled_from([None, *range(1, 10)]),
        stopping=st.sampled_from([True, False, "never"]),
        penalty=st.sampled_from([-1.0, 0.0, 1.0, 2.0]),
        stop=st.lists(st.integers(0, VOCAB - 1), max_size=30),
        lost_after=st.lists(st.integers(0, 6), max_size=2),
    )
    def search(self, prompt, width, max_tokens, stopping, penalty, stop, lost_after):
        """`lost_after` so many steps, each time, it loses its blocks."""
        params = BeamSearchParams(
            beam_width=width,
            max_tokens=max_tokens,
            early_stopping=stopping,
            length_penalty=penalty,
            stop_token_ids=stop,
        )
        try:
            request_id = self.core.add_request(prompt, params)
        except RequestRefused as refusal:
            assert str(refusal.needed) in str(refusal) and str(refusal.available) in str(refusal)
            return
        self.requests[request_id] = self.core.get(request_id)
        for steps in lost_after:
            self.steps(steps)
            self.core.preempt(request_id)
            self.books_balance()

    @precondition(lambda self: any(r.beams is None for r in self.live()))
    @rule(data=st.data())
    def stop_string(self, data):
        request = data.draw(st.sampled_from([r for r in self.live() if r.beams is None]))
        seq = data.draw(st.sampled_from([c for c in request.children if not c.status.is_over]))
        if seq.num_output_tokens:
            keep = data.draw(st.integers(max(0, seq.num_output_tokens - 2), seq.num_output_tokens))
            self.cut[request.id, seq.child] = keep
            self.core.finish(request.id, seq.child, keep, Cause.STOP_STRING, "stop")

    def expected(self, request, child):
        if request.beams is None:
            return super().expected(request, child)
        texts = alone(
            request.prompt_token_ids, request.params, request.max_tokens, windows=self.windows, eos_token_ids=[EOS]
        )
        assert len(texts) == len(request.children)
        return texts[child][0]


def test_random_schedules_with_searches():
    check(Searches, 60, 25)


@pytest.mark.full
def test_many_random_schedules_with_searches():
    check(Searches, 1000, 50)


def test_common_prefix():
    assert common_prefix([array("q", t) for t in ([1, 2, 3, 9], [1, 2, 4, 0], [1, 2, 3, 1])]) == 2
    assert common_prefix([array("q", [1, 2])]) == 2
