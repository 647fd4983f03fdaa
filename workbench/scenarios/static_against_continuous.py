"""Answers of very different lengths: where static batches stand still, and continuous ones do not."""

from .turns import Scenario, Turn

_LENGTHS = (96, 8, 16, 8, 64, 8, 24, 8, 48, 8, 16, 8)

SCENARIO = Scenario(
    "Twelve answers of different lengths",
    "Most are short and a few are long: a static batch waits for its longest, a continuous one fills every seat at once. "
    'Serve it on both: compare("static/continuous").run("static-against-continuous").',
    tuple(
        Turn(f"Count from {i + 1} upwards.", {"max_tokens": length, "temperature": 0.0, "ignore_eos": True})
        for i, length in enumerate(_LENGTHS)
    ),
)
