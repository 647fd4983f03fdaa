"""What each eviction strategy gives up first, and that text is only ever lost from its end."""

import time

import numpy as np
import pytest
from kvscope.engine.events import Cause
from kvscope.engine.kvcache.block_pool import BlockPool
from kvscope.engine.kvcache.eviction import STRATEGIES


def text(pool: BlockPool, *, length: int = 1, priority: int = 0) -> list[int]:
    """A request of `length` full blocks that has left; its blocks in order of the text."""
    blocks = [pool.take() for _ in range(length)]
    for before, block in zip([0, *blocks], blocks, strict=False):
        pool.cache(block, before, priority)
    leave(pool, blocks)
    return blocks


def leave(pool: BlockPool, blocks: list[int]) -> None:
    for block in reversed(blocks):
        pool.release(block, step=0)


def hit(pool: BlockPool, blocks: list[int], priority: int = 0) -> None:
    for block in blocks:
        pool.hit(block, priority)
    leave(pool, blocks)


def order(pool: BlockPool) -> list[int]:
    pool.check_integrity()
    return pool.eviction_order().tolist()


@pytest.mark.parametrize(
    ("policy", "expected", "why"),
    [
        ("lru", [3, 2, 1, 4], Cause.LEAST_RECENTLY_USED),
        ("lfu", [3, 4, 2, 1], Cause.LEAST_FREQUENTLY_USED),
        ("fifo", [1, 2, 3, 4], Cause.FIRST_IN),
        ("mru", [4, 1, 2, 3], Cause.MOST_RECENTLY_USED),
        ("slru", [3, 2, 4, 1], Cause.NOT_HIT_TWICE),
        ("priority", [2, 4, 3, 1], Cause.LOWEST_PRIORITY),
    ],
)
def test_four_texts_of_one_block(policy, expected, why):
    pool = BlockPool(5, policy)
    for priority in (5, 5, 2, 3):
        text(pool, priority=priority)
    hit(pool, [1], priority=9)
    hit(pool, [2], priority=9)
    hit(pool, [1], priority=1)
    pool.uncache(4)
    pool.share(pool.take())
    pool.cache(4, priority=3)  # published again: its statistics begin anew
    pool.release(4, step=0)
    pool.release(4, step=0)
    assert order(pool) == expected
    assert pool.front == expected[0] and pool.why_evicted(pool.front) is why


def test_slru_says_when_only_what_was_hit_twice_is_left():
    pool = BlockPool(3, "slru")
    text(pool)
    hit(pool, [1])
    assert pool.why_evicted(pool._cached.first()) is Cause.NOT_HIT_TWICE
    hit(pool, [1])
    assert pool.why_evicted(pool._cached.first()) is Cause.LEAST_RECENTLY_USED


@pytest.mark.parametrize("policy", STRATEGIES)
def test_the_end_of_a_text_goes_before_its_start(policy):
    pool = BlockPool(8, policy)
    blocks = text(pool, length=3)
    side = pool.take()  # a second text that goes on from the first block
    pool.hit(1)
    pool.cache(side, 1)
    leave(pool, [1, side])
    gone = order(pool)
    assert gone.index(3) < gone.index(2) < gone.index(1) and gone.index(side) < gone.index(1)
    assert blocks == [1, 2, 3]


@pytest.mark.parametrize("policy", STRATEGIES)
def test_empty_blocks_go_before_all_cached_ones(policy):
    pool = BlockPool(5, policy)
    text(pool, length=2)
    assert list(pool.free_queue())[:2] == [3, 4] and pool.front == 3


def test_text_in_the_middle_cannot_be_lost():
    pool = BlockPool(4)
    text(pool, length=3)
    with pytest.raises(RuntimeError, match="block 2 cannot lose its text before the 1 that continue it"):
        pool.uncache(2)
    assert pool.after(2) == [3] and pool.after(3) == [] and pool.after(1) == [2]


@pytest.mark.parametrize("policy", STRATEGIES)
def test_a_block_may_continue_the_same_text_in_another_block(policy):
    pool = BlockPool(8, policy)
    text(pool, length=2)  # blocks 1 and 2
    text(pool, length=3)  # blocks 3, 4 and 5; 4 holds what 2 holds
    pool.move(5, 2)
    pool.uncache(4)
    pool.uncache(3)
    gone = order(pool)
    assert gone.index(5) < gone.index(2) < gone.index(1), "what has text after it now was used as late as that"


