"""One long prompt among short ones: what chunked prefill is for."""

from .turns import Scenario, Turn, turns

_PARAGRAPH = (
    "Item {number}: the committee heard the report on the {what}, asked for figures, put the matter off to the next "
    "meeting, and thanked the {who} for the work of the last months. "
)
_MINUTES = "".join(
    _PARAGRAPH.format(number=i + 1, what=what, who=who)
    for i, (what, who) in enumerate(
        zip(
            ("roof", "heating", "garden", "library", "kitchen", "cellar", "fence", "bell", "stairs", "lights", "well", "gate"),
            ("caretaker", "treasurer", "gardener", "librarian", "cook", "mason") * 2,
            strict=True,
        )
    )
)  # fmt: skip

SCENARIO = Scenario(
    "One long prompt among short ones",
    "The long prompt is cut into pieces that fit beside the tokens of the short ones, so that nobody has to wait for it.",
    (
        *turns(("Name three birds.", "Name three rivers.", "Name three tools."), max_tokens=64, temperature=0.0),
        Turn(f"{_MINUTES}Which items were put off?", {"max_tokens": 32, "temperature": 0.0}),
        *turns(("Name three trees.", "Name three games."), max_tokens=64, temperature=0.0),
    ),
)
