"""Chat messages to the text that a model was trained on, through its tokenizer's chat template.

The template (Jinja, run in transformers' sandbox) writes every special token itself, so its text must be tokenized
without adding any.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages: TypeAlias = Sequence[Mapping[str, Any]]


def render_chat(tokenizer: PreTrainedTokenizerBase, messages: Messages, template: str | None = None) -> str:
    """The prompt text, ready for the assistant's answer. `template` (Jinja) overrides the tokenizer's own.

    Raises ValueError for a message without a role or content, and where neither gives a template.
    """
    for i, message in enumerate(messages):
        if not isinstance(message.get("role"), str) or not message["role"]:
            raise ValueError(f"message {i} has role={message.get('role')!r}: must be a word such as 'user'")
        if not isinstance(message.get("content"), str | list):
            raise ValueError(f"message {i} has content={message.get('content')!r}: must be a text")
    if template is None and not tokenizer.chat_template:
        raise ValueError(
            "this model's tokenizer has no chat template: pass one as template=, or write the prompt yourself and "
            "submit(str)"
        )
    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            chat_template=template,
            tokenize=False,
            add_generation_prompt=True,
        )
    except Exception as error:  # a template refuses with its own exceptions (jinja2's and others)
        raise ValueError(f"the chat template refused these messages: {error}") from error
    return str(text)
