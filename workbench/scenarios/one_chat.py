"""A single chat."""

from .turns import Scenario, turns

SCENARIO = Scenario(
    "One chat",
    "One request: its prompt is computed in one step, then every step writes one token, and every 16 tokens take a block.",
    turns(("Explain in three sentences what a cache is.",), max_tokens=64, temperature=0.0),
)
