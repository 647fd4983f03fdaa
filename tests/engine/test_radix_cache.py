"""The radix tree under a running engine, told as short stories: who reads, copies, publishes and gives up which block."""

import pytest
from fake_model import greedy, make_core, reference, run
from kvscope.engine import EventKind, SamplingParams
from kvscope.engine.events import Cause


def radix(**options):
    return make_core(prefix_cache="radix", **options)


def events(core, kind, request_id=None):
    return [e for e in core.events.since(0)[0] if e.kind is kind and request_id in (None, e.request_id)]


def table(core, request_id, child=0):
    return core.get(request_id).children[child].block_tables[0].tolist()


def texts(core):
    """Every cached block and the number of tokens up to its last one."""
    pool, cache = core.tables.pool, core.tables.cache
    return {b: len(cache.text_of(b)) // 8 for b in range(pool.num_blocks) if pool.is_cached[b]}


def served(core, prompt, params):
    """Serve one prompt to its end; the tokens that it found."""
    request_id = core.add_request(prompt, params)
    run(core)
    request = core.get(request_id)
    assert request.children[0].output_token_ids == reference(prompt, params)
    return request.num_cached_tokens


def test_a_hit_inside_a_block_that_nobody_reads_is_copied_before_it_is_written():
    core = radix()
    served(core, [1, 2, 3, 4, 5, 6, 7, 8, 9], greedy(1))
    before = texts(core)
    assert before == {1: 4, 2: 8, 3: 9}, "the partly filled block stays too"
    assert served(core, [1, 2, 3, 4, 5, 6, 60, 61], greedy(1)) == 6
    (copied,) = events(core, EventKind.COPIED)
    assert (copied.numbers["source"], copied.numbers["tokens"], copied.numbers["reader"]) == (2, 2, -1)
    assert copied.cause is Cause.CACHED_WRITE and copied.block_id == 4
    assert before.items() <= texts(core).items(), "the cached block is as it was"
    (freed,) = [e for e in events(core, EventKind.FREED, 2) if e.cause is Cause.COPY_ON_WRITE]
    assert freed.block_id == 2 and freed.numbers["cached"] == 1


def test_the_same_prompt_again_computes_one_token():
    core = radix()
    prompt = [1, 2, 3, 4, 5, 6, 7, 8]
    assert [served(core, prompt, greedy(3)) for _ in range(3)] == [0, 7, 7]
    assert (
        core.metrics()["vllm:prefix_cache_hits_total"] == 14 and core.metrics()["vllm:prefix_cache_queries_total"] == 24
    )


def test_the_next_turn_of_a_chat_finds_the_answer_to_its_last_computed_token():
    core = radix()
    served(core, [1, 2, 3, 4, 5], greedy(5))
    said = core.get(1).children[0].output_token_ids
    assert served(core, [1, 2, 3, 4, 5, *said, 90, 91], greedy(2)) == 9, "the KV of the last token was never computed"


@pytest.mark.parametrize("leave", ["cancel", "preempt"])
def test_the_partly_filled_block_is_published_when_its_request_goes(leave):
    core = radix()
    core.add_request([1, 2, 3, 4, 5, 6], greedy(9))
    core.step()
    core.step()
    assert texts(core) == {1: 4}, "while it runs it is written"
    getattr(core, leave)(1)
    assert texts(core) == {1: 4, 2: 7}
    published = events(core, EventKind.PUBLISHED)[-1]
    assert published.cause is Cause.LEFT and published.numbers == {"logical": 1, "tokens": 3}
    if leave == "preempt":
        run(core)
        (resumed,) = events(core, EventKind.RESUMED)
        assert resumed.numbers["cached_tokens"] == 7 and resumed.numbers["recompute_tokens"] == 1
        metrics = core.metrics()
        assert (
            metrics["kvscope:preempted_prefix_cache_hits_total"] == 7 and metrics["vllm:prefix_cache_hits_total"] == 0
        )


def test_a_fault_publishes_nothing():
    core = radix()
    core.add_request([1, 2, 3, 4, 5, 6], greedy(9))
    core.step()
    core.runner.model.fault = RuntimeError("broken")
    core.step()
    assert texts(core) == {1: 4}


def test_nothing_past_a_stop_string_is_found_and_what_is_before_it_in_the_block_is():
    core = radix()
    core.add_request([1, 2, 3], greedy(20))
    for _ in range(9):
        core.step()  # 11 tokens computed
    core.finish(1, 0, 3, Cause.STOP_STRING, "x")  # 6 tokens stay
    assert texts(core) == {1: 4, 2: 6}
    core.check_integrity()


def test_equal_prompts_in_one_step_keep_their_own_blocks_and_the_spare_ones_are_given_up():
    core = radix()
    for _ in range(2):
        core.add_request([1, 2, 3, 4, 5, 6, 7, 8], greedy(2))
    core.step()
    assert table(core, 1) == [1, 2] and table(core, 2) == [3, 4]
    run(core)
    assert texts(core) == {3: 4, 4: 8, 5: 9}
    spare = [e.block_id for e in events(core, EventKind.EVICTED) if e.cause is Cause.SAME_TEXT]
    assert spare == [2, 1], "the first to go left the text to the other, and its end, block 5, goes on from there"


def test_an_answer_hangs_on_the_one_prompt_that_is_kept():
    core = radix()
    for max_tokens in (7, 8):
        core.add_request(
            [1, 2, 3, 4, 5, 6, 7, 8], SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=max_tokens)
        )
    run(core)
    first, second = (core.get(i).children[0].output_token_ids for i in (1, 2))
    assert first[0] != second[0], "two answers to one prompt, which both computed"
    assert sorted(texts(core).values()) == [4, 8, 12, 12, 14, 15]
    core.check_integrity()


