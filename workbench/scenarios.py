"""Small workloads with a name: what a person can start with one click, and a cell with `wb.run("shared-prefix")`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_TEACHER = (
    "You are a careful teaching assistant for a course on operating systems. Answer in short sentences, name every "
    "term before you use it, and close with one example that a student can check with pencil and paper. "
)


@dataclass(frozen=True)
class Scenario:
    """`requests`: (question, sampling options) in order of submission."""

    title: str
    requests: tuple[tuple[str, dict[str, Any]], ...]


SCENARIOS: dict[str, Scenario] = {
    "one-chat": Scenario(
        "One chat",
        (("Explain in three sentences what a cache is.", {"max_tokens": 64, "temperature": 0.0}),),
    ),
    "samples": Scenario(
        "Four samples of one prompt",
        (("Write the first line of a story about a lighthouse.", {"n": 4, "temperature": 1.0, "max_tokens": 48}),),
    ),
    "shared-prefix": Scenario(
        "Three questions on one document",
        tuple(
            (_TEACHER + question, {"max_tokens": 64, "temperature": 0.0})
            for question in ("What is a page table?", "What is a page fault?", "What does copy-on-write save?")
        ),
    ),
    "crowd": Scenario(
        "Twelve chats at once",
        tuple(
            (f"Tell a short story about {subject}.", {"max_tokens": 96, "temperature": 0.8, "seed": seed})
            for seed, subject in enumerate(
                (
                    "a clock", "a bridge", "two cats", "a late train", "the north wind", "an empty library",
                    "a lost key", "a slow river", "the last apple", "a paper boat", "a street lamp", "a quiet robot",
                )
            )
        ),
    ),
}  # fmt: skip


def scenario(name: str) -> Scenario:
    """Raises ValueError that lists the names."""
    if name not in SCENARIOS:
        raise ValueError(f"scenario={name!r}: must be one of {', '.join(SCENARIOS)}")
    return SCENARIOS[name]
