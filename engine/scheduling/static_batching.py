"""Static batching, the honest baseline: who is in the batch, and the padding that arrays of equal rows make it compute.

transformers' `generate` pads every prompt to the longest and goes on with every row until the last has ended. Here the same
work is done in rows of padding that stand beside the real ones:

    prompts        a a a · ·        · is computed, and nobody reads it
                   b b b b b
                   c · · · ·
    single tokens  a a              a has ended and goes on until b has
                   b b b b

A padding row reads and writes the null block alone, so no text depends on it. What a step computes beyond its budget of tokens
because of prompts that are filled up, it computes in further calls of the model, each within the budget.
"""

from __future__ import annotations

from ..request import Sequence
from .plan import Padding, Plan


class StaticBatch:
    """Who joined since nobody ran. `budget`: tokens of one call of the model."""

    def __init__(self, budget: int):
        self.budget = budget
        self.is_open = False
        self._members: dict[Sequence, None] = {}  # in order of arrival

    def open(self, running: list[Sequence]) -> bool:
        """May anyone join? From when nobody runs until the batch is full or cannot be filled further (`is_open`)."""
        if not running:
            self._members, self.is_open = {}, True
        return self.is_open

    def pad(self, plan: Plan) -> None:
        """Put the padding of this step into a plan that is complete but for it: in the step after which nobody joins any more
        the shorter prompts are filled up, and from then on whoever has ended gets a token."""
        joined = [seq for seq in plan.sequences if seq not in self._members]
        self._members |= dict.fromkeys(joined)
        if not plan.prefill_tokens:
            ended = sum(seq.status.is_over for seq in self._members)
            longest = max(seq.num_tokens for seq in plan.sequences)
            plan.padding = [[Padding(longest - 1, 1, is_sampled=True)] * ended]
        elif joined and not self.is_open:
            longest = max(seq.prefill_end for seq in self._members)
            missing = [Padding(0, longest - seq.prefill_end) for seq in self._members if seq.prefill_end < longest]
            plan.padding = _cut(missing, self.budget - sum(plan.num_tokens), self.budget)


def _cut(rows: list[Padding], first: int, size: int) -> list[list[Padding]]:
    """The rows in parts of `size` tokens, the first of `first`."""
    parts: list[list[Padding]] = [[]]
    left = first
    for row in rows:
        start, end = row.start, row.start + row.num_tokens
        while start < end:
            if not left:
                parts.append([])
                left = size
            tokens = min(left, end - start)
            parts[-1].append(Padding(start, tokens))
            start, left = start + tokens, left - tokens
    return parts
