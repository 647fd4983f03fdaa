"""Structured output: every text that ends is what its schema, pattern or grammar describes, whatever else is asked for."""

import json
import re
import sys

import numpy as np
import pytest
import tiny
from fake_model import make_core
from kvscope.engine import RequestRefused, SamplingParams, StructuredOutputsParams
from kvscope.engine.sampling.structured import MAX_GRAMMARS, GrammarCompiler

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "blue"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
PATTERN = r"[a-f]{2,6}-[0-9]{1,3}"
CHOICES = ["yes", "no", "not now"]
LARK = 'start: "(" (start | /[xy]/) ")"'
GBNF = 'root ::= "<" [0-9] [0-9]? ">"'


def is_record(text):
    record = json.loads(text)
    return (
        list(record) == ["name", "age", "tags"] and len(record["name"]) <= 5 and 0 <= record["age"] <= 120
        and set(record["tags"]) <= {"red", "blue"} and len(record["tags"]) <= 2
    )  # fmt: skip


KINDS = {
    "json": (StructuredOutputsParams(json=SCHEMA), is_record),
    "json text": (StructuredOutputsParams(json=json.dumps(SCHEMA)), is_record),
    "regex": (StructuredOutputsParams(regex=PATTERN), re.compile(PATTERN).fullmatch),
    "choice": (StructuredOutputsParams(choice=CHOICES), CHOICES.__contains__),
    "lark": (StructuredOutputsParams(grammar=LARK), re.compile(r"(\(+)[xy](\)+)").fullmatch),
    "gbnf": (StructuredOutputsParams(grammar=GBNF), re.compile(r"<\d\d?>").fullmatch),
}


def wants(structure, **options):
    return SamplingParams(**{"max_tokens": 120, "seed": 0, "structured_outputs": structure, **options})


@pytest.mark.parametrize("kind", KINDS)
def test_every_text_is_what_was_described(engine, kind):
    structure, fits = KINDS[kind]
    outputs = engine.generate(["Say: "] * 20, [wants(structure, seed=seed) for seed in range(20)])
    texts = set()
    for output in outputs:
        (sample,) = output.outputs
        if kind == "lark" and sample.finish_reason == "length":  # it may nest for ever
            continue
        assert sample.finish_reason == "stop" and fits(sample.text), sample.text
        assert sample.token_ids[-1] == tiny.EOS and tiny.EOS not in sample.token_ids[:-1]
        texts.add(sample.text)
    assert len(texts) > 1


OPTIONS = {
    "penalties": {"presence_penalty": 1.5, "frequency_penalty": 1.0, "repetition_penalty": 1.3},
    "filters": {"top_k": 20, "top_p": 0.9, "temperature": 1.5},
    "greedy": {"temperature": 0},
    "bias": {"logit_bias": {tiny.EOS: 100.0, ord("}"): 50.0}},
    "bad words": {"bad_words": ["r", "re", "ri", "ro"]},
    "no text": {"detokenize": False},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_with_other_options(engine, option):
    structure, fits = KINDS["json"]
    for output in engine.generate(["Say: "] * 4, [wants(structure, seed=s, **OPTIONS[option]) for s in range(4)]):
        ids = output.outputs[0].token_ids
        assert output.outputs[0].finish_reason == "stop" and fits(engine.tokenizer.decode(ids[:-1]))


@pytest.mark.parametrize("after", range(0, 20, 3))
def test_n_samples_and_preemption_change_nothing(make_engine, after):
    """Every sample is the one that an undisturbed engine gives."""
    structure, fits = KINDS["json"]
    (undisturbed,) = make_engine().generate("Say: ", wants(structure, n=3, seed=5))
    engine = make_engine(block_size=4)
    engine.pause()
    handle = engine.submit("Say: ", wants(structure, n=3, seed=5))
    engine.submit("other", wants(KINDS["regex"][0]))
    for _ in range(after):
        engine.step()
    engine._driver.call(lambda core: core.preempt(handle.request_id))
    engine.resume()
    outputs = handle.result(60).outputs
    assert [o.token_ids for o in outputs] == [o.token_ids for o in undisturbed.outputs]
    assert all(fits(o.text) for o in outputs) and len({o.text for o in outputs}) == 3


def test_min_tokens_holds_as_long_as_the_text_can_go_on(engine):
    (longer,) = engine.generate("Say: ", wants(StructuredOutputsParams(regex="[ab]+"), min_tokens=30))
    assert len(longer.outputs[0].token_ids) > 30
    (output,) = engine.generate("Say: ", wants(KINDS["choice"][0], min_tokens=100))
    assert output.outputs[0].text in CHOICES and output.outputs[0].finish_reason == "stop"


def test_a_stop_string_and_max_tokens_end_it_early(engine):
    (cut,) = engine.generate("Say: ", wants(KINDS["json"][0], stop=['"age"']))
    assert cut.outputs[0].text.startswith('{"name":') and cut.outputs[0].stop_reason == '"age"'
    (short,) = engine.generate("Say: ", wants(KINDS["json"][0], max_tokens=4))
    assert short.outputs[0].finish_reason == "length" and short.outputs[0].text.startswith('{"n')


def test_masks_that_leave_nothing_fail_that_request_alone(engine):
    fine = engine.submit("Say: ", wants(KINDS["regex"][0]))
    handle = engine.submit("Say: ", wants(KINDS["choice"][0], allowed_token_ids=[1, 2]))
    with pytest.raises(RuntimeError, match="structured_outputs, allowed_token_ids, bad_words and min_tokens together"):
        handle.result(30)
    assert KINDS["regex"][1](fine.result(30).outputs[0].text)


# --- what is refused, when it is submitted


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({}, "structured_outputs has nothing: must have one of json, regex, choice, grammar"),
        ({"regex": "a", "choice": ["b"]}, "has regex, choice: must have one of"),
        ({"choice": []}, r"structured_outputs.choice=\[\]: must be a list of strings"),
        ({"choice": "yes"}, "structured_outputs.choice='yes': must be a list of strings"),
        ({"regex": 3}, "structured_outputs.regex=3: must be a string"),
        ({"json": [1]}, r"structured_outputs.json=\[1\]: must be a JSON schema"),
    ],
)
def test_params_that_say_nothing_or_too_much(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        StructuredOutputsParams(**options)


@pytest.mark.parametrize(
    ("structure", "sentence"),
    [
        ({"json": {"type": "objekt"}}, "structured_outputs.json=.*Invalid type: objekt"),
        ({"json": '{"type":'}, "structured_outputs.json=.*: "),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 4}}, "minimum .5. is greater than maximum"),
        ({"json": {"$ref": "http://example.org/x"}}, "structured_outputs.json=.*not present"),
        ({"json": {"enum": [{1, 2}]}}, r"structured_outputs.json holds \{1, 2\}, which is no JSON"),
        ({"regex": "(?=a)b"}, "structured_outputs.regex=.*look-around"),
        ({"regex": "a["}, "structured_outputs.regex='a\\[': .*unclosed character class"),
        ({"grammar": "start: x"}, "structured_outputs.grammar='start: x': .*unknown name"),
        ({"grammar": "root ::= ("}, "structured_outputs.grammar="),
    ],
)
def test_what_cannot_be_followed_is_refused_in_one_line(engine, structure, sentence):
    with pytest.raises(ValueError, match=sentence) as refused:
        engine.submit("Say: ", wants(StructuredOutputsParams(**structure)))
    assert "\n" not in str(refused.value)
    assert engine.handles() == {}


