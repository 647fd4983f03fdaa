"""A burst: twelve requests in the same instant."""

from .turns import Scenario, Turn

_SUBJECTS = (
    "a clock", "a bridge", "two cats", "a late train", "the north wind", "an empty library", "a lost key", "a slow river",
    "the last apple", "a paper boat", "a street lamp", "a quiet robot",
)  # fmt: skip

SCENARIO = Scenario(
    "Twelve chats at once",
    "Twelve prompts share the first steps, then one step writes a token for each of them; who ends makes room at once.",
    tuple(
        Turn(f"Tell a short story about {subject}.", {"max_tokens": 96, "temperature": 0.8, "seed": seed})
        for seed, subject in enumerate(_SUBJECTS)
    ),
)
