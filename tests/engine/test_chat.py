"""Prompts of every kind become token ids by one rule, and bad ones say what is wrong with them."""

import numpy as np
import pytest
import torch
from kvscope.engine.text.prompts import PromptEncoder, as_list
from tiny import BOS, IM_START, VOCAB_SIZE, tiny_tokenizer
from tokenizers import processors

CHAT = [{"role": "user", "content": "ok"}]


@pytest.fixture
def encoder():
    return PromptEncoder(tiny_tokenizer(), VOCAB_SIZE)


@pytest.fixture
def encoder_with_bos():
    """A tokenizer that adds a BOS to raw text, and whose template writes its own, as Llama 3's does."""
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.Sequence(
        [processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", BOS)])]
    )
    tokenizer.chat_template = "<|bos|>" + tokenizer.chat_template
    return PromptEncoder(tokenizer, VOCAB_SIZE)


def test_text_gets_the_tokenizers_special_tokens_and_a_template_writes_its_own(encoder_with_bos):
    assert encoder_with_bos.encode("ok").token_ids == [BOS, *b"ok"]
    ids = encoder_with_bos.encode(CHAT).token_ids
    assert ids.count(BOS) == 1 and ids[:2] == [BOS, IM_START]


def test_a_second_bos_is_kept_and_warned_of(encoder_with_bos):
    with pytest.warns(UserWarning, match=r"begins with '<\|bos\|>' and the tokenizer adds another"):
        assert encoder_with_bos.encode("<|bos|>ok").token_ids == [BOS, BOS, *b"ok"]


@pytest.mark.filterwarnings("error")
def test_a_bos_that_the_tokenizer_does_not_add_is_no_reason_to_warn(encoder):
    assert encoder.encode("<|bos|>ok").token_ids == [BOS, *b"ok"]


def test_chat_renders_and_ends_where_the_answer_begins(encoder):
    assert encoder.encode(CHAT).text == "<|im_start|>user\nok<|im_end|>\n<|im_start|>assistant\n"
    assert encoder.encode(CHAT, template="{{ messages[0]['content'] }}!").text == "ok!"


def test_a_model_without_template_says_what_to_do():
    encoder = PromptEncoder(tiny_tokenizer(chat_template=False), VOCAB_SIZE)
    with pytest.raises(ValueError, match=r"no chat template.*template=.*submit\(str\)"):
        encoder.encode(CHAT)
    assert encoder.encode(CHAT, template="{{ messages[0]['content'] }}").token_ids == list(b"ok")


TALK = [*CHAT, {"role": "assistant", "content": "so I"}]
RICH = (  # shows everything that a template can be given, and begins with the BOS, as Llama 3's does
    "<|bos|>{% for tool in tools or [] %}[{{ tool | tojson }}]{% endfor %}"
    "{% for document in documents or [] %}({{ document.title }}){% endfor %}{{ mood }}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def look_up(city: str) -> str:
    """The weather of a city.

    Args:
        city: its name
    """
    return city


@pytest.mark.parametrize(
    ("options", "theirs"),
    [
        ({}, {"add_generation_prompt": True}),
        ({"add_generation_prompt": True}, {"add_generation_prompt": True}),
        ({"add_generation_prompt": False}, {}),
        ({"continue_final_message": True}, {"continue_final_message": True}),
        ({"continue_final_message": True, "add_generation_prompt": False}, {"continue_final_message": True}),
        ({"tools": (look_up,)}, {"tools": [look_up], "add_generation_prompt": True}),
        ({"tools": [{"name": "f"}]}, {"tools": [{"name": "f"}], "add_generation_prompt": True}),
        ({"documents": [{"title": "d"}]}, {"documents": [{"title": "d"}], "add_generation_prompt": True}),
        ({"chat_template_kwargs": {"mood": "glad"}}, {"mood": "glad", "add_generation_prompt": True}),
        ({"template": "{{ messages[0].content }}"}, {"chat_template": "{{ messages[0].content }}"}),
    ],
)
def test_a_chat_is_what_transformers_makes_of_it_with_one_bos(encoder_with_bos, options, theirs):
    tokenizer = encoder_with_bos._tokenizer
    tokenizer.chat_template = RICH
    expected = tokenizer.apply_chat_template(TALK, return_dict=False, **theirs)
    encoded = encoder_with_bos.encode(TALK, **options)
    assert encoded.token_ids == expected
    assert encoded.token_ids.count(BOS) == (0 if "template" in options else 1)
    if options.get("continue_final_message"):
        assert encoded.text.endswith("<|im_start|>assistant\nso I")


def test_a_call_of_a_tool_needs_no_content(encoder):
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "look_up", "arguments": {"city": "Ulm"}}}]}
    template = "{{ messages[1].tool_calls[0].function.arguments.city }}"
    assert encoder.encode([*CHAT, call], template=template).text == "Ulm"