def test_combinations_that_cannot_be():
    with pytest.raises(ValueError, match="ignore_eos=True: must be False with structured_outputs"):
        wants(KINDS["json"][0], ignore_eos=True)
    with pytest.raises(
        ValueError, match=r"structured_outputs=\{'json': \{\}\}: must be a StructuredOutputsParams, or None"
    ):
        wants({"json": {}})


def test_it_needs_a_tokenizer_an_end_and_the_library(monkeypatch):
    (structure, _), tokenizer = KINDS["regex"], tiny.tiny_tokenizer()
    with pytest.raises(ValueError, match="needs a tokenizer, and this model has none"):
        GrammarCompiler(None, 300, [tiny.EOS]).compile(structure)
    with pytest.raises(ValueError, match="needs an end-of-sequence token"):
        GrammarCompiler(tokenizer, 300, []).compile(structure)
    with pytest.raises(RequestRefused, match="is not compiled"):
        make_core().add_request([1], SamplingParams(structured_outputs=structure))
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ImportError, match=r'pip install "kvscope\[structured\]"'):
        GrammarCompiler(tokenizer, 300, [tiny.EOS]).compile(structure)


# --- the compiler and the matcher by themselves


def compiled(vocab_size=300, **structure):
    compiler = GrammarCompiler(tiny.tiny_tokenizer(), vocab_size, [tiny.EOS])
    return compiler.compile(StructuredOutputsParams(**structure)).compiled


def test_a_mask_in_full():
    matcher, ids = compiled(choice=["ab", "th"]).start(), tiny.tiny_tokenizer().convert_tokens_to_ids
    assert np.flatnonzero(matcher.allowed([])).tolist() == [ids("a"), ids("t"), ids("th")]
    assert np.flatnonzero(matcher.allowed([ids("t")])).tolist() == [ids("h")] and not matcher.is_complete
    assert np.flatnonzero(matcher.allowed([ids("t"), ids("h")])).tolist() == [tiny.EOS] and matcher.is_complete
    assert len(matcher.allowed([ids("t"), ids("h"), tiny.EOS])) == 300


def test_a_model_with_more_or_fewer_ids_than_its_tokenizer():
    assert compiled(vocab_size=320, regex="é").start().allowed([]).shape == (320,)
    assert compiled(vocab_size=280, choice=["th"]).start().allowed([]).shape == (280,)


def test_matchers_of_one_grammar_do_not_share_their_place():
    grammar = compiled(regex="a+b")
    first, second = grammar.start(), grammar.start()
    first.allowed(list(b"ab"))
    assert first.is_complete and second.allowed([])[ord("a")] and not second.is_complete


def test_grammars_are_compiled_once_and_forgotten_in_the_end():
    compiler = GrammarCompiler(tiny.tiny_tokenizer(), 300, [tiny.EOS])
    first = compiler.compile(StructuredOutputsParams(json=SCHEMA)).compiled
    assert compiler.compile(StructuredOutputsParams(json=dict(SCHEMA))).compiled is first
    for i in range(MAX_GRAMMARS):
        compiler.compile(StructuredOutputsParams(regex=f"a{{{i + 1}}}"))
    assert compiler.compile(StructuredOutputsParams(json=SCHEMA)).compiled is not first
    assert len(compiler._grammars) == MAX_GRAMMARS
