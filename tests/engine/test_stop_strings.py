"""Stop strings: nothing of one is ever shown, nothing behind one either, however the text is cut into pieces."""

import itertools

import families
from hypothesis import given
from hypothesis import strategies as st
from kvscope.engine import SamplingParams
from kvscope.engine.text.detokenizer import Decoder
from kvscope.engine.text.sample_text import SampleText
from kvscope.engine.text.stop_strings import StopStrings


def feed(stops, pieces):
    """(pieces shown, matched) of a whole sample."""
    shown = []
    for piece in pieces:
        text, matched = stops.push(piece)
        shown.append(text)
        if matched:
            return shown, matched
    return [*shown, stops.flush()], None


def test_a_stop_string_over_four_pieces_is_never_shown():
    assert feed(StopStrings(["DEFGHIJ"]), ["ABC", "DEF", "G", "HI", "J", "K"]) == (["ABC", "", "", "", ""], "DEFGHIJ")


def test_a_prefix_that_is_not_completed_is_shown_after_all():
    assert feed(StopStrings(["DEFGHIJ"]), ["ABC", "DEF", "G", "X"]) == (["ABC", "", "", "DEFGX", ""], None)


def test_only_the_longest_matching_suffix_is_held():
    assert feed(StopStrings(["b,c"]), ["a,b", ",x"]) == (["a,", "b,x", ""], None)


def test_a_held_prefix_comes_out_at_the_end():
    assert feed(StopStrings(["</think>"]), ["so </", "thi"]) == (["so ", "", "</thi"], None)


def test_the_stop_string_stays_when_asked_and_nothing_behind_it():
    assert feed(StopStrings(["DEF"], include=True), ["AD", "EFG"]) == (["A", "DEF"], "DEF")


def test_the_match_that_ends_first_wins_then_the_longest():
    assert StopStrings(["bcd", "c"]).push("abcd") == ("ab", "c")
    assert StopStrings(["c", "bc"]).push("abcd") == ("a", "bc")


@given(
    text=st.text("ab,", max_size=30),
    stop=st.lists(st.text("ab,", min_size=1, max_size=4), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 30), max_size=6),
    include=st.booleans(),
)
def test_the_result_does_not_depend_on_the_pieces(text, stop, cuts, include):
    edges = [0, *sorted(min(c, len(text)) for c in cuts), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(edges)]
    whole = feed(StopStrings(stop, include), list(text))
    cut = feed(StopStrings(stop, include), pieces)
    assert ("".join(cut[0]), cut[1]) == ("".join(whole[0]), whole[1])


@given(text=st.text("ab,", max_size=30), stop=st.lists(st.text("ab,", min_size=1, max_size=4), min_size=1, max_size=3))
def test_exactly_the_possible_beginnings_are_held(text, stop):
    stops = StopStrings(stop)
    shown = ""
    for i, char in enumerate(text):
        piece, matched = stops.push(char)
        shown += piece
        seen = text[: i + 1]
        if matched:
            assert seen == shown + matched
            return
        held = max((k for s in stop for k in range(len(s)) if seen.endswith(s[:k])), default=0)
        assert shown == seen[: len(seen) - held]


def test_a_stop_string_in_a_byte_run_counts_at_the_byte_that_completes_it():
    tokenizer = families.llama_sentencepiece()
    ids = tokenizer.convert_tokens_to_ids(["▁Hello", "<0xE2>", "<0x82>", "<0xAC>", "▁world"])
    text = SampleText(Decoder(tokenizer), SamplingParams(stop="€"))
    assert [text.push(i) for i in ids[:4]] == [("Hello", None), ("", None), ("", None), ("", "€")]


def test_a_stop_string_may_end_inside_a_token():
    tokenizer = families.llama_sentencepiece()
    ids = tokenizer.convert_tokens_to_ids(["DEF", "G", "HI", "J"])
    text = SampleText(Decoder(tokenizer), SamplingParams(stop="GH"))
    assert [text.push(i) for i in ids[:3]] == [("DEF", None), ("", None), ("", "GH")]
