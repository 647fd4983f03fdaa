"""Beam search equals transformers' in ids and scores, whatever becomes of the blocks, and exhaustive search where that is
possible."""

import copy
import functools
import itertools
import math
from types import SimpleNamespace

import pytest
import tiny
import torch
from kvscope.engine import BeamSearchParams, EngineConfig, EngineCore, SamplingParams
from kvscope.engine.kvcache.storage import KVStorage
from kvscope.engine.models.loader import load_model
from kvscope.engine.sampling.beam_search import BeamSearch
from kvscope.kernels import ops

pytestmark = pytest.mark.usefixtures("one_thread")

TEXT = [(61 * i * i + 17 * i + 5) % 256 for i in range(200)]
PROMPT, MATES = TEXT[:37], [TEXT[50:51], TEXT[60:85], TEXT[:37]]
NEW_TOKENS = 16
ENDS = [32, 101, 105, 110, 116, 10, 97]  # letters that this model likes: with them hypotheses end at many lengths
PENALTIES, STOPPING = (-1.0, 0.0, 1.0, 2.0), (False, True, "never")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.tiny_llama(tmp_path_factory.mktemp("beams"), tokenizer=False)


@pytest.fixture(scope="module", params=["reference", "cpu"])
def loaded(request, folder):
    kernels = ops.resolve(request.param, "cpu", torch.float32)
    files = SimpleNamespace(folder=folder, name="tiny", source="a test")
    return load_model(files, dtype=torch.float32, device="cpu", kernels=kernels), kernels


def make_core(model, kernels, ends, **options):
    config = EngineConfig(**{"num_blocks": 200, "block_size": 4, "max_model_len": 100, "watermark": 0.0} | options)
    storage = KVStorage(model.spec.kv_groups, num_blocks=config.num_blocks, block_size=config.block_size,
                        dtype=torch.float32, device="cpu", kernels=kernels,
                        num_cpu_blocks=config.num_cpu_blocks)  # fmt: skip
    return EngineCore(model, storage, config, eos_token_ids=ends)


def search(width, penalty=1.0, stopping=False, **options):
    return BeamSearchParams(
        beam_width=width, length_penalty=penalty, early_stopping=stopping, **{"max_tokens": NEW_TOKENS} | options
    )


def run(core):
    while core.has_work:
        core.step()
        core.check_integrity()
    assert core.tables.pool.num_used == 0


def hypotheses(core, request_id):
    """[(ids, score)] of a finished search."""
    request = core.get(request_id)
    penalty = request.params.length_penalty
    ids = [child.output_token_ids for child in request.children]
    return [(i, c.cumulative_logprob / len(i) ** penalty) for i, c in zip(ids, request.children, strict=True)]


@functools.cache
def at_temperature(folder, temperature):
    """The transformers model whose logits are divided by the temperature: its head has a weight of its own that is."""
    model = copy.deepcopy(tiny.reference_model(folder))
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight / temperature)
    return model


_known = {}


def theirs(folder, prompt, width, penalty, stopping, ends, temperature=1.0):
    key = (folder, tuple(prompt), width, penalty, stopping, tuple(ends), temperature)
    if key not in _known:
        with torch.inference_mode():
            found = at_temperature(folder, temperature).generate(
                torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), do_sample=False,
                num_beams=width, num_return_sequences=width, length_penalty=penalty, early_stopping=stopping,
                max_new_tokens=NEW_TOKENS, pad_token_id=0, eos_token_id=list(ends) or None,
                return_dict_in_generate=True, output_scores=True,
            )  # fmt: skip
        texts = [ids[len(prompt) :] for ids in found.sequences.tolist()]
        ended = [next((i + 1 for i, t in enumerate(ids) if t in ends), len(ids)) for ids in texts]
        scores = found.sequences_scores.tolist()
        _known[key] = [(ids[:end], score) for ids, end, score in zip(texts, ended, scores, strict=True)]
    return _known[key]


def assert_same(ours, expected):
    assert [ids for ids, _ in ours] == [ids for ids, _ in expected]
    assert [score for _, score in ours] == pytest.approx([score for _, score in expected], abs=1e-3)


