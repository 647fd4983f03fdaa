"""Sampling options that need a tokenizer or reach the output of a request."""

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