@pytest.mark.parametrize(
    ("prompt", "options", "error", "words"),
    [
        ("ok", {"template": "x"}, ValueError, r"template= is for chat messages, and this prompt is text: leave it out"),
        ([1], {"tools": []}, ValueError, r"tools= is for chat messages, and this prompt is token ids"),
        (CHAT, {"max_tokens": 5}, TypeError, r"max_tokens= is not known here: .*template, tools.*SamplingParams"),
        ("ok", {"temprature": 5}, TypeError, r"temprature= is not known here"),
        (TALK, {"add_generation_prompt": True, "continue_final_message": True}, ValueError, "either begins a message"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(encoder, prompt, options, error, words):
    with pytest.raises(error, match=words):
        encoder.encode(prompt, **options)


@pytest.mark.parametrize("ids", [[1, 2], (1, 2), np.array([1, 2]), torch.tensor([1, 2]), [np.int64(1), 2]])
def test_token_ids_may_come_in_any_sequence(encoder, ids):
    encoded = encoder.encode(ids)
    assert encoded.token_ids == [1, 2] and encoded.text is None
    assert all(type(i) is int for i in encoded.token_ids)


@pytest.mark.parametrize(
    ("prompt", "error", "words"),
    [
        ("", ValueError, "prompt='': must not be empty"),
        ([], ValueError, "at least one token id"),
        ([1, VOCAB_SIZE], ValueError, f"token id {VOCAB_SIZE}: must be from 0 to {VOCAB_SIZE - 1}"),
        ([-1], ValueError, "token id -1: must be from 0"),
        ([1, 2.5], TypeError, "holds 2.5: token ids must be integers"),
        ([1, True], TypeError, "holds True: token ids must be integers"),
        (["a", "b"], TypeError, "holds 'a': token ids must be integers"),
        (None, TypeError, "prompt of type NoneType: must be a string, a list of token ids"),
        (7, TypeError, "prompt of type int: must be a string, a list of token ids"),
        ("ok\ud800", ValueError, r"prompt holds '\\ud800' at position 2: half of a surrogate pair is no character"),
        ([{"role": "user", "content": "\udc80"}], ValueError, r"prompt holds '\\udc80'"),
        ([{"content": "ok"}], ValueError, "message 0 has role=None"),
        ([{"role": "user", "content": 3}], ValueError, "message 0 has content=3"),
    ],
)
def test_a_bad_prompt_says_what_it_holds_and_what_it_may_hold(encoder, prompt, error, words):
    with pytest.raises(error, match=words):
        encoder.encode(prompt)


def test_a_template_that_refuses_is_quoted(encoder):
    with pytest.raises(ValueError, match="the chat template refused these messages: only users"):
        encoder.encode(CHAT, template="{{ raise_exception('only users') }}")


def test_without_a_tokenizer_ids_still_work_and_text_says_why_not():
    encoder = PromptEncoder(None, VOCAB_SIZE)
    assert encoder.encode([5]).token_ids == [5]
    with pytest.raises(ValueError, match="no tokenizer, so a text prompt cannot be read; submit token ids"):
        encoder.encode("ok")


@pytest.mark.parametrize(
    ("prompts", "batch"),
    [
        ("ok", ["ok"]),
        (["ok", "ho"], ["ok", "ho"]),
        ([1, 2], [[1, 2]]),
        (np.array([1, 2]), [[1, 2]]),
        (torch.tensor([1, 2]), [[1, 2]]),
        ([[1], [2]], [[1], [2]]),
        (torch.tensor([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        (CHAT, [CHAT]),
        ([CHAT, "ok", [1]], [CHAT, "ok", [1]]),
        ([], []),
    ],
)
def test_one_prompt_is_a_batch_of_one(prompts, batch):
    assert as_list(prompts) == batch


@pytest.mark.parametrize("prompts", [None, 7, {1, 2}, np.array(5)])
def test_what_is_no_batch_of_prompts_is_said(prompts):
    with pytest.raises(TypeError, match="must be a prompt or a list of prompts"):
        as_list(prompts)
