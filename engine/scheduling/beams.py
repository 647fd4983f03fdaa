"""What becomes of beams once a step is computed: they are ranked, fork, are dropped, and end as hypotheses.

A beam is a sequence. The best child of a beam keeps its sequence, table and all; each further child is a new sequence that
forks from it, in the place of a beam that was dropped. So KV never moves: what two beams share is stored once, and a partly
filled block is copied when one of them writes into it.

    place     0  the cat      1  the dog                       place     0  the cat sat    1  the cat ran
    table     [ 4 | 9 ]       [ 4 | 7 ]      ── a step ──▶     table     [ 4 | 9 ]         [ 4 | 9 ]   until 1 writes: 9 is copied
                                                               block 7 is freed

All beams of a request have equally many tokens, computed in the same steps. Preempted ones wait in host memory and go on as
they were, or the request computes again what its beams have in common, forks, and computes the rest of each.
"""

from __future__ import annotations

from array import array
from typing import TypeAlias

import torch

from ..events import Cause, EventKind
from ..request import Request, RequestStatus, Sequence
from ..sampling.beam_search import Continuation
from .lifecycle import Lifecycle
from .plan import Plan

Ranked: TypeAlias = dict[Request, "list[Continuation] | FloatingPointError"]


class BeamLifecycle:
    """Carries the results of beam searches into sequences, through `lifecycle` and its scheduler. Knows no model."""

    def __init__(self, lifecycle: Lifecycle):
        self.lifecycle = lifecycle
        self.scheduler = lifecycle.scheduler
        self.journal = lifecycle.journal

    def rank(self, plan: Plan, logits: torch.Tensor) -> Ranked:
        """The best continuations of every request whose beams the step has computed to their ends; of one whose beams are yet
        to fork again, none. `logits` float32 [sampled rows, vocab]."""
        rows: dict[Request, list[int]] = {}
        for logits_row, row in enumerate(plan.sampled_rows):
            if plan.sequences[row].request.beams is not None:
                rows.setdefault(plan.sequences[row].request, []).append(logits_row)
        ranked: Ranked = {}
        for request, its_rows in rows.items():
            beams = request.beams
            assert beams is not None
            try:
                ranked[request] = [] if len(beams.suspended) > 1 else beams.rank(logits[its_rows])
            except FloatingPointError as fault:
                ranked[request] = fault
        return ranked

    def apply(self, plan: Plan, ranked: Ranked) -> None:
        """After `lifecycle.apply`, which has advanced every row."""
        for request, continuations in ranked.items():
            if isinstance(continuations, FloatingPointError):
                self.lifecycle.fail([request], continuations)
                continue
            self._fork_again(request)
            if continuations:
                self._advance(plan, request, continuations)

    def _fork_again(self, request: Request) -> None:
        """The common text of a preempted request is computed: its beams go on from there, each with the rest of its own."""
        beams, trunk = request.beams, request.children[0]
        assert beams is not None
        texts, beams.suspended = beams.suspended, []
        if not texts:
            return
        request.has_forked = True
        for child, text in enumerate(texts[1:], 1):
            self._fork(trunk, child, text)
        if len(texts) > 1:
            trunk.token_ids.extend(texts[0][trunk.num_tokens :])
            trunk.prefill_end = trunk.num_tokens
            self._tell_split(request)

    def _advance(self, plan: Plan, request: Request, continuations: list[Continuation]) -> None:
        beams = request.beams
        assert beams is not None
        going_on = beams.advance(continuations, [child.output_token_ids for child in request.children])
        if beams.done:
            self._end(request)
            return
        placed, parents = _places(going_on), list(request.children)
        was_split, request.has_forked = request.has_forked, True
        for place, step in enumerate(placed):
            if step.beam != place:
                self._fork(parents[step.beam], place, parents[step.beam].token_ids)
                if was_split:
                    self._tell_continued(request, step.beam, place)
        for place, parent in enumerate(parents):
            if place >= len(placed) or placed[place].beam != place:
                self.scheduler.remove(parent, Cause.BEAM_SEARCH)
        del request.children[len(placed) :]
        for seq, step in zip(request.children, placed, strict=True):
            seq.token_ids.append(step.token_id)
            self.lifecycle.count_token(seq)
            plan.new_tokens.setdefault(request.id, []).append((seq.child, step.token_id))
        beams.logprobs = [step.logprob for step in placed]
        if not was_split and len(placed) > 1:
            self._tell_split(request)

    def _fork(self, parent: Sequence, place: int, text: array) -> None:
        """A new beam in this place, with the parent's table; whoever stood there holds its own until it is removed."""
        request = parent.request
        seq = Sequence(request, place, text[:], len(parent.block_tables))
        seq.num_preemptions, seq.last_token_time = parent.num_preemptions, parent.last_token_time
        request.children[place : place + 1] = [seq]
        self.scheduler.fork(parent, seq)

    def _end(self, request: Request) -> None:
        """The search is over: its beams go, and the hypotheses are the request's samples, best first."""
        counts = [self.scheduler.remove(seq, Cause.FINISHED) for seq in request.children]
        for seq in request.children:
            seq.status = RequestStatus.FINISHED
        num_groups, beams = len(request.children[0].block_tables), request.beams
        assert beams is not None
        prompt, request.has_forked, request.children = array("q", request.prompt_token_ids), True, []
        for child, found in enumerate(beams.hypotheses):
            seq = Sequence(request, child, prompt + array("q", found.output), num_groups)
            seq.cumulative_logprob, seq.finish_cause = found.logprob, found.cause
            seq.stop_reason = found.output[-1] if found.cause is Cause.STOP_TOKEN else None
            request.children.append(seq)
        self.lifecycle.note_first_token(request)  # a search may end in the step that computed its prompt
        for child, seq in enumerate(request.children):
            self.lifecycle.end(seq, RequestStatus.FINISHED)
            self.lifecycle.tell_finished(seq, *(counts[child] if child < len(counts) else (0, 0)))

    def _tell_split(self, request: Request) -> None:
        self._tell(request, 0, {"samples": len(request.children)})

    def _tell_continued(self, request: Request, parent: int, place: int) -> None:
        self._tell(request, place, {"parent": parent})

    def _tell(self, request: Request, child: int, numbers: dict[str, float]) -> None:
        numbers["shared_blocks"] = self.lifecycle.tables.held(request.children[child])
        self.journal.emit(EventKind.FORKED, request.id, child, cause=Cause.BEAM_SEARCH, numbers=numbers)


def _places(going_on: list[Continuation]) -> list[Continuation]:
    """The beams of the next step by the places where they stand: the best child of a beam stays where the beam stood, the
    others take the places that are left, in order."""
    placed: list[Continuation | None] = [None] * len(going_on)
    others = []
    for step in going_on:
        if step.beam < len(placed) and placed[step.beam] is None:
            placed[step.beam] = step
        else:
            others.append(step)
    rest = iter(others)
    return [next(rest) if step is None else step for step in placed]
