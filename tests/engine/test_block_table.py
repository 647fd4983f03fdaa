"""Who holds which block, told as short stories with exact ids and the exact order of the free queue."""

import pytest
from fake_model import greedy, make_core, reference, run
from kvscope.engine import EventKind, RequestRefused, SamplingParams
from kvscope.engine.events import Cause


def table(core, request_id, child=0, group=0):
    return core.get(request_id).children[child].block_tables[group].tolist()


def free(core):
    return list(core.tables.pool.free_queue())


def events(core, *kinds):
    return [e for e in core.events.since(0)[0] if e.kind in kinds]


def test_blocks_come_one_by_one_as_tokens_need_them_and_return_in_reverse():
    core = make_core(num_blocks=9)
    core.add_request([1, 2, 3, 4, 5, 6], greedy(4))
    core.step()  # 6 tokens computed, the 7th chosen
    assert table(core, 1) == [1, 2]
    core.step()
    core.step()  # 8 tokens computed
    assert table(core, 1) == [1, 2]
    core.step()  # token 9 needs a block of its own; it is not computed, because it is the last
    assert free(core) == [3, 4, 5, 6, 7, 8, 2, 1], "both hold findable text; the end of it is evicted first"
    core.check_integrity()


def test_an_unfinished_block_returns_to_the_front():
    core = make_core(num_blocks=6)
    core.add_request([1, 2, 3, 4, 5, 6, 7], greedy(1))
    core.step()
    assert free(core) == [2, 3, 4, 5, 1]


def test_without_prefix_caching_all_blocks_return_to_the_front_in_table_order():
    core = make_core(num_blocks=6, enable_prefix_caching=False)
    core.add_request(list(range(12)), greedy(1))
    core.step()
    assert free(core) == [1, 2, 3, 4, 5]
    assert not events(core, EventKind.PUBLISHED, EventKind.CACHE_MISS)


def test_a_second_prompt_reads_the_blocks_of_the_first_and_both_keep_their_ids():
    core = make_core()
    prompt = list(range(8))
    core.add_request([*prompt, 50], greedy(6))
    core.step()
    core.add_request([*prompt, 60, 61], greedy(6))
    core.step()
    assert table(core, 1) == [1, 2, 3] and table(core, 2) == [1, 2, 4]
    assert core.tables.pool.ref_count[:5].tolist() == [1, 2, 2, 1, 1]
    shared = events(core, EventKind.SHARED)
    assert [(e.block_id, e.cause, e.numbers["ref_count"]) for e in shared] == [
        (1, Cause.PREFIX_MATCH, 2),
        (2, Cause.PREFIX_MATCH, 2),
    ]
    before = {i: table(core, i) for i in (1, 2)}
    while core.has_work:
        core.step()
        for i, ids in before.items():
            assert table(core, i)[: len(ids)] in (ids, [])
    assert core.get(2).num_cached_tokens == 8
    assert core.get(2).children[0].output_token_ids == reference([*prompt, 60, 61], greedy(6))


def test_a_prompt_that_is_wholly_cached_computes_its_last_block_again():
    core = make_core()
    prompt = [1, 2, 3, 4, 5, 6, 7, 8]
    for _ in range(2):
        core.add_request(prompt, greedy(4))
        run(core)
    assert core.get(2).num_cached_tokens == 4
    assert core.get(2).children[0].output_token_ids == core.get(1).children[0].output_token_ids
    miss = events(core, EventKind.CACHE_MISS)[-1]
    assert miss.cause is Cause.FULL_BLOCKS_ONLY and miss.numbers["matched_tokens"] == 4
    published = [e.block_id for e in events(core, EventKind.PUBLISHED) if e.request_id == 2]
    chain = core.tables.cache.node_of(published[0])
    assert chain.parent is core.tables.cache.node_of(1), "what was written after the hit hangs on the right parent"


