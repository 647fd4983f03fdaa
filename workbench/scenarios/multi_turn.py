"""A conversation: every turn sends everything that was said before."""

from .turns import Scenario, Turn

_QUESTIONS = (
    "I want to grow tomatoes on a balcony. What do I need?",
    "Which of these matters most?",
    "How often do I water them?",
    "Sum that up in one sentence.",
)

SCENARIO = Scenario(
    "A conversation of four turns",
    "Each turn waits for the answer before and sends it along; what was computed for earlier turns is found in the cache.",
    tuple(
        Turn(question, {"max_tokens": 48, "temperature": 0.0}, after=(i - 1,) if i else ())
        for i, question in enumerate(_QUESTIONS)
    ),
)
