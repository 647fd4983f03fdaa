"""Chat messages to the text that a model was trained on, through its tokenizer's chat template.

The template (Jinja, run in transformers' sandbox) writes every special token itself, so its text must be tokenized
without adding any.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages: TypeAlias = Sequence[Mapping[str, Any]]


class ChatOptions(TypedDict, total=False):
    """What may stand beside chat messages, under transformers' names but for `template` (its `chat_template`)."""

    template: str | None  # Jinja, instead of the tokenizer's own
    tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None  # JSON schemas, or functions that say the same
    documents: Sequence[Mapping[str, Any]] | None  # for templates that quote them
    add_generation_prompt: bool | None  # begin the assistant's answer; default: unless the last message is continued
    continue_final_message: bool  # leave the last message open: the answer goes on where it ends
    chat_template_kwargs: Mapping[str, Any] | None  # further variables of the template, such as enable_thinking


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages,
    *,
    template: str | None = None,
    tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool = False,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """The prompt text, ready for the assistant's answer; the options are those of `ChatOptions`.

    Raises ValueError for a message without a role or content, where there is no template, and for what it refuses.
    """
    for i, message in enumerate(messages):
        if not isinstance(message.get("role"), str) or not message["role"]:
            raise ValueError(f"message {i} has role={message.get('role')!r}: must be a word such as 'user'")
        if not isinstance(message.get("content"), str | list) and not message.get("tool_calls"):
            raise ValueError(f"message {i} has content={message.get('content')!r}: must be a text")
    if template is None and not tokenizer.chat_template:
        raise ValueError(
            "this model's tokenizer has no chat template: pass one as template=, or write the prompt yourself and "
            "submit(str)"
        )
    if add_generation_prompt and continue_final_message:
        raise ValueError(
            "add_generation_prompt=True and continue_final_message=True: the answer either begins a message or goes on "
            "in the last one"
        )
    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            chat_template=template,
            tools=None if tools is None else list(tools),
            documents=None if documents is None else list(documents),
            tokenize=False,
            add_generation_prompt=not continue_final_message
            if add_generation_prompt is None
            else add_generation_prompt,
            continue_final_message=continue_final_message,
            **(chat_template_kwargs or {}),
        )
    except Exception as error:  # a template refuses with its own exceptions (jinja2's and others)
        raise ValueError(f"the chat template refused these messages: {error}") from error
    return str(text)
