"""A prefix cache as a list: every cached block with its whole text, kept from the journal and searched from end to end."""

from __future__ import annotations

from kvscope.engine import EngineCore, EventKind
from kvscope.engine.events import Cause
from kvscope.engine.request import Request


class CacheOracle:
    """Follows the events of a core and says for each admission how much it must have found."""

    def __init__(self, core: EngineCore):
        self.core = core
        self.size = core.tables.common_size
        self.sizes = core.tables.block_sizes
        self.texts: dict[int, tuple[object, int, tuple[int, ...]]] = {}  # block -> (extra keys, group, text to its end)
        self.ever: set[tuple[object, tuple[int, ...]]] = set()  # texts to the end of a block that was cached once
        self._next = 0
        self._hits = 0

    def follow(self, requests: dict[int, Request]) -> None:
        events, self._next, lost = self.core.events.since(self._next)
        assert not lost
        for event in events:
            if event.kind is EventKind.PUBLISHED:
                seq = requests[event.request_id].children[event.child]
                size = self.sizes[event.group]
                end = event.numbers["logical"] * size + event.numbers["tokens"]
                keys, text = seq.request.extra_keys, tuple(seq.token_ids[:end])
                assert event.block_id not in self.texts and len(text) == end
                assert (event.numbers["tokens"] == size) == (
                    event.cause is Cause.BLOCK_FULL
                ) or event.cause is Cause.LEFT
                self.texts[event.block_id] = (keys, event.group, text)
                self.ever.add((keys, text))
            elif event.kind is EventKind.EVICTED:
                del self.texts[event.block_id]
            elif event.kind in (EventKind.ADMITTED, EventKind.RESUMED):
                if "swapped_tokens" in event.numbers:
                    continue  # it found its KV in host memory and asked no cache
                seq = requests[event.request_id].children[event.child]
                self._check_hit(
                    event, seq, [e for e in events if e.kind is EventKind.CACHE_MISS and e.index > event.index]
                )
        pool, cache = self.core.tables.pool, self.core.tables.cache
        assert {b for b in range(pool.num_blocks) if pool.is_cached[b]} == set(self.texts)
        for block, (_, group, text) in self.texts.items():
            assert cache.group_of(block) == group
            assert cache.text_of(block) == b"".join(token.to_bytes(8, "little") for token in text)

    def _check_hit(self, event, seq, misses) -> None:
        cached = event.numbers["cached_tokens"]
        total = event.numbers.get("total_tokens") or event.numbers["prompt_tokens"]
        miss = next((e for e in misses if (e.request_id, e.child) == (event.request_id, event.child)), None)
        if not self.core.config.enable_prefix_caching or seq.request.prompt_logprobs is not None:
            assert cached == 0
            return
        text = tuple(seq.token_ids[:total])
        best = self.longest(seq.request.extra_keys, text)
        assert cached < total  # I5
        if self.core.config.prefix_cache == "hash" or (
            len(self.core.tables.groups) == 1 and not self.core.tables.groups[0].window
        ):
            is_cut = miss is not None and miss.cause is Cause.NO_FREE_BLOCK
            assert cached == (best // self.size * self.size if is_cut else best)
        else:  # a hit that some group does not hold is cut to full blocks
            assert self.longest(seq.request.extra_keys, text, self.size) <= cached <= best
            assert self._is_whole(seq.request.extra_keys, text[:cached])
        if miss is not None and miss.cause is Cause.EVICTED:
            start = text[: cached + 1]
            assert any(keys == seq.request.extra_keys and ever[: len(start)] == start for keys, ever in self.ever)
        if miss is None and self.core.config.prefix_cache == "radix":
            assert cached == total - 1, "whoever found less knows why"

    def longest(self, keys, text, step=None) -> int:
        """The longest start of the text, short of its last token, that can be found: by trying all."""
        step = step or (self.size if self.core.config.prefix_cache == "hash" else 1)
        lengths = range((len(text) - 1) // step * step, 0, -step)
        return next((length for length in lengths if self._is_whole(keys, text[:length])), 0)

    def _is_whole(self, keys, text) -> bool:
        """Does every group hold every block of this text that the next token can see?"""
        for (g, group), size in zip(enumerate(self.core.tables.groups), self.sizes, strict=True):
            for logical in range(group.first_visible_block(len(text)), -(-len(text) // size)):
                start = text[: (logical + 1) * size]
                if not any(
                    k == keys and in_group == g and t[: len(start)] == start and -(-len(t) // size) == logical + 1
                    for k, in_group, t in self.texts.values()
                ):
                    return False
        return True
