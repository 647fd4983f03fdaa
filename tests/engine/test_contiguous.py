"""Memory reserved in one piece: the buddy allocator alone, and real requests on it."""

import random

import pytest
from fake_model import greedy, make_core, reference, run
from kvscope.engine import EngineConfig, EventKind, RequestRefused, SamplingParams
from kvscope.engine.kvcache.buddy import BuddyAllocator
from kvscope.engine.kvcache.contiguous import next_power_of_two

POLICIES = ("orca-max", "orca-pow2", "orca-oracle")


def test_a_run_is_halved_until_it_fits_and_joined_again():
    buddy = BuddyAllocator(1, 16)
    assert [buddy.take(4), buddy.take(2), buddy.take(8)] == [1, 5, 9]
    assert buddy.take(4) is None and buddy.num_runs(2) == 1, "2 are left: not 4"
    buddy.release(1)
    assert buddy.num_runs(4) == 1 and buddy.num_runs(8) == 0, "the buddy of the first 4 is half taken"
    buddy.release(5)
    buddy.release(9)
    assert buddy.num_runs(16) == 1
    buddy.check_integrity()


def test_a_pool_of_any_size_is_a_row_of_pieces():
    buddy = BuddyAllocator(1, 11)
    assert buddy.largest == 8 and [buddy.take(8), buddy.take(2), buddy.take(1)] == [1, 9, 11]
    for start in (1, 9, 11):
        buddy.release(start)
        buddy.check_integrity()
    assert buddy.num_runs(1) == 11


@pytest.mark.parametrize("seed", range(20))
def test_random_runs_never_overlap(seed):
    draw, buddy, taken = random.Random(seed), BuddyAllocator(1, draw_size := 37 + 9 * seed), {}
    for _ in range(300):
        if taken and draw.random() < 0.5:
            start = draw.choice(list(taken))
            buddy.release(start)
            del taken[start]
        else:
            size = 1 << draw.randrange(5)
            possible, start = buddy.num_runs(size), buddy.take(size)
            assert (start is None) == (possible == 0)
            if start is not None:
                taken[start] = size
        buddy.check_integrity()
        blocks = [b for start, size in taken.items() for b in range(start, start + size)]
        assert len(set(blocks)) == len(blocks) and all(1 <= b <= draw_size for b in blocks)


@pytest.mark.parametrize(
    ("policy", "blocks"), [("orca-max", 16), ("orca-pow2", 16), ("orca-oracle", 8)]  # 64, 5 + 32 and 5 + 25 tokens
)  # fmt: skip
def test_a_request_holds_its_run_from_the_first_step_to_its_end(policy, blocks):
    core = make_core(kv_allocator=policy, enable_prefix_caching=False, num_blocks=33, max_model_len=64)
    core.add_request([1, 2, 3, 4, 5], greedy(25))
    held = set()
    while core.has_work:
        core.step()
        core.check_integrity()
        if core.has_work:
            held.add(core.tables.pool.num_used)
            assert core.get(1).children[0].block_tables[0].tolist() == list(range(1, blocks + 1))
    assert held == {blocks}
    assert core.get(1).children[0].output_token_ids == reference([1, 2, 3, 4, 5], greedy(25))


def test_free_memory_in_pieces_that_are_too_short_helps_nobody():
    core = make_core(kv_allocator="orca-oracle", enable_prefix_caching=False, num_blocks=17, max_model_len=64)
    for prompt, new in ((5, 3), (20, 12), (5, 3), (20, 12)):  # 2, 8, 2 and 8 blocks of 16
        core.add_request(list(range(prompt)), greedy(new))
    core.step()
    head = core.scheduler.waiting.head
    assert head.request.id == 4 and core.tables.pool.num_free == 4
    assert core.scheduler.reasons.words(head) == "it needs 8 blocks; 0 are available"
    run(core)
    assert all(core.get(i).status == "finished" for i in range(1, 5))


def test_no_room_is_kept_for_growing_where_nobody_grows():
    core = make_core(
        kv_allocator="orca-oracle", enable_prefix_caching=False, num_blocks=17, max_model_len=64, watermark=0.3
    )
    for _ in range(2):
        core.add_request([1] * 20, greedy(12))  # 8 blocks of 16
    core.step()
    assert len(core.scheduler.running) == 2 and core.tables.pool.num_free == 0


def test_what_fits_in_no_piece_is_refused():
    core = make_core(kv_allocator="orca-max", enable_prefix_caching=False, num_blocks=12, max_model_len=64)
    with pytest.raises(RequestRefused, match="16 blocks of 4 tokens, the longest piece of the pool has 8"):
        core.add_request([1], greedy(1))


def test_more_samples_than_there_are_pieces_are_refused():
    """8 blocks of 4 tokens and one more: three runs of 4 blocks do not fit, two do."""
    core = make_core(num_blocks=10, kv_allocator="orca-oracle", enable_prefix_caching=False)
    options = {"temperature": 1.0, "max_tokens": 8}
    with pytest.raises(RequestRefused, match=r"n=3: each sample reserves a piece of 4 blocks .* room for 2"):
        core.add_request([1] * 6, SamplingParams(n=3, **options))
    core.add_request([1] * 6, SamplingParams(n=2, **options))
    run(core)
    assert core.metrics()['vllm:request_success_total{finished_reason="length"}'] == 2


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("windows", [(0,), (0, 0), (0, 5, 3)])
def test_samples_have_runs_of_their_own_and_the_prompt_is_copied_into_them(policy, windows):
    core = make_core(
        kv_allocator=policy, enable_prefix_caching=False, num_blocks=257, max_model_len=40, windows=windows
    )
    params = SamplingParams(n=3, temperature=1.0, max_tokens=9)
    prompts = [list(range(10)), list(range(4))]
    for prompt in prompts:
        core.add_request(prompt, params)
    run(core)
    copied = [e for e in core.events.since(0)[0] if e.kind is EventKind.COPIED]
    assert len(copied) == 2 * (3 + 1) * len(windows), (
        "10 tokens are 3 blocks, 4 are one, for each of two further samples"
    )
    assert not [e for e in core.events.since(0)[0] if e.kind is EventKind.SHARED]
    for i, prompt in enumerate(prompts, 1):
        for child in core.get(i).children:
            expected = reference(prompt, params, request_id=i, child=child.child, windows=windows)
            assert child.output_token_ids == expected
    assert core.tables.pool.num_used == 0 and core.tables.buddy.num_runs(256) == 1


@pytest.mark.parametrize("policy", POLICIES)
def test_cancelled_and_preempted_requests_give_their_runs_back(policy):
    core = make_core(kv_allocator=policy, enable_prefix_caching=False, num_blocks=65, max_model_len=32)
    for i in range(4):
        core.add_request([i] * 6, greedy(20))
    core.step()
    core.preempt(2)
    core.cancel(3)
    core.check_integrity()
    run(core)
    for i in (0, 1, 3):
        assert core.get(i + 1).children[0].output_token_ids == reference([i] * 6, greedy(20))
    assert core.tables.buddy.num_runs(64) == 1


def test_reserved_memory_and_a_prefix_cache_contradict_each_other():
    with pytest.raises(ValueError, match=r"kv_allocator='orca-max'.*enable_prefix_caching=False"):
        EngineConfig(kv_allocator="orca-max")


def test_next_power_of_two():
    assert [next_power_of_two(n) for n in (0, 1, 2, 3, 25, 32, 33)] == [1, 1, 2, 4, 32, 32, 64]
