"""What a scenario is: questions, in order, some of which wait for the answers before them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Turn:
    """One question. `sampling`: fields of SamplingParams, or of BeamSearchParams with beam_width.

    `after`: numbers of earlier turns of the scenario. The question is asked when all of them are over, and continues the
    conversation of the one whose answer was likeliest, by its mean log-probability; `sample` of that answer is what it
    continues. Nothing: it begins a conversation.
    """

    question: str
    sampling: Mapping[str, Any] = field(default_factory=dict)
    after: tuple[int, ...] = ()
    sample: int = 0


@dataclass(frozen=True)
class Scenario:
    """`title` for a menu, `sentence` says what to look at. With `fill`, answers are so long that all of them together need
    `fill` times the pool, whatever its size; `max_tokens` of the turns is then what an empty pool would be given."""

    title: str
    sentence: str
    turns: tuple[Turn, ...]
    fill: float = 0.0


def turns(questions: tuple[str, ...] | list[str], **sampling: Any) -> tuple[Turn, ...]:
    """Questions that wait for nothing, all with the same sampling."""
    return tuple(Turn(question, sampling) for question in questions)
