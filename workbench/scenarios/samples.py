"""Parallel sampling: one prompt, four answers."""

from .turns import Scenario, turns

SCENARIO = Scenario(
    "Four samples of one prompt",
    "The prompt is computed once and read by four samples; each copies the last block when it first writes into it.",
    turns(("Write the first line of a story about a lighthouse.",), n=4, temperature=1.0, max_tokens=48),
)
