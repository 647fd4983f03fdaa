"""Beam search: the three likeliest texts go on, whoever falls behind is dropped."""

from .turns import Scenario, turns

SCENARIO = Scenario(
    "Beam search with three beams",
    "Beams fork in almost every step and share what they have in common; a dropped beam gives its own blocks back.",
    turns(("Translate to French: The sea is calm this morning.",), beam_width=3, max_tokens=40),
)