def test_two_equal_prompts_in_one_step_do_not_read_what_is_not_computed_yet():
    core = make_core()
    for _ in range(2):
        core.add_request([1, 2, 3, 4, 5, 6, 7, 8], greedy(3))
    core.step()
    assert table(core, 1) == [1, 2] and table(core, 2) == [3, 4]
    assert core.tables.cache.node_of(1) is core.tables.cache.node_of(3), "one text in two blocks"
    run(core)
    assert core.get(1).children[0].output_token_ids == core.get(2).children[0].output_token_ids


def test_a_recycled_block_is_never_found_under_its_old_text():
    core = make_core(num_blocks=4)
    core.add_request([1, 2, 3, 4, 5], greedy(1))
    run(core)
    core.add_request([9] * 11, greedy(1))  # needs all three blocks
    run(core)
    evicted = events(core, EventKind.EVICTED)
    assert [(e.block_id, e.generation, e.numbers["idle_steps"], e.numbers["needed_by"]) for e in evicted] == [
        (1, 1, 1, 2)
    ]
    core.add_request([1, 2, 3, 4, 5], greedy(1))
    run(core)
    miss = events(core, EventKind.CACHE_MISS)[-1]
    assert miss.cause is Cause.EVICTED and miss.numbers["evicted_step"] == 2 and core.get(3).num_cached_tokens == 0


def test_the_least_recently_used_text_is_evicted_first_and_its_end_before_its_start():
    core = make_core(num_blocks=7)
    core.add_request([1] * 9, greedy(1))
    run(core)
    core.add_request([2] * 9, greedy(1))
    run(core)
    assert free(core) == [5, 6, 2, 1, 4, 3], "empty ones, then text 1, then text 2, each from its end"
    core.add_request([1] * 9, greedy(1))
    run(core)
    assert free(core) == [5, 6, 4, 3, 2, 1], "text 1 was used again: now text 2 is the older one"
    core.add_request([3] * 14, greedy(1))
    run(core)
    assert [e.block_id for e in events(core, EventKind.EVICTED)] == [4, 3]
    assert core.metrics()["kvscope:blocks_evicted_total"] == 2


def test_n_samples_share_a_partial_block_and_make_exactly_n_minus_1_copies():
    core = make_core()
    core.add_request([1, 2, 3, 4, 5, 6], SamplingParams(n=4, max_tokens=4, seed=3))
    core.step()
    assert [table(core, 1, c) for c in range(4)] == [[1, 2]] * 4
    assert core.tables.pool.ref_count[:3].tolist() == [1, 4, 4]
    core.step()
    assert [table(core, 1, c) for c in range(4)] == [[1, 3], [1, 4], [1, 5], [1, 2]]
    copies = events(core, EventKind.COPIED)
    assert [(e.child, e.block_id, e.numbers["source"], e.numbers["reader_child"]) for e in copies] == [
        (0, 3, 2, 1),
        (1, 4, 2, 2),
        (2, 5, 2, 3),
    ]
    assert all(e.numbers["tokens"] == 2 and e.numbers["bytes"] == 64 for e in copies)
    assert core.metrics()["kvscope:blocks_copied_total"] == 3
    run(core)
    outputs = [c.output_token_ids for c in core.get(1).children]
    assert len(set(map(tuple, outputs))) == 4
    params = SamplingParams(n=4, max_tokens=4, seed=3)
    assert outputs == [reference([1, 2, 3, 4, 5, 6], params, request_id=1, child=c) for c in range(4)]


def test_n_samples_of_a_prompt_of_full_blocks_copy_nothing():
    core = make_core()
    core.add_request([1, 2, 3, 4], SamplingParams(n=3, max_tokens=3, seed=3))
    core.step()
    core.step()
    assert [table(core, 1, c) for c in range(3)] == [[1, 2], [1, 3], [1, 4]]
    assert core.metrics()["kvscope:blocks_copied_total"] == 0