def test_text_needs_a_reader_and_so_does_what_it_continues():
    pool = BlockPool(4)
    text(pool)
    block = pool.take()
    with pytest.raises(RuntimeError, match="block 2 cannot continue block 1"):
        pool.cache(block, 1)
    pool.cache(block)
    with pytest.raises(RuntimeError, match="block 2 is cached already"):
        pool.cache(block)


def test_the_audit_finds_an_end_of_text_that_could_never_be_evicted():
    pool = BlockPool(4, "lfu")
    text(pool, length=2)
    pool._cached.remove(2)
    with pytest.raises(RuntimeError, match=r"blocks \[2\] may be evicted, and the eviction queue does not know them"):
        pool.check_integrity()


KEYS = {
    "lru": lambda s: (s["use"],),
    "lfu": lambda s: (s["hits"], s["use"]),
    "fifo": lambda s: (s["published"],),
    "mru": lambda s: (-s["use"],),
    "slru": lambda s: (s["hits"] >= 2, s["use"]),
    "priority": lambda s: (-s["priority"], s["use"]),
}


@pytest.mark.parametrize("policy", STRATEGIES)
@pytest.mark.parametrize("seed", range(3))
def test_a_random_life_agrees_with_a_list_that_is_searched(policy, seed):
    """Readers come with whole paths, from the first block of a text to some later one; the oracle is a dict of facts."""
    rng, pool, clock = np.random.default_rng(seed), BlockPool(14, policy), 0
    empty, facts = list(range(1, 14)), {}  # facts of cached blocks; `empty` is a stack whose top is its start
    paths: list[list[int]] = []

    def readers(block):
        return sum(block in path for path in paths)

    def ends():
        free = [b for b in facts if not readers(b)]
        return [b for b in free if not any(f["before"] == b for f in facts.values())]

    def drop(block):
        nonlocal clock
        clock += 1
        if block in facts:
            facts[block]["use"] = clock
        else:
            empty.insert(0, block)

    for step in range(1500):
        action = rng.integers(5)
        if action == 0 and (empty or ends()) and len(paths) < 4:  # a path grows by a block, or begins
            path = paths[rng.integers(len(paths))] if paths and rng.integers(2) else []
            if not path:
                paths.append(path)
            if path and path[-1] not in facts:
                continue
            if not empty:
                block = min(ends(), key=lambda b: KEYS[policy](facts[b]))
                assert pool.front == block
                del facts[block]
                pool.uncache(block)
                empty.insert(0, block)
            path.append(empty.pop(0))
            assert pool.take() == path[-1]
        elif action == 1:  # the end of a path is published
            for path in paths:
                if path and path[-1] not in facts:
                    clock, before, priority = clock + 1, path[-2] if len(path) > 1 else 0, int(rng.integers(3))
                    facts[path[-1]] = {
                        "before": before, "use": 0, "published": clock, "hits": 0, "priority": priority,
                    }  # fmt: skip
                    pool.cache(path[-1], before, priority)
        elif action == 2 and facts and len(paths) < 4:  # a hit
            path, block, priority = [], int(rng.choice(sorted(facts))), int(rng.integers(3))
            while block:
                path.insert(0, block)
                block = facts[block]["before"]
            for block in path:
                facts[block]["hits"] += 1
                facts[block]["priority"] = min(facts[block]["priority"], priority)
                assert pool.hit(block, priority) == readers(block) + 1
            paths.append(path)
        elif action >= 3 and paths:  # a reader leaves
            path = paths.pop(rng.integers(len(paths)))
            for i in range(len(path) - 1, -1, -1):
                is_free = readers(path[i]) == 0
                assert pool.release(path[i], step) == is_free
                if is_free:
                    drop(path[i])
        pool.check_integrity()
        assert pool.num_free == 13 - len({b for path in paths for b in path})
    simulated = []
    while ends():
        simulated.append(min(ends(), key=lambda b: KEYS[policy](facts[b])))
        del facts[simulated[-1]]
    assert pool.eviction_order().tolist() == simulated


@pytest.mark.parametrize("policy", STRATEGIES)
def test_a_large_pool_costs_no_more_a_block_than_a_small_one(policy):
    def seconds_a_block(num_blocks):
        pool = BlockPool(num_blocks, policy)
        for _ in range(num_blocks // 16):
            text(pool, length=15)
        best = float("inf")
        for _ in range(5):
            start = time.perf_counter()
            for _ in range(200):
                block = pool.front
                pool.uncache(block) if pool.is_cached[block] else None
                pool.cache(pool.take())
                pool.release(block, step=1)
            best = min(best, time.perf_counter() - start)
        return best / 200

    assert seconds_a_block(65_537) < 10 * seconds_a_block(257)
