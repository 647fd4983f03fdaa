"""When requests arrive and what they ask: drawn from a seed, or read from a trace.

Gaps are drawn for a rate of one a second, so that whoever plays them may change the rate at any time and still gets the same
requests in the same order.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

SHAPES = {
    "poisson": "Poisson: each arrival independent of all others",
    "bursts": "bursts: gamma gaps, many short ones and a few long",
    "steady": "steady: one like the other",
    "ramp": "ramp: Poisson, from nothing to the full rate",
}


class Arrival(NamedTuple):
    """`due` in units of 1/rate since the start; `prompt` a question, or how many random token ids."""

    due: float
    prompt: str | int
    max_tokens: int


_TASKS = (
    "Explain {} to a child.", "Write two sentences about {}.", "Name three facts about {}.", "What is {} good for?",
    "Tell a very short story about {}.", "Compare {} with {}.",
)  # fmt: skip
_THINGS = (
    "rain", "bread", "a lighthouse", "the moon", "iron", "bees", "a library", "tides", "glass", "an echo", "salt", "maps",
    "a bridge", "wool", "frost", "a clock", "rivers", "moss", "a ladder", "ink",
)  # fmt: skip
_ASSISTANT = (
    "You answer questions of visitors in a museum of everyday things. Be friendly, be brief, and never guess: when you "
    "do not know something, say so and name the room in which a guide can be found. "
)
_REPORT = "Report of day {0}: {1} visitors came, {2} of them in the morning; most asked about {3}, and some about {4}. "


def _chat(draw: random.Random) -> str:
    return draw.choice(_TASKS).format(*draw.sample(_THINGS, 2))


def _document(draw: random.Random) -> str:
    days = (
        _REPORT.format(day, draw.randrange(40, 900), draw.randrange(10, 40), *draw.sample(_THINGS, 2))
        for day in range(1, draw.randrange(4, 10))
    )
    return f"{''.join(days)}What did most visitors ask about on day {draw.randrange(1, 4)}?"


MIXES: dict[str, Callable[[random.Random], str]] = {
    "chats": _chat,
    "one system prompt": lambda draw: _ASSISTANT + _chat(draw),
    "documents": _document,
    "mixed": lambda draw: draw.choices((_chat, lambda d: _ASSISTANT + _chat(d), _document), (5, 3, 2))[0](draw),
}


def drawn(shape: str, mix: str, *, max_tokens: int, burstiness: float, seed: int) -> Iterator[Arrival]:
    """Arrivals without end. `burstiness` is the shape of the gamma distribution of "bursts": gaps vary by 1/sqrt(burstiness)
    times their mean. Answers are from a quarter of max_tokens to all of it."""
    times, texts = random.Random(f"{seed} gaps"), random.Random(f"{seed} prompts")
    due = 0.0
    while True:
        if shape == "steady":
            due += 1.0
        elif shape == "bursts":
            due += times.gammavariate(burstiness, 1 / burstiness)
        else:
            due += times.expovariate(1.0)
        yield Arrival(due, MIXES[mix](texts), texts.randint(max(1, max_tokens // 4), max_tokens))


def read_trace(path: str | PathLike[str]) -> list[Arrival]:
    """Requests of a JSONL file by time of arrival: each line an object with `arrival` (seconds), `prompt` (text) or
    `prompt_tokens` (that many random ids), and `max_tokens`. Raises ValueError that names the first bad line by its
    number, and the field."""
    arrivals = []
    with Path(path).open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    arrivals.append(_arrival(line))
                except ValueError as error:
                    raise ValueError(f"{path}, line {number}: {error}") from None
    if not arrivals:
        raise ValueError(f"{path}: holds no request")
    return sorted(arrivals, key=lambda arrival: arrival.due)


def _arrival(line: str) -> Arrival:
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"is no JSON ({error.msg})") from None
    if not isinstance(fields, dict):
        raise ValueError("must be a JSON object")
    due = fields.get("arrival")
    if isinstance(due, bool) or not isinstance(due, int | float) or not 0 <= due < math.inf:
        raise ValueError(f"arrival={due!r}: must be seconds from the start, 0 or more")
    if ("prompt" in fields) == ("prompt_tokens" in fields):
        raise ValueError("must have prompt or prompt_tokens, one of them")
    if "prompt" in fields:
        prompt: str | int = fields["prompt"]
        if not isinstance(prompt, str) or not prompt.strip():
            raise ValueError(f"prompt={prompt!r}: must be text")
    else:
        prompt = _count("prompt_tokens", fields["prompt_tokens"])
    return Arrival(float(due), prompt, _count("max_tokens", fields.get("max_tokens")))


def _count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r}: must be a whole number of at least 1")
    return value
