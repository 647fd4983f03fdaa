"""Why each waiting sequence waits, told when the kind of reason changes.

A step looks at few of the line: whoever leads it, those that were tried behind it, those that are held back on purpose. Of
these the reason is kept; all others are behind the one that leads, so that nothing here depends on the length of the line.
"""

from __future__ import annotations

from collections import deque

from ..blocked import LEADS
from ..events import Cause, EventKind, Journal
from ..request import Blocked, RequestStatus, Sequence
from .queue import WaitingQueue

TOLD_PER_STEP = 64  # of those behind that get a BLOCKED event in one step


class Reasons:
    """`capacity` bounds those who have yet to be told, although nobody may ever take a step."""

    def __init__(self, line: WaitingQueue, journal: Journal, capacity: int):
        self.line = line
        self.journal = journal
        self.untold: deque[Sequence] = deque(maxlen=capacity)  # joined the line, or lost a reason of their own
        self._found: dict[Sequence, Blocked] = {}  # by the latest step; whoever leads the line is first

    def joined(self, seq: Sequence) -> None:
        """The sequence stands in the line. At its front it leads, and what the latest step found is no longer so."""
        self.untold.append(seq)
        if self.line.head is seq:
            self.untold.extend(self._found)
            self._found = {}

    def note(self, found: dict[Sequence, Blocked]) -> None:
        """What a step found, of whoever leads the line first."""
        self.untold.extend(seq for seq in self._found if seq not in found)
        self._found = found
        for seq, blocked in found.items():
            self._tell(seq, blocked)
        leader = self.leader
        for _ in range(min(TOLD_PER_STEP, len(self.untold))):
            seq = self.untold.popleft()
            if seq.status.is_waiting and seq not in found:
                self._tell(seq, Blocked(Cause.BEHIND, behind=leader.request.id))

    @property
    def found(self) -> dict[Sequence, Blocked]:
        """Those with a reason of their own, whoever leads the line first; all others are behind the leader."""
        return self._found

    @property
    def leader(self) -> Sequence | None:
        """Who has to be admitted before anyone else."""
        return next((seq for seq in self._found if seq.status.is_waiting), self.line.head)

    def of(self, seq: Sequence) -> Blocked | None:
        """Why it waits, now; None when it leads the line and no step has looked at it."""
        leader = self.leader
        return self._found.get(seq) or (None if seq is leader else Blocked(Cause.BEHIND, behind=leader.request.id))

    def words(self, seq: Sequence) -> str:
        """The words after "is waiting because"; "" for one that runs."""
        if seq.status is RequestStatus.RUNNING:
            return ""
        blocked = self.of(seq)
        return LEADS if blocked is None else blocked.sentence()

    def _tell(self, seq: Sequence, blocked: Blocked) -> None:
        changed = seq.blocked is None or seq.blocked.cause is not blocked.cause
        seq.blocked = blocked
        if changed:
            self.journal.emit(EventKind.BLOCKED, seq.request.id, seq.child, cause=blocked.cause,
                              numbers={"needed": blocked.needed, "available": blocked.available,
                                       "reserved": blocked.reserved, "behind": blocked.behind})  # fmt: skip
