"""A tree of thoughts: three ideas, one step further on each, and the likeliest of them is brought to an end.

Source: arXiv 2305.10601, with the mean log-probability of a thought in place of a vote.
"""

from .turns import Scenario, Turn

SCENARIO = Scenario(
    "A tree of three thoughts",
    "Three samples fork from one prompt; each is continued when all are there, and the likeliest one is finished.",
    (
        Turn(
            "How can a town make its main street quieter? Name one idea in one sentence.",
            {"n": 3, "temperature": 1.0, "seed": 5, "max_tokens": 32},
        ),
        *(
            Turn("What would go wrong with it?", {"max_tokens": 32, "temperature": 0.0, "logprobs": 0}, (0,), sample)
            for sample in range(3)
        ),
        Turn("Improve the idea so that this does not happen.", {"max_tokens": 48, "temperature": 0.0}, after=(1, 2, 3)),
    ),
)
