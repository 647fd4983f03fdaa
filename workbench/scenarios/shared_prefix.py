"""Questions behind one and the same instruction, the system prompt of most services."""

from .turns import Scenario, turns

_TEACHER = (
    "You are a careful teaching assistant for a course on operating systems. Answer in short sentences, name every "
    "term before you use it, and close with one example that a student can check with pencil and paper. "
)

SCENARIO = Scenario(
    "Three questions on one document",
    "The instruction is computed for the first request; black blocks are the ones that the others read as well.",
    turns(
        [
            _TEACHER + question
            for question in ("What is a page table?", "What is a page fault?", "What does copy-on-write save?")
        ],
        max_tokens=64,
        temperature=0.0,
    ),
)
