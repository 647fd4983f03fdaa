"""The pool alone: exact ids, exact order of the free queue."""

import pytest
from kvscope.engine.kvcache.block_pool import BlockPool


def queue(pool: BlockPool) -> list[int]:
    pool.check_integrity()
    return list(pool.free_queue())


def test_a_new_pool_gives_out_ids_in_order_and_never_the_null_block():
    pool = BlockPool(5)
    assert queue(pool) == [1, 2, 3, 4]
    assert [pool.take() for _ in range(4)] == [1, 2, 3, 4]
    assert queue(pool) == [] and pool.front == 0 and pool.num_used == 4
    with pytest.raises(RuntimeError, match="no free block: all 4 blocks have readers"):
        pool.take()


def test_empty_blocks_go_to_the_front_and_cached_ones_to_the_back():
    pool = BlockPool(6)
    a, b, c = (pool.take() for _ in range(3))
    pool.cache(a)
    pool.cache(b)
    for block in (c, b, a):  # a request frees in reverse
        assert pool.release(block, step=7)
    assert queue(pool) == [3, 4, 5, 2, 1]
    assert pool.eviction_order().tolist() == [2, 1]
    assert pool.num_free_cached == 2 and pool.last_used_step[2] == 7


def test_a_cached_block_must_lose_its_text_before_it_is_taken_and_then_is_a_new_generation():
    pool = BlockPool(2)
    pool.cache(pool.take())
    pool.release(1, step=1)
    with pytest.raises(RuntimeError, match="block 1 still holds findable text"):
        pool.take()
    pool.uncache(1)
    assert pool.generation[1] == 1
    assert pool.take() == 1 and pool.generation[1] == 2


def test_a_hit_takes_a_cached_block_out_of_the_middle_of_the_queue():
    pool = BlockPool(5)
    for _ in range(3):
        pool.cache(pool.take())
    for block in (3, 2, 1):
        pool.release(block, step=1)
    assert queue(pool) == [4, 3, 2, 1]
    assert pool.share(2) == 1 and pool.share(2) == 2
    assert queue(pool) == [4, 3, 1]
    assert not pool.release(2, step=2) and pool.release(2, step=3)
    assert queue(pool) == [4, 3, 1, 2], "it was used last, so it goes last"


def test_forgetting_the_text_of_a_free_block_moves_it_to_the_front():
    pool = BlockPool(4)
    for _ in range(3):
        pool.cache(pool.take())
    for block in (1, 2, 3):
        pool.release(block, step=1)
    pool.uncache(3)
    assert queue(pool) == [3, 1, 2] and pool.num_free_cached == 2


def test_a_block_never_loses_more_readers_than_it_has():
    pool = BlockPool(3)
    pool.take()
    pool.release(1, step=1)
    with pytest.raises(RuntimeError, match="block 1 has 0 readers and cannot lose one"):
        pool.release(1, step=1)
    with pytest.raises(RuntimeError, match="block 0"):
        pool.release(0, step=1)
    assert queue(pool) == [1, 2], "the refused release did not add it to the queue again"


def test_an_empty_block_can_be_taken_from_the_middle_of_the_queue():
    pool = BlockPool(5)
    assert pool.take_at(3) == 3 and pool.generation[3] == 1
    assert queue(pool) == [1, 2, 4]
    with pytest.raises(RuntimeError, match="block 3 is not empty"):
        pool.take_at(3)


def test_an_empty_block_cannot_be_shared():
    with pytest.raises(RuntimeError, match="block 1 is free and holds no findable text"):
        BlockPool(3).share(1)


def test_used_slots_count_each_block_once_and_come_back_with_a_hit():
    pool = BlockPool(4)
    pool.cache(pool.take())
    pool.fill(1, 4)
    pool.share(1)
    pool.fill(pool.take(), 3)
    assert pool.used_slots == 7
    pool.release(2, step=1)
    assert pool.used_slots == 4 and pool.filled[2] == 0, "an empty block has no slots written"
    pool.release(1, step=1)
    pool.release(1, step=1)
    assert pool.used_slots == 0 and pool.filled[1] == 4, "a cached block keeps them"
    pool.share(1)
    assert pool.used_slots == 4


def test_states_are_what_the_map_draws():
    pool = BlockPool(6)
    for _ in range(3):
        pool.take()
    pool.cache(1)
    pool.cache(3)
    pool.release(1, step=1)
    pool.share(2)
    assert pool.states().tolist() == [4, 1, 3, 2, 0, 0]


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda p: p.ref_count.__setitem__(2, 1), r"blocks \[2\] are free and empty, or queued so, but not both"),
        (lambda p: p._empty.popitem(), r"blocks \[1\] are free and empty, or queued so, but not both"),
        (lambda p: p.is_cached.__setitem__(1, 1), r"blocks \[1\] are free and empty, or queued so"),
        (lambda p: setattr(p, "num_free_cached", 1), "0 free blocks are cached, the counter says 1"),
        (lambda p: p.num_after.__setitem__(2, 1), "0 blocks continue block 2, its counter says 1"),
        (lambda p: p.ref_count.__setitem__(2, -1), "block 2 has a negative reference count"),
        (lambda p: setattr(p, "used_slots", 1), "the counter says 1"),
    ],
)
def test_the_audit_finds_a_spoiled_pool(spoil, complaint):
    pool = BlockPool(4)
    spoil(pool)
    with pytest.raises(RuntimeError, match=complaint):
        pool.check_integrity()


def test_a_pool_needs_a_block_to_give_out():
    with pytest.raises(ValueError, match="num_blocks=1"):
        BlockPool(1)