def test_samples_that_end_at_once_leave_the_block_to_the_last_which_writes_in_place():
    core = make_core()
    core.add_request([1, 2, 3, 4, 5, 6], SamplingParams(n=3, max_tokens=9, seed=3))
    core.step()
    core.finish(1, 0, 1, Cause.STOP_STRING, "x")
    core.finish(1, 1, 1, Cause.STOP_STRING, "x")
    core.step()
    assert table(core, 1, 2) == [1, 2] and core.metrics()["kvscope:blocks_copied_total"] == 0


def test_two_groups_have_a_table_each_out_of_one_pool():
    core = make_core(windows=(0, 0), num_blocks=12)
    core.add_request([1, 2, 3, 4, 5], greedy(5))
    core.step()
    assert table(core, 1, group=0) == [1, 3] and table(core, 1, group=1) == [2, 4]
    run(core)
    assert core.get(1).children[0].output_token_ids == reference([1, 2, 3, 4, 5], greedy(5), windows=(0, 0))
    core.add_request([1, 2, 3, 4, 9], greedy(2))
    core.step()
    assert (table(core, 2, group=0)[0], table(core, 2, group=1)[0]) == (1, 2)
    assert {e.group for e in events(core, EventKind.PUBLISHED)} == {0, 1}
    run(core)
    assert core.get(2).children[0].output_token_ids == reference([1, 2, 3, 4, 9], greedy(2), windows=(0, 0))


def test_two_groups_copy_on_write_in_each():
    core = make_core(windows=(0, 0), num_blocks=20)
    params = SamplingParams(n=2, max_tokens=5, seed=1)
    core.add_request([1, 2, 3], params)
    core.step()
    core.step()
    assert {(e.group, e.numbers["source"], e.block_id) for e in events(core, EventKind.COPIED)} == {
        (0, 1, 3),
        (1, 2, 4),
    }
    run(core)
    for child in core.get(1).children:
        assert child.output_token_ids == reference([1, 2, 3], params, request_id=1, child=child.child, windows=(0, 0))


def test_nothing_past_a_stop_string_stays_published():
    core = make_core(block_size=2)
    core.add_request([1, 2, 3], greedy(9))
    for _ in range(6):
        core.step()  # 8 tokens computed: 4 blocks published
    assert core.tables.cache.num_published == 4
    core.finish(1, 0, 2, Cause.STOP_STRING, "x")  # 5 tokens stay
    assert core.tables.cache.num_published == 2
    assert core.get(1).children[0].output_token_ids == reference([1, 2, 3], greedy(9))[:2]
    core.check_integrity()


def test_an_interrupted_answer_keeps_its_full_blocks_for_the_next_turn():
    core = make_core()
    core.add_request([1, 2, 3, 4, 5], greedy(20))
    for _ in range(8):
        core.step()
    seq = core.get(1).children[0]
    said, computed = seq.output_token_ids, seq.num_computed_tokens
    core.cancel(1)
    core.add_request([1, 2, 3, 4, 5, *said, 7, 7], greedy(2))
    core.step()
    assert core.get(2).num_cached_tokens == computed // 4 * 4 == 12


def test_blocks_that_fell_out_of_the_window_are_given_back_while_their_request_runs():
    core = make_core(windows=(0, 6), num_blocks=40)
    core.add_request([1, 2, 3, 4, 5], greedy(12))
    core.step()  # 5 tokens computed; the next token sees tokens 0 to 5
    assert table(core, 1, group=1) == [2, 4]
    for _ in range(4):
        core.step()  # 9 computed: the next token sees tokens 4 to 9
    assert table(core, 1, group=0) == [1, 3, 5] and table(core, 1, group=1) == [0, 4, 6]
    assert [(e.block_id, e.group, e.numbers) for e in events(core, EventKind.NULLED)] == [
        (2, 1, {"logical": 0, "window": 6})
    ]
    freed = events(core, EventKind.FREED)
    assert [(e.block_id, e.cause, e.numbers["cached"]) for e in freed] == [(2, Cause.OUT_OF_WINDOW, 1)]
    assert core.tables.cache.node_of(2) is not None, "its text can still be found by another prompt"
    run(core)
    assert core.get(1).children[0].output_token_ids == reference([1, 2, 3, 4, 5], greedy(12), windows=(0, 6))