@pytest.mark.parametrize("stopping", STOPPING)
@pytest.mark.parametrize("penalty", PENALTIES)
def test_ids_and_scores_are_those_of_transformers(loaded, folder, penalty, stopping):
    """Six searches at once, which are each other's batch mates; some share their prompt, which the first leaves cached."""
    for ends in ([tiny.EOS], ENDS):
        core = make_core(*loaded, ends, num_blocks=400)
        wanted = {core.add_request(PROMPT, search(width, penalty, stopping)): (PROMPT, width) for width in (2, 4, 7)}
        for prompt, width in zip(MATES, (3, 2, 5), strict=True):
            wanted[core.add_request(prompt, search(width, penalty, stopping))] = (prompt, width)
        core.add_request(MATES[1], SamplingParams(temperature=0, max_tokens=20))
        run(core)
        for request_id, (prompt, width) in wanted.items():
            assert_same(hypotheses(core, request_id), theirs(folder, prompt, width, penalty, stopping, ends))
    lengths = {len(ids) for i in wanted for ids, _ in hypotheses(core, i)}
    assert len(lengths) > 1 or (penalty, stopping) == (2.0, "never"), "ends really occur"


def test_a_temperature_divides_the_logits_of_transformers(loaded, folder):
    """Batch mates at different temperatures; 0 is as 1, and others find other texts or other scores."""
    core = make_core(*loaded, ENDS, num_blocks=600)
    temperatures = (0.0, 1.0, 0.5, 0.8, 1.7, 3.0)
    wanted = [(PROMPT, 4, 1.0, False), (MATES[1], 3, 0.0, "never"), (MATES[0], 5, 2.0, True)]
    ids = {}
    for temperature, (prompt, *options) in itertools.product(temperatures, wanted):
        request_id = core.add_request(prompt, search(*options, temperature=temperature))
        ids[request_id] = (prompt, *options, ENDS, temperature or 1.0)
    run(core)
    for request_id, options in ids.items():
        assert_same(hypotheses(core, request_id), theirs(folder, *options))
    texts = {tuple(tuple(text) for text, _ in hypotheses(core, i)) for i in ids if ids[i][0] is PROMPT}
    assert len(texts) > 1


@pytest.mark.parametrize("temperature", [0.0, 0.3])
def test_width_1_is_greedy(loaded, folder, temperature):
    core = make_core(*loaded, [])
    request_id = core.add_request(PROMPT, search(1, temperature=temperature))
    run(core)
    assert core.get(request_id).children[0].output_token_ids == tiny.oracle(folder, PROMPT, NEW_TOKENS)


