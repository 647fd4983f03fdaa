"""Why a sequence waits, as numbers and as words. Needs the standard library only, so that a recording can say it too."""

from __future__ import annotations

from typing import NamedTuple

from .events import Cause

LEADS = "no step has begun since it came to the head of the line"  # the words where there is no reason yet


class Blocked(NamedTuple):
    """Why a sequence waits. Blocks, tokens or seats, whatever `cause` is about."""

    cause: Cause
    needed: int = 0
    available: int = 0
    reserved: int = 0
    behind: int = -1  # request id

    def sentence(self) -> str:
        """The words after "is waiting because"."""
        if self.cause is Cause.NO_FREE_BLOCK:
            reserve = f" and {self.reserved} {_are(self.reserved)} kept in reserve" if self.reserved else ""
            return (
                f"it needs {_count(self.needed, 'block')}; {self.available} {_are(self.available)} available{reserve}"
            )
        if self.cause is Cause.MAX_NUM_SEQS:
            return f"it needs {_count(self.needed, 'seat')} and {self.available} of max_num_seqs {_are(self.available)} free"
        if self.cause is Cause.TOKEN_BUDGET:
            return f"it needs {_count(self.needed, 'token')} and the budget of the step is spent"
        if self.cause is Cause.BATCH_RUNNING:
            return "nobody joins a static batch before all of it have ended"
        if self.cause is Cause.SHARED_PREFIX:
            return f"request {self.behind} is about to compute {_count(self.needed, 'token')} that both begin with"
        if self.cause is Cause.DECODE_STEP:
            return "a step that decodes takes in no prefill"
        if self.cause is Cause.AFTER_PREEMPTION:
            return "no one is admitted in a step that preempted"
        return f"request {self.behind} is ahead of it"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _are(number: int) -> str:
    return "is" if number == 1 else "are"
