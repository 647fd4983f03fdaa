"""Masks, biases and penalties against a slow reference: plain Python, one row at a time, step by step in the order that
`processors` documents. Logits must be equal to the bit, tokens up to the rounding of a cumulative sum."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
from fake_model import greedy, make_core, reference, run
from hypothesis import given, settings
from hypothesis import strategies as st
from kvscope.engine import Cause, EventKind, SamplingParams, StructuredOutputsParams
from kvscope.engine.sampling.processors import process
from kvscope.engine.sampling.random import request_seed, uniforms
from kvscope.engine.sampling.sampler import Sampler, SampleRow
from kvscope.kernels import ops

VOCAB = 12
KERNELS = {name: ops.resolve(name, "cpu", torch.float32) for name in ("reference", "cpu")}
INF = math.inf

# --- the slow reference


def slow_logits(logits, row):
    """Steps 2 to 9 for one row: float32 scalars in, float32 scalars out."""
    p, f32 = row.params, np.float32
    values = [f32(v) for v in logits]
    prompt = row.token_ids[: len(row.token_ids) - row.num_output_tokens]
    output = row.token_ids[len(prompt) :]
    for t in range(len(values)):
        if row.matcher is not None and t not in row.matcher.ids:
            values[t] = f32(-INF)
        if p.allowed_token_ids is not None and t not in p.allowed_token_ids:
            values[t] = f32(-INF)
        for word in p.bad_words:
            *before, last = word
            if last == t and len(before) <= len(output) and output[len(output) - len(before) :] == before:
                values[t] = f32(-INF)
        if t in row.masked_token_ids and not (row.matcher is not None and row.matcher.is_complete):
            values[t] = f32(-INF)
        if p.logit_bias and t in p.logit_bias:
            values[t] += f32(p.logit_bias[t])
        if t in prompt or t in output:
            r = f32(p.repetition_penalty)
            values[t] = values[t] / r if values[t] > 0 else values[t] * r
        values[t] -= f32(p.frequency_penalty) * f32(output.count(t))
        if t in output:
            values[t] -= f32(p.presence_penalty)
    return values


def slow_kept(values, p, nudge=(0.0, 0.0)):
    """({id kept by the filters of step 10: mass}); `nudge` moves the edges of top_p and min_p by what rounding may."""
    order = sorted(range(len(values)), key=lambda t: (-values[t], t))
    if p.temperature == 0:
        return {t: math.exp(float(v)) for t, v in enumerate(values)}
    mass = [math.exp((float(v) - float(values[order[0]])) / p.temperature) for v in values]
    if p.top_k > 0:
        order = order[: p.top_k]
    if p.top_p < 1:
        total, kept, so_far = sum(mass[t] for t in order), [], 0.0
        for t in order:
            if kept and so_far >= (p.top_p + nudge[0]) * total:
                break
            kept.append(t)
            so_far += mass[t]
        order = kept
    return {t: mass[t] for t in sorted(order) if mass[t] > 0 and mass[t] >= p.min_p + nudge[1]}


def slow_choice(values, p, uniform, nudge=(0.0, 0.0, 0.0)):
    """Step 10 for one row: −1 where nothing is left."""
    if max(values) == -INF:
        return -1
    if p.temperature == 0:
        return max(range(len(values)), key=lambda t: (values[t], -t))
    kept = slow_kept(values, p, nudge[:2])
    target, so_far = (uniform + nudge[2]) * sum(kept.values()), 0.0
    for t, mass in kept.items():
        so_far += mass
        if so_far > target:
            return t
    return t


# --- random parameters


@dataclasses.dataclass
class Structure:
    """A matcher that allows the same ids whatever was said."""

    ids: set
    is_complete: bool

    def allowed(self, output):
        return np.isin(np.arange(VOCAB), list(self.ids))


ids = st.integers(0, VOCAB - 1)
words = st.lists(st.lists(ids, min_size=1, max_size=3), max_size=4)
biases = st.one_of(st.none(), st.dictionaries(ids, st.sampled_from([-100.0, -1.5, 0.25, 3.0, 100.0]), max_size=4))
allowed = st.one_of(st.none(), st.lists(ids, min_size=1, max_size=VOCAB))
penalty = st.sampled_from([0.0, 0.0, -2.0, -0.3, 0.5, 1.7])
combinations = st.builds(
    SamplingParams,
    presence_penalty=penalty,
    frequency_penalty=penalty,
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.6, 1.3, 2.0]),
    temperature=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 3, 5]),
    top_p=st.sampled_from([1.0, 0.35, 0.8]),
    min_p=st.sampled_from([0.0, 0.05, 0.3]),
    seed=st.integers(0, 2**32),
    logit_bias=biases,
    allowed_token_ids=allowed,
    bad_words=words,
)


@st.composite
def batches(draw):
    """(logits float32 [S, VOCAB], rows); some rows read the same logits. Few values, so that ties are common."""
    num_logits = draw(st.integers(1, 3))
    quarters = st.integers(-12, 12).map(lambda q: q / 4)
    logits = draw(
        st.lists(st.lists(quarters, min_size=VOCAB, max_size=VOCAB), min_size=num_logits, max_size=num_logits)
    )
    rows = []
    for _ in range(draw(st.integers(1, 5))):
        prompt, output = draw(st.lists(ids, min_size=1, max_size=6)), draw(st.lists(ids, max_size=8))
        masked = draw(st.one_of(st.just(()), st.lists(ids, max_size=3).map(tuple)))
        where, params = draw(st.integers(0, num_logits - 1)), draw(combinations)
        matcher = draw(st.one_of(st.none(), st.none(), st.builds(Structure, st.sets(ids, min_size=1), st.booleans())))
        if matcher is not None:
            params = dataclasses.replace(params, structured_outputs=StructuredOutputsParams(regex="any"))
        rows.append(SampleRow(where, params, 1, draw(st.integers(0, 3)), len(output), masked, prompt + output, matcher))
    return torch.tensor(logits), rows


@settings(max_examples=300, deadline=None)
@given(batches())
def test_every_combination_gives_the_logits_and_the_tokens_of_the_slow_reference(batch):
    logits, rows = batch
    selected = logits[[row.logits_row for row in rows]]
    expected = [slow_logits(logits[row.logits_row].tolist(), row) for row in rows]
    process(selected, rows)
    assert selected.tolist() == [[float(v) for v in values] for values in expected]
    for name, kernels in KERNELS.items():
        sampled = Sampler(kernels, VOCAB).sample(logits.clone(), rows)
        for row, values, token in zip(rows, expected, sampled.token_ids, strict=True):
            uniform = uniforms([request_seed(row.params.seed, 0, 1)], [row.child], [row.num_output_tokens])[0]
            nudges = itertools.product(*[(-2e-6, 0.0, 2e-6)] * 3)
            assert token in {slow_choice(values, row.params, uniform, nudge) for nudge in nudges}, name
        nothing = [i for i, values in enumerate(expected) if max(values) == -INF]
        assert sampled.exhausted == sampled.invalid == nothing


@settings(max_examples=200, deadline=None)
@given(batches(), st.sampled_from([0, 3, VOCAB]))
def test_processed_logprobs_are_those_of_the_slow_reference(batch, count):
    logits, rows = batch
    for row in rows:
        row.params = dataclasses.replace(row.params, logprobs=count)
    sampled = Sampler(KERNELS["reference"], VOCAB, logprobs_mode="processed_logprobs").sample(logits.clone(), rows)
    for row, token, top in zip(rows, sampled.token_ids, sampled.logprobs, strict=True):
        if token < 0:
            assert top is None
            continue
        values = slow_logits(logits[row.logits_row].tolist(), row)
        edges = [slow_kept(values, row.params, nudge) for nudge in ((-2e-6, -2e-6), (0, 0), (2e-6, 2e-6))]
        if not edges[0].keys() == edges[1].keys() == edges[2].keys():
            continue  # a filter's edge, where rounding decides
        total = sum(edges[1].values())
        expected = [math.log(m / total) if (m := edges[1].get(t)) else -INF for t in range(VOCAB)]
        assert token in top and count <= len(top) <= count + 1
        assert list(top.values())[:count] == pytest.approx(sorted(expected, reverse=True)[:count], abs=1e-5)
        assert list(top.values()) == pytest.approx([expected[t] for t in top], abs=1e-5)


# --- each by itself, in numbers


def processed(logits, output=(), prompt=(), masked=(), **params):
    row = SampleRow(0, SamplingParams(**params), 1, 0, len(output), masked, [*prompt, *output])
    values = torch.tensor([logits])
    process(values, [row])
    return values[0].tolist()


def test_penalties_in_numbers():
    logits = [2.0, -2.0, 2.0, 2.0]
    assert processed(logits, prompt=[0, 1], output=[2], repetition_penalty=2.0) == [1.0, -4.0, 1.0, 2.0]
    assert processed(logits, prompt=[0], output=[2, 2, 1], frequency_penalty=0.5) == [2.0, -2.5, 1.0, 2.0]
    assert processed(logits, prompt=[0], output=[2, 2, 1], presence_penalty=0.5) == [2.0, -2.5, 1.5, 2.0]
    both = processed(logits, output=[2, 2], repetition_penalty=2.0, frequency_penalty=0.25, presence_penalty=-1.0)
    assert both == [2.0, -2.0, 1.5, 2.0], "repetition comes first"


def test_a_bias_comes_before_the_penalties():
    assert processed([1.0, 1.0], output=[0], logit_bias={0: 3.0}, repetition_penalty=2.0) == [2.0, 1.0]


def test_a_bias_does_not_bring_back_what_is_masked():
    assert processed([0.0, 0.0, 0.0], masked=[0], logit_bias={0: 9.0, 1: 9.0}, allowed_token_ids=[0, 2]) == [
        -INF,
        -INF,
        0.0,
    ]


@pytest.mark.parametrize(
    ("output", "forbidden"),
    [([], {3}), ([1], {2, 3}), ([0, 1], {2, 3}), ([1, 2], {0, 3}), ([2, 1], {2, 3}), ([1, 3], {3})],
)
def test_a_bad_word_ends_before_its_last_token(output, forbidden):
    values = processed([0.0] * 4, prompt=[1], output=output, bad_words=[[1, 2], [1, 2, 0], [3]])
    assert {t for t, v in enumerate(values) if v == -INF} == forbidden


def test_masks_do_not_hide_logits_that_are_not_finite():
    sampler = Sampler(KERNELS["reference"], VOCAB)
    row = SampleRow(0, SamplingParams(temperature=0, allowed_token_ids=[1]), 1, 0, 0)
    for value in (math.nan, INF):
        logits = torch.zeros(1, VOCAB)
        logits[0, 5] = value
        sampled = sampler.sample(logits, [row])
        assert (sampled.invalid, sampled.exhausted) == ([0], [])
    assert sampler.sample(torch.full((1, VOCAB), -INF), [row]).exhausted == []


# --- in the engine

PARAMS = [
    {"presence_penalty": 1.5},
    {"frequency_penalty": -1.0},
    {"repetition_penalty": 1.8},
    {"logit_bias": {5: 7.0}, "frequency_penalty": 1.0},
    {"allowed_token_ids": [3, 4, 5, 6], "repetition_penalty": 1.3},
    {"bad_words": [[5, 6], [6, 5], [3]], "allowed_token_ids": [3, 4, 5, 6]},
    {"min_tokens": 9, "allowed_token_ids": [4, 5, 6], "presence_penalty": 1.0},
]


@pytest.mark.parametrize("after", [0, 1, 3, 4, 5])
def test_counts_go_on_after_a_preemption_and_a_prefix_hit(after):
    """Every sample has the text that the sampler gives to its own tokens alone, whatever became of its blocks."""
    core = make_core(num_blocks=200, eos_token_ids=[4], max_num_seqs=64)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    wanted = [SamplingParams(n=n, seed=3, max_tokens=12, **p) for p in PARAMS for n in (1, 3)]
    wanted += [greedy(12, **p) for p in PARAMS]
    for params in wanted:
        core.add_request(prompt, params)
    for _ in range(after + 1):
        core.step()
    for request_id in range(1, len(wanted) + 1):
        core.preempt(request_id)
    run(core)
    assert core.metrics()["kvscope:preempted_prefix_cache_hits_total"] > 0
    for request_id, params in enumerate(wanted, 1):
        for child in core.get(request_id).children:
            expected = reference(prompt, params, request_id=request_id, child=child.child, eos_token_ids=[4])
            assert child.output_token_ids == expected, params


def test_a_request_whose_masks_leave_nothing_fails_alone_and_says_why():
    core = make_core(eos_token_ids=[4])
    core.add_request([1, 2, 3], greedy(6))
    core.add_request([1, 2, 3], greedy(6, allowed_token_ids=[4], min_tokens=2))
    run(core)
    assert core.get(1).status == "finished" and core.get(2).status == "failed"
    assert "bad_words and min_tokens together forbid every one" in str(core.get(2).error)
    (failed,) = [e for e in core.events.since(0)[0] if e.kind is EventKind.FAILED]
    assert failed.cause is Cause.EXCEPTION and failed.request_id == 2


@pytest.mark.parametrize(
    ("option", "field"),
    [
        ({"allowed_token_ids": [3, 97]}, "allowed_token_ids"),
        ({"logit_bias": {97: 1.0}}, "logit_bias"),
        ({"bad_words": [[1, 97]]}, "bad_words"),
    ],
)
def test_an_id_outside_the_vocabulary_is_refused(option, field):
    with pytest.raises(ValueError, match=f"{field} holds 97: the model's token ids go from 0 to 96"):
        make_core().add_request([1], SamplingParams(**option))
