"""More text than the pool can hold, whatever its size."""

from .turns import Scenario, Turn

_SUBJECTS = (
    "rain", "iron", "bread", "maps", "silence", "bees", "salt", "bridges", "moths", "paper", "tides", "glass", "wool",
    "echoes", "ladders", "frost",
)  # fmt: skip

SCENARIO = Scenario(
    "Sixteen long answers in too small a pool",
    "Together they need one and a half times the pool: watch evictions first, then who is preempted, and what comes back.",
    tuple(
        Turn(f"Write an essay about {subject}.", {"temperature": 0.8, "seed": seed, "ignore_eos": True})
        for seed, subject in enumerate(_SUBJECTS)
    ),
    fill=1.5,
)
