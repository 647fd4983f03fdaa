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
        if self.gangs:
            strangers = [other for other in younger if other.request is not seq.request]
            if strangers:
                return self._whole(self._pick(strangers), running)
        if i and not self._is_spared(seq) and all(map(self._is_spared, younger)):
            return self._whole(seq, running) if seq.request.advances_together else [seq]
        victim = self._pick(younger) if younger else seq
        return self._whole(victim, running) if victim.request.advances_together else [victim]

    def for_gang(self, running: list[Sequence], i: int) -> list[Sequence]:
        """So that all samples of a request, whose first one is `running[i]`, can get a block in each KV group; nobody where
        that is so already, where samples count alone, and where there is no other request to go."""
        request = running[i].request
        if not self.gangs or request.params.n == 1 or (i and running[i - 1].request is request):
            return []
        samples = sum(seq.request is request for seq in running[i:])
        if samples == 1 or samples * len(self.tables.groups) <= self.tables.pool.num_free:
            return []
        strangers = [other for other in running[i + 1 :] if other.request is not request]
        if strangers:
            return self._whole(self._pick(strangers), running)
        return self._whole(running[i], running) if i else []

    def gang(self, seq: Sequence, running: list[Sequence]) -> list[Sequence]:
        """Who goes with a victim that is taken for someone else's sake."""
        return self._whole(seq, running) if self.gangs or seq.request.advances_together else [seq]

    @staticmethod
    def _whole(seq: Sequence, running: list[Sequence]) -> list[Sequence]:
        return [other for other in running if other.request is seq.request]

    def _pick(self, candidates: list[Sequence]) -> Sequence:
        free = [seq for seq in candidates if not self._is_spared(seq)]
        return max(reversed(free or candidates), key=lambda seq: self.rule(seq, self.tables))

    def _is_spared(self, seq: Sequence) -> bool:
        return 0 < self.max_preemptions <= seq.num_preemptions
