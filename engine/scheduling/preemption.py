"""Who gives way when no block is left.

A sequence in need never takes blocks from an older one: victims are among the younger, and where nobody is younger it gives
way itself. So the oldest always finishes, and whatever rule picks among the younger, nothing runs in circles.

| rule | who of the younger |
|---|---|
| youngest | who came last |
| most-blocks | who holds most blocks |
| least-progress | who has computed fewest tokens, so that least is lost |
| lowest-priority | who has the highest `priority` number |

Where rules see no difference the youngest goes. Whoever was preempted `max_preemptions` times is spared while there is
anyone else. A *gang* is all samples of one request: it goes as a whole, but for the one case where it alone fills the
pool, where its youngest samples go one by one.
"""

from __future__ import annotations

from collections.abc import Callable

from ..config import EngineConfig
from ..kvcache.block_table import BlockTables
from ..request import Sequence

Rule = Callable[[Sequence, BlockTables], int]

VICTIMS: dict[str, Rule] = {  # the highest goes
    "youngest": lambda seq, tables: 0,
    "most-blocks": lambda seq, tables: tables.held(seq),
    "least-progress": lambda seq, tables: -seq.num_computed_tokens,
    "lowest-priority": lambda seq, tables: seq.request.priority,
}


class VictimChoice:
    """Says who gives way, of a `running` list by rank, the oldest first. It always names samples of one request."""

    def __init__(self, config: EngineConfig, tables: BlockTables):
        self.rule = VICTIMS[config.preemption_victim]
        self.max_preemptions = config.max_preemptions
        self.gangs = config.preempts_gangs and tables.shares
        self.tables = tables

    def for_one(self, running: list[Sequence], i: int, count: int = 1) -> list[Sequence]:
        """So that the `count` sequences from `running[i]` on, which go together, get the blocks that they lack."""
        seq, younger = running[i], running[i + count :]
        victim = self._choose(seq, i, (self.gangs and self._strangers(seq, younger)) or younger)
        if victim.request is seq.request and not seq.request.advances_together:
            return [victim]  # older samples may stand in this step already
        return self.gang(victim, running)

    def for_gang(self, running: list[Sequence], i: int) -> list[Sequence]:
        """So that all samples of a request, whose first one is `running[i]`, can get a block in each KV group; nobody where
        that is so already, where samples count alone, and where there is no other request to go."""
        seq = running[i]
        if not self.gangs or seq.request.params.n == 1 or (i and running[i - 1].request is seq.request):
            return []
        samples = sum(other.request is seq.request for other in running[i:])
        if samples == 1 or samples * len(self.tables.groups) <= self.tables.pool.num_free:
            return []
        strangers = self._strangers(seq, running[i + 1 :])
        return self.gang(self._choose(seq, i, strangers), running) if strangers or i else []

    @staticmethod
    def _strangers(seq: Sequence, others: list[Sequence]) -> list[Sequence]:
        return [other for other in others if other.request is not seq.request]

    def _choose(self, seq: Sequence, i: int, younger: list[Sequence]) -> Sequence:
        """One of the younger, by the rule; `seq` itself, at place i, where nobody is, or where it alone is not to be spared."""
        if not younger or (i and not self._is_spared(seq) and all(map(self._is_spared, younger))):
            return seq
        free = [other for other in younger if not self._is_spared(other)]
        return max(reversed(free or younger), key=lambda other: self.rule(other, self.tables))

    def gang(self, seq: Sequence, running: list[Sequence]) -> list[Sequence]:
        """Who goes with it: nobody, or all running samples of its request."""
        if self.gangs or seq.request.advances_together:
            return [other for other in running if other.request is seq.request]
        return [seq]

    def _is_spared(self, seq: Sequence) -> bool:
        return 0 < self.max_preemptions <= seq.num_preemptions
