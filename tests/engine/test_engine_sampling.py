"""Sampling options that need a tokenizer or reach the output of a request."""

import math

import pytest
import tiny
from kvscope.engine import SamplingParams


def greedy(max_tokens=12, **options):
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **options)


@pytest.fixture
def says_hat(make_scripted):
    """An engine whose model wants to say "a hat, no hat" for ever."""
    ids = tiny.tiny_tokenizer()("a hat, no hat")["input_ids"]
    return make_scripted(ids)[0], len(ids)


def test_a_bad_word_stops_short_of_its_last_token(says_hat):
    engine, length = says_hat
    (free,) = engine.generate([1], greedy(length))
    assert free.outputs[0].text == "a hat, no hat"
    (output,) = engine.generate([1], greedy(length, bad_words=["hat"]))
    text = output.outputs[0].text
    assert "hat" not in text and text.startswith("a h") and len(output.outputs[0].token_ids) == length
    assert engine.generate([1], greedy(length, bad_words=["  hat", "hat"]))[0].outputs == output.outputs


def test_a_word_becomes_its_ids_with_and_without_a_leading_space(make_engine):
    engine = make_engine()
    handle = engine.submit("hello", greedy(2, bad_words=["hat", [7, 8], " hat", "zzz"]))
    ids = engine.tokenizer(["hat", " hat", "zzz", " zzz"])["input_ids"]
    assert handle.params.bad_words == (tuple(ids[0]), tuple(ids[1]), (7, 8), tuple(ids[2]), tuple(ids[3]))
    assert handle.result(30).finished


def test_a_word_needs_a_tokenizer_and_ids_do_not(make_engine, tmp_path):
    engine = make_engine(tiny.tiny_llama(tmp_path, tokenizer=False))
    with pytest.raises(ValueError, match="no tokenizer, so a word in bad_words cannot be read"):
        engine.submit([1], greedy(bad_words=["word"]))
    first = engine.generate([1], greedy())[0].outputs[0].token_ids
    second = engine.generate([1], greedy(bad_words=[first[:1]]))[0].outputs[0].token_ids
    assert first[0] not in second


def test_without_detokenize_there_are_ids_and_no_text(engine):
    with_text, without = engine.generate(["hello"] * 2, [greedy(), greedy(detokenize=False)])
    assert with_text.outputs[0].text and without.outputs[0].text == ""
    assert without.outputs[0].token_ids == with_text.outputs[0].token_ids
    assert without.outputs[0].finish_reason == "length"


def test_ids_outside_the_vocabulary_are_refused_when_submitted(engine):
    with pytest.raises(ValueError, match="logit_bias holds 300: the model's token ids go from 0 to 299"):
        engine.submit("hello", greedy(logit_bias={300: 1.0}))


# --- log-probabilities of the prompt


def assert_prompt_logprobs(folder, ids, entries, count):
    """The full list, against transformers: best first, the prompt's own token always inside."""
    logprobs = tiny.oracle_logits(folder, ids).log_softmax(-1)
    assert len(entries) == len(ids) and entries[0] is None
    for entry, token_id, expected in zip(entries[1:], ids[1:], logprobs, strict=False):
        values = list(entry.values())
        assert token_id in entry and len(entry) <= count + 1 and values[:count] == sorted(values[:count], reverse=True)
        assert values[:count] == pytest.approx(expected.topk(count).values.tolist(), abs=1e-4)
        assert all(value == pytest.approx(float(expected[token]), abs=1e-4) for token, value in entry.items())


def test_prompt_logprobs_are_whole_whatever_the_cache_holds_and_however_it_is_cut(make_engine, tiny_folder):
    ids = list(b"a prompt of several blocks, " * 3)
    for budget in (512, 7):
        engine = make_engine(max_num_batched_tokens=budget)
        engine.generate(ids, greedy(2))
        first, second, unasked = engine.generate(
            [ids] * 3, [greedy(2, prompt_logprobs=c) for c in (3, 0)] + [greedy(2)]
        )
        assert_prompt_logprobs(tiny_folder, ids, first.prompt_logprobs, 3)
        assert_prompt_logprobs(tiny_folder, ids, second.prompt_logprobs, 0)
        assert unasked.prompt_logprobs is None
        assert [first.num_cached_tokens, second.num_cached_tokens, unasked.num_cached_tokens] == [0, 0, 80]
        assert first.outputs[0].token_ids == unasked.outputs[0].token_ids


def test_a_prompt_of_one_token_has_one_entry(engine):
    assert engine.generate([1], greedy(2, prompt_logprobs=2))[0].prompt_logprobs == [None]


def test_prompt_logprobs_come_with_the_first_token_and_are_a_copy(engine):
    engine.pause()
    handle = engine.submit([1, 2, 3], greedy(3, prompt_logprobs=1))
    assert handle.partial().prompt_logprobs is None
    engine.step()
    handle.partial().prompt_logprobs.clear()
    assert len(handle.partial().prompt_logprobs) == 3
    engine.resume()
    handle.result(30)


# --- what log-probabilities are of


def test_processed_logprobs_are_of_what_the_token_was_drawn_from(make_engine):
    params = SamplingParams(max_tokens=6, seed=1, top_k=2, temperature=0.7, logprobs=3, prompt_logprobs=1)
    (raw,) = make_engine().generate([5, 6, 7], params)
    (processed,) = make_engine(logprobs_mode="processed_logprobs").generate([5, 6, 7], params)
    assert raw.outputs[0].token_ids == processed.outputs[0].token_ids
    assert raw.prompt_logprobs == processed.prompt_logprobs, "of the raw logits in either mode"
    for top in processed.outputs[0].logprobs:
        kept = [value for value in top.values() if value > -math.inf]
        assert len(kept) == 2 and sum(map(math.exp, kept)) == pytest.approx(1)
    for top in raw.outputs[0].logprobs:
        assert min(top.values()) > -math.inf and sum(map(math.exp, top.values())) < 1