def test_what_a_running_request_published_below_anothers_text_stays_reachable():
    core = radix(num_blocks=9)
    for max_tokens in (1, 9):
        core.add_request([1, 2, 3, 4, 5, 6, 7, 8], greedy(max_tokens))
    core.step()  # the first is over; its blocks may be evicted, for the second has its own
    core.add_request([50 + i for i in range(14)], greedy(1))
    run(core)
    assert served(core, [1, 2, 3, 4, 5, 6, 7, 8, *core.get(2).children[0].output_token_ids[:6], 9], greedy(1)) >= 8


def test_a_block_that_another_sample_is_about_to_write_is_not_published():
    core = radix()
    params = SamplingParams(n=2, max_tokens=5, seed=3)
    core.add_request([1, 2, 3, 4, 5, 6], params)
    core.step()
    core.finish(1, 0, 1, Cause.STOP_STRING, "x")
    assert 2 not in texts(core)
    core.step()
    assert not events(core, EventKind.COPIED), "the other is its only reader now, and writes in place"
    run(core)
    assert core.get(1).children[1].output_token_ids == reference([1, 2, 3, 4, 5, 6], params, request_id=1, child=1)


def test_where_no_block_is_free_for_a_copy_the_hit_ends_with_the_block_before():
    core = radix(num_blocks=4)
    served(core, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], greedy(1))
    assert served(core, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 60], greedy(2)) == 8
    (miss,) = events(core, EventKind.CACHE_MISS, 2)
    assert miss.cause is Cause.NO_FREE_BLOCK and miss.numbers["matched_tokens"] == 8


def test_admission_counts_the_copy_and_the_block_that_gets_a_reader_again():
    core = radix(num_blocks=9)
    served(core, [1, 2, 3, 4, 5, 6, 7, 8], greedy(1))
    core.add_request([1, 2, 3, 4, 5, 6, 60, 61, 62], greedy(1))
    seq = core.get(2).children[0]
    hit = core.tables.find_prefix(seq)
    assert (hit.num_tokens, hit.tables) == (6, ([1, 2],))
    assert core.tables.blocks_to_admit(seq, hit) == 4, (
        "blocks 1 and 2 leave the free ones; a copy and a new one are taken"
    )


def test_a_reset_leaves_nothing_to_find():
    core = radix()
    served(core, [1, 2, 3, 4, 5, 6], greedy(4))
    assert core.reset_prefix_cache() and texts(core) == {}
    assert served(core, [1, 2, 3, 4, 5, 6], greedy(4)) == 0


@pytest.mark.parametrize("prefix_cache", ["hash", "radix"])
@pytest.mark.parametrize(
    ("policy", "cause", "victim"),
    [
        ("lru", Cause.LEAST_RECENTLY_USED, 1),
        ("lfu", Cause.LEAST_FREQUENTLY_USED, 2),
        ("fifo", Cause.FIRST_IN, 1),
        ("mru", Cause.MOST_RECENTLY_USED, 3),
        ("slru", Cause.NOT_HIT_TWICE, 2),
        ("priority", Cause.LOWEST_PRIORITY, 1),
    ],
)
def test_each_strategy_gives_up_another_text_and_says_why(prefix_cache, policy, cause, victim):
    core = make_core(num_blocks=8, prefix_cache=prefix_cache, eviction_policy=policy)
    for token in (1, 1, 1, 2, 3):  # one cached block each
        priority = 5 if policy == "priority" and token == 1 else 0
        core.add_request([token] * (5 if prefix_cache == "hash" else 4), greedy(1), priority=priority)
        run(core)
    held = {block: core.tables.cache.text_of(block)[0] for block in texts(core)}
    core.add_request([9] * 20, greedy(1))
    core.step()
    first = next(e for e in events(core, EventKind.EVICTED) if e.numbers.get("needed_by") == 6)
    assert held[first.block_id] == victim and first.cause is cause


def test_samples_that_fill_the_pool_go_on_when_one_of_them_loses_its_blocks():
    core = radix(num_blocks=7, windows=(0, 0))
    params = SamplingParams(n=2, temperature=1.0)
    core.add_request([7, 3, 7, 3, 1, 2, 7, 3, 2], params)  # 3 blocks a group are all that there are
    run(core)
    for child in core.get(1).children:
        expected = reference(
            [7, 3, 7, 3, 1, 2, 7, 3, 2], params, max_tokens=4, request_id=1, child=child.child, windows=(0, 0)
        )
        assert child.output_token_ids == expected
