"""Text that comes token by token equals the full decode, never takes anything back, and never splits a character."""

import functools
import itertools

import families
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvscope.engine.text.detokenizer import REPLACEMENT, Decoder, Detokenizer


@functools.cache
def decoder_of(family):
    tokenizer = family()
    return tokenizer, Decoder(tokenizer)


def stream(family, ids, skip=True):
    """(pieces while running, the flushed tail)."""
    detokenizer = Detokenizer(decoder_of(family)[1], skip)
    return [detokenizer.push(i) for i in ids], detokenizer.flush()


@pytest.mark.parametrize("family", families.FAMILIES, ids=lambda f: f.__name__)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_pieces_add_up_to_the_full_decode(family, data):
    tokenizer, _ = decoder_of(family)
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=40))
    skip = data.draw(st.booleans())
    pieces, tail = stream(family, ids, skip)
    assert "".join(pieces) + tail == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("family", families.FAMILIES, ids=lambda f: f.__name__)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_what_was_given_out_is_a_prefix_of_every_later_decode(family, data):
    tokenizer, decoder = decoder_of(family)
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=25))
    detokenizer, given_out = Detokenizer(decoder), ""
    for i, token_id in enumerate(ids):
        given_out += detokenizer.push(token_id)
        assert tokenizer.decode(ids[: i + 1], skip_special_tokens=True) == given_out + detokenizer.pending()


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=12))
def test_valid_text_never_shows_a_replacement_character(text):
    pieces, tail = stream(families.byte_level, list(text.encode()))
    assert "".join(pieces) + tail == text
    if REPLACEMENT not in text:
        assert REPLACEMENT not in "".join(pieces) and tail == ""


def test_an_emoji_comes_whole_with_its_last_byte():
    pieces, tail = stream(families.byte_level, [*b"a", *"🙂".encode(), *b"b"])
    assert pieces == ["a", "", "", "", "🙂", "b"] and tail == ""


def test_an_emoji_that_was_cut_ends_as_one_replacement_character():
    ids = [*b"a", *"🙂".encode()[:3]]
    pieces, tail = stream(families.byte_level, ids)
    assert (pieces, tail) == (["a", "", "", ""], REPLACEMENT)


def test_invalid_bytes_inside_the_text_show_as_replacement_characters():
    pieces, tail = stream(families.byte_level, [*b"a", 0xFF, *b"b"])
    assert pieces == ["a", "", REPLACEMENT + "b"] and tail == ""


def test_a_byte_fallback_run_is_held_until_it_ends():
    tokenizer, _ = decoder_of(families.llama_sentencepiece)
    euro = tokenizer.convert_tokens_to_ids(["<0xE2>", "<0x82>", "<0xAC>"])
    word = tokenizer.convert_tokens_to_ids("▁world")
    pieces, _ = stream(families.llama_sentencepiece, [*euro, word])
    assert pieces == ["", "", "", "€ world"]


def test_a_skipped_special_token_does_not_eat_the_space_behind_it():
    tokenizer, _ = decoder_of(families.llama_sentencepiece)
    hello, world = tokenizer.convert_tokens_to_ids(["▁Hello", "▁world"])
    pieces, _ = stream(families.llama_sentencepiece, [hello, tokenizer.eos_token_id, world])
    assert pieces == ["Hello", "", " world"]


class CountingDecoder(Decoder):
    decoded = 0

    def decode(self, ids, skip_special_tokens=False):
        self.decoded += len(ids)
        return super().decode(ids, skip_special_tokens)


@pytest.mark.parametrize(
    "ids", [[97] * 4000, [10] * 4000, [0xFF] * 4000, [0xF0, 97] * 2000], ids=["text", "newlines", "invalid", "mixed"]
)
def test_work_grows_with_the_text_and_not_with_its_square(ids):
    decoder = CountingDecoder(families.byte_level())
    decoder.decoded = 0
    detokenizer = Detokenizer(decoder)
    text = "".join(map(detokenizer.push, ids)) + detokenizer.flush()
    assert len(text) == len(ids)
    assert decoder.decoded <= 5 * len(ids)


def test_one_token_reads_as_inside_a_text():
    tokenizer, decoder = decoder_of(families.llama_sentencepiece)
    assert decoder.token_text(tokenizer.convert_tokens_to_ids("▁world")) == " world"
    assert decoder.token_text(tokenizer.eos_token_id) == "</s>"
    _, decoder = decoder_of(families.byte_level)
    assert decoder.token_text(0xF0) == REPLACEMENT


@settings(max_examples=150, deadline=None)
@given(family=st.sampled_from([families.byte_level, families.gemma_sentencepiece, families.wordpiece]), data=st.data())
def test_special_tokens_that_follow_each_other_can_stand_without_a_space(family, data):
    """Nothing else changes: with what the tokenizer puts between them taken out, it is the full decode."""
    tokenizer, decoder = decoder_of(family)
    special = sorted(decoder.special_text)
    # A bare continuation mark has no text of its own: special tokens on both sides of one only look like neighbours.
    words = [i for i, token in enumerate(tokenizer.convert_ids_to_tokens(range(len(tokenizer)))) if token != "##"]
    ids = data.draw(st.lists(st.one_of(st.sampled_from(special), st.sampled_from(words)), max_size=20))
    detokenizer = Detokenizer(decoder, False, False)
    expected = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    if family is families.wordpiece:  # the others put nothing there
        for a, b in itertools.product(decoder.special_text.values(), repeat=2):
            expected = expected.replace(f"{a} {b}", f"{a}{b}").replace(f"{a} {b}", f"{a}{b}")
    assert "".join(map(detokenizer.push, ids)) + detokenizer.flush() == expected


def test_no_space_between_special_tokens_in_words():
    tokenizer, decoder = decoder_of(families.wordpiece)
    ids = tokenizer.convert_tokens_to_ids(["hello", "<s>", "</s>", "<s>", "world"])
    for spaces, text in ((True, "hello <s> </s> <s> world"), (False, "hello <s></s><s> world")):
        detokenizer = Detokenizer(decoder, False, spaces)
        assert "".join(map(detokenizer.push, ids)) + detokenizer.flush() == text