def test_a_long_text_holds_a_bounded_number_of_windowed_blocks():
    core = make_core(windows=(8,), num_blocks=7, max_num_batched_tokens=4, enable_prefix_caching=False)
    core.add_request(list(range(60)), greedy(100))
    most = 0
    while core.has_work:
        core.step()
        most = max(most, core.tables.pool.num_used)
    assert core.get(1).status == "finished" and most <= core.tables.blocks_for(1000) == 4
    assert core.get(1).children[0].output_token_ids == reference(list(range(60)), greedy(100), windows=(8,))


def test_a_request_is_refused_by_what_it_holds_at_once_not_by_its_length():
    core = make_core(windows=(0, 8), num_blocks=12, max_num_batched_tokens=4)
    core.add_request([1] * 20, greedy(9))  # 28 tokens with KV: 7 blocks in one group, 4 in the other
    run(core)
    with pytest.raises(RequestRefused, match="12 blocks of 4 tokens, the pool has 11"):
        core.add_request([1] * 20, greedy(10))  # 8 blocks and 4
    core.add_request([1] * 20, greedy(None))
    assert core.get(3).max_tokens == 9, "what is left is found in the same way"


def test_a_hit_needs_only_what_the_next_token_sees_of_a_windowed_group():
    core = make_core(windows=(0, 8), num_blocks=60)
    prompt = list(range(20))
    for tokens in (prompt, prompt, [*prompt, 50, 51, 52]):
        core.add_request(tokens, greedy(6))
        run(core)
    first, again, longer = (core.get(i) for i in (1, 2, 3))
    assert (first.num_cached_tokens, again.num_cached_tokens, longer.num_cached_tokens) == (0, 16, 20)
    shared = [e for e in events(core, EventKind.SHARED) if e.request_id == 3]
    assert [sum(e.group == g for e in shared) for g in (0, 1)] == [5, 2], "20 tokens, and the 7 that token 20 sees"
    for request in (first, again, longer):
        expected = reference(request.prompt_token_ids, greedy(6), windows=(0, 8))
        assert request.children[0].output_token_ids == expected


def test_a_hit_ends_where_a_windowed_group_lost_its_blocks():
    core = make_core(windows=(0, 5), num_blocks=60)
    core.add_request(list(range(20)), greedy(1))
    run(core)
    node = core.tables.cache.node_of(9)  # the last full block of the global group
    (windowed,) = node.blocks[1]
    core.tables._uncache(windowed, Cause.CACHE_RESET, {"idle_steps": 0})
    core.add_request([*range(20), 7], greedy(3))
    run(core)
    assert core.get(2).num_cached_tokens == 16
    miss = events(core, EventKind.CACHE_MISS)[-1]
    assert miss.cause is Cause.EVICTED and miss.numbers["evicted_step"] == 1
    assert core.get(2).children[0].output_token_ids == reference([*range(20), 7], greedy(3), windows=(0, 5))


def test_samples_share_the_window_and_part_when_they_write():
    core = make_core(windows=(6, 0), num_blocks=60)
    params = SamplingParams(n=3, temperature=1.0, max_tokens=12)
    core.add_request(list(range(9)), params)
    core.step()
    assert events(core, EventKind.FORKED)[0].numbers["shared_blocks"] == 5, "2 of the window and 3"
    run(core)
    for child in core.get(1).children:
        expected = reference(list(range(9)), params, request_id=1, child=child.child, windows=(6, 0))
        assert child.output_token_ids == expected
