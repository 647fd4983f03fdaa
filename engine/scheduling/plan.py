"""One step: what the scheduler decided, and the tokens that came out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ..request import Sequence


class Padding(NamedTuple):
    """A row of static batching that is nobody's: tokens at the positions from `start` on, which use the null block alone."""

    start: int
    num_tokens: int
    is_sampled: bool = False  # are logits computed for its last token, as for the rows beside it?


@dataclass(slots=True)
class Plan:
    """Row r computes the next `num_tokens[r]` tokens of `sequences[r]`, oldest sequence first."""

    step: int
    sequences: list[Sequence] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    sampled_rows: list[int] = field(default_factory=list)  # rows that catch up with their text: they get a new token
    # (row, first, end): tokens first … end − 1 of the row, each for what it says of the prompt token behind it
    prompt_spans: list[tuple[int, int, int]] = field(default_factory=list)
    copies: tuple[list[tuple[int, int]], ...] = ()  # (source, copy) blocks, a list per KV group
    swap_out: list[tuple[int, int]] = field(default_factory=list)  # (block, host block)
    swap_in: list[tuple[int, int]] = field(default_factory=list)  # (host block, block)
    preempted: list[Sequence] = field(default_factory=list)
    # static batching: rows beside the sequences, and what further calls of the model compute before
    padding: list[list[Padding]] = field(default_factory=list)
    prefill_tokens: int = 0
    decode_tokens: int = 0
    started: float = 0.0  # seconds, time.monotonic()
    scheduled: float = 0.0  # when the plan was complete; 0 before
    new_tokens: dict[int, list[tuple[int, int]]] = field(default_factory=dict)  # filled when the step is applied

    @property
    def padding_tokens(self) -> int:
        return sum(row.num_tokens for rows in self.padding for row in rows)

    def add(self, seq: Sequence, num_tokens: int) -> None:
        if seq.request.lacks_prompt_logprobs:
            self._add_prompt_span(seq, num_tokens)
        if seq.num_computed_tokens + num_tokens == seq.num_tokens:
            self.sampled_rows.append(len(self.sequences))
        self.sequences.append(seq)
        self.num_tokens.append(num_tokens)
        if seq.is_prefill:
            self.prefill_tokens += num_tokens
        else:
            self.decode_tokens += num_tokens

    def _add_prompt_span(self, seq: Sequence, num_tokens: int) -> None:
        """What is known already, of a prefill that was preempted, is not asked for again."""
        request, start = seq.request, seq.num_computed_tokens
        first = len(request.prompt_logprobs) - 1 - start
        end = min(num_tokens, request.num_prompt_tokens - 1 - start)
        if first < end:
            self.prompt_spans.append((len(self.sequences), first, end))