SWAP = {"preemption_mode": "swap", "num_cpu_blocks": 200}
KINDS = {
    "off": {"enable_prefix_caching": False},
    "hash": {"prefix_cache": "hash"},
    "radix": {"prefix_cache": "radix"},
    "swap": {"prefix_cache": "radix"} | SWAP,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
@pytest.mark.parametrize("after", [0, 1, 2, 5, 12])
def test_beams_that_lose_their_blocks_go_on_right(loaded, folder, after, block_size, kind):
    """By hand: after so many steps, and once more while they are being computed again, or are back from host memory."""
    core = make_core(*loaded, ENDS, block_size=block_size, max_num_batched_tokens=11, **KINDS[kind])
    ids = [core.add_request(PROMPT, search(4, ignore_eos=True)), core.add_request(MATES[1], search(3, 0.0, "never"))]
    steps = 0
    while core.has_work:
        core.step()
        core.check_integrity()
        steps += 1
        if steps in (4 + after, 9 + after):
            for request_id in ids:
                core.preempt(request_id)
                core.check_integrity()
    assert_same(hypotheses(core, ids[0]), theirs(folder, PROMPT, 4, 1.0, False, []))
    assert_same(hypotheses(core, ids[1]), theirs(folder, MATES[1], 3, 0.0, "never", ENDS))


@pytest.mark.parametrize("mode", [{}, SWAP], ids=["recompute", "swap"])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_a_tiny_pool_where_searches_take_each_others_blocks(loaded, folder, block_size, mode):
    largest = make_core(*loaded, [], block_size=block_size).tables.blocks_for_beams(37, 37 + NEW_TOKENS - 1, 4)
    core = make_core(*loaded, [], block_size=block_size, num_blocks=1 + largest + 16 // block_size, **mode)
    wanted = {core.add_request(prompt, search(4)): prompt for prompt in (PROMPT, MATES[1], TEXT[90:127])}
    mate = core.add_request(MATES[0], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    preempted = 0
    while core.has_work:
        preempted += len(core.step().preempted)
        core.check_integrity()
    assert preempted > 0
    for request_id, prompt in wanted.items():
        assert_same(hypotheses(core, request_id), theirs(folder, prompt, 4, 1.0, False, []))
    assert core.get(mate).children[0].output_token_ids == tiny.oracle(folder, MATES[0], 30)


# --- exhaustive search

VOCAB, END = 4, 3


def logits_of(text):
    seed = sum((token + 1) * 7**i for i, token in enumerate(text))
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def every_text(max_tokens):
    """[(ids, logprob)] of all texts that end with END or at max_tokens."""
    found, open_texts = [], [((), 0.0)]
    while open_texts:
        text, so_far = open_texts.pop()
        for token, logprob in enumerate(torch.log_softmax(logits_of(text), -1).tolist()):
            one = ((*text, token), so_far + logprob)
            (found if token == END or len(one[0]) == max_tokens else open_texts).append(one)
    return found


def beam_search(params, max_tokens):
    """The search itself, without an engine: [(ids, score)]."""
    beams, texts = BeamSearch(params, max_tokens, frozenset([END])), [()]
    while not beams.done:
        steps = beams.advance(beams.rank(torch.stack([logits_of(text) for text in texts])), [list(t) for t in texts])
        texts = [(*texts[step.beam], step.token_id) for step in steps]
        beams.logprobs = [step.logprob for step in steps]
    return [(tuple(found.output), found.score) for found in beams.hypotheses]


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
@pytest.mark.parametrize("penalty", [-1.0, -0.3, 0.0, 0.5, 1.0, 2.0])
def test_a_beam_for_every_text_is_exhaustive_search(penalty, max_tokens):
    width = 36  # continuations of the third step
    texts = [(ids, logprob / len(ids) ** penalty) for ids, logprob in every_text(max_tokens)]
    best = sorted(texts, key=lambda text: -text[1])[:width]
    for stopping in (False, "never"):
        ours = beam_search(search(width, penalty, stopping), max_tokens)
        assert [ids for ids, _ in ours] == [ids for ids, _ in best]
        assert [score for _, score in ours] == pytest.approx([score for _, score in best], abs=1e-5)


def slow_beam_search(width, penalty, stopping, max_tokens, temperature):
    """The definition, in plain Python."""
    texts, kept = [((), 0.0)], []
    for length in itertools.count(1):
        steps = [
            ((*text, token), so_far + logprob)
            for text, so_far in texts
            for token, logprob in enumerate(torch.log_softmax(logits_of(text) / temperature, -1).tolist())
        ]
        steps = sorted(steps, key=lambda step: -step[1])[: 2 * width]
        ended = [s for s in steps[:width] if s[0][-1] == END or length == max_tokens]
        kept = sorted(kept + [(ids, p / length**penalty) for ids, p in ended], key=lambda text: -text[1])[:width]
        texts = [s for s in steps if s[0][-1] != END and length < max_tokens][:width]
        bound = max_tokens if stopping == "never" and penalty > 0 else length
        full = len(kept) == width
        if not texts or (full and (stopping is True or texts[0][1] / bound**penalty <= kept[-1][1])):
            return kept


@pytest.mark.parametrize("stopping", STOPPING)
@pytest.mark.parametrize("penalty", PENALTIES)
def test_narrow_searches_follow_the_definition(penalty, stopping):
    for width, max_tokens, temperature in itertools.product((1, 2, 3, 5), (1, 4, 12), (1.0, 0.4, 2.5)):
        ours = beam_search(search(width, penalty, stopping, temperature=temperature), max_tokens)
        expected = slow_beam_search(width, penalty, stopping, max_tokens, temperature)
        assert [ids for ids, _ in ours] == [ids for ids, _ in expected]
        assert [score for _, score in ours] == pytest.approx([score for _, score in expected], abs=1e-4)


def test_equal_continuations_are_taken_in_order():
    beams = BeamSearch(search(2), 8, frozenset())
    ranked = beams.rank(torch.zeros(1, 5))
    assert [(step.beam, step.token_id) for step in ranked] == [(0, 0), (0, 1), (0, 2), (0, 3)]
    beams.logprobs = [0.0, 0.0]
    ranked = beams.rank(torch.tensor([[0.0, -math.inf, -math.inf], [0.0, 0.0, -math.inf]]))
    assert [(step.beam, step.token_id) for step in ranked] == [(0, 0), (1, 0), (1, 1)]


def test_the_lowest_and_highest_temperatures_give_numbers():
    """At the lowest all but the best are next to impossible, at the highest all are equally likely."""
    logits = torch.tensor([[3.0, 1.0, 3.0, -math.inf]])
    for lowest in (5e-324, 1e-46, 1e-30):
        ranked = BeamSearch(search(2, temperature=lowest), 8, frozenset()).rank(logits)
        assert [step.token_id for step in ranked[:2]] == [0, 2]
        assert [step.logprob for step in ranked[:2]] == pytest.approx([-math.log(2)] * 2)
        assert all(step.logprob < -1e20 for step in ranked[2:])
    ranked = BeamSearch(search(2, temperature=1.7e308), 8, frozenset()).rank(logits)
    assert [step.token_id for step in ranked] == [0, 1, 2]
    assert [step.logprob for step in ranked] == pytest.approx([-math.log(3)] * 3)
