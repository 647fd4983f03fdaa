"""How a question reaches an engine: as chat messages where the model has a template, else as it stands.

Everything that asks questions goes through here: `Workbench.ask`, scenarios, traffic and comparisons. A chat model that is
given bare text often ends its answer at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvscope.engine.text.chat import ChatOptions


def ask(engine: Any, talk: str | Sequence[str], options: Mapping[str, Any]) -> Any:
    """Submit a question and return its handle. `talk` is the question, or a conversation: question, answer, question, ….
    `options` are fields of SamplingParams, or, with beam_width, of BeamSearchParams; and priority, deadline and chat
    options. Raises ValueError for chat options where the model has no template."""
    sampling, beside = split(options)
    return engine.submit(prompt_of(engine, (talk,) if isinstance(talk, str) else talk), params_of(sampling), **beside)


def split(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(fields of SamplingParams, what `Engine.submit` takes beside them: priority, deadline and `ChatOptions`)."""
    beside = {"priority", "deadline", *ChatOptions.__annotations__}
    parts: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    for name, value in options.items():
        parts[name in beside][name] = value
    return parts


def prompt_of(engine: Any, talk: Sequence[str]) -> Any:
    """Messages of user and assistant in turns; without a template the texts, a line each."""
    if getattr(engine.tokenizer, "chat_template", None):
        return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(talk)]
    return "\n".join(talk)


def params_of(sampling: Mapping[str, Any]) -> Any:
    """The params that these fields mean; None, an engine's own defaults, where there are none."""
    if not sampling:
        return None
    from kvscope.engine import BeamSearchParams, SamplingParams

    return (BeamSearchParams if "beam_width" in sampling else SamplingParams)(**sampling)
