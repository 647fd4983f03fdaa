"""KV groups with blocks of different sizes: who shares a block, where hits end, what counts, and what is refused."""

import pytest
import tiny
import torch
from fake_model import REFERENCE, greedy, make_core, reference, run
from kvscope.engine import Engine, EngineConfig, EventKind
from kvscope.engine.events import Cause
from kvscope.engine.kvcache.ledger import divide
from kvscope.engine.kvcache.storage import KVStorage
from kvscope.engine.models.base import group_layers, with_block_size
from kvscope.engine.recording.recording import Recording
from kvscope.kernels import ops

WINDOWS = (0, 5)
TEXT = [(7 * i * i + 3 * i) % 90 for i in range(60)]


def core_of(full, sliding, **options):
    defaults = {"windows": WINDOWS, "num_blocks": 60, "max_num_batched_tokens": 16}
    return make_core(**(defaults | options), block_size={"full": full, "sliding": sliding})


def cached_tokens(core, prompt, max_tokens=4):
    request = core.add_request(prompt, greedy(max_tokens))
    run(core)
    assert core.get(request).children[0].output_token_ids == reference(prompt, greedy(max_tokens), windows=WINDOWS)
    return core.get(request).num_cached_tokens


# --- layers and pages -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "layers"),
    [
        ({"full": 32, "sliding": 16}, [(2, 5), (0, 1, 3, 4)]),  # four pages of 16 tokens are two of 32
        ({"full": 16, "sliding": 16}, [(2, 5), (0, 3), (1, 4)]),
        ({"full": 48, "sliding": 16}, [(2, 5), (0, 1, 3, 4)]),
        ({"full": 16, "sliding": 32}, [(2, 5), (0,), (1,), (3,), (4,)]),
    ],
)
def test_layers_are_dealt_out_so_that_blocks_of_all_groups_have_the_same_bytes(sizes, layers):
    groups = with_block_size(group_layers([7, 7, 0, 7, 7, 0], 2, 8), sizes)
    assert [group.layers for group in groups] == layers
    assert [group.block_size for group in groups] == [sizes["sliding" if g.window else "full"] for g in groups]


def test_layers_that_share_a_slot_have_pages_of_their_own():
    groups = group_layers([0, 3, 3, 0, 3, 3], 2, 8)
    sizes = {"full": 4, "sliding": 2}
    storage = KVStorage(groups, num_blocks=5, block_size=sizes, dtype=torch.float32, device="cpu", kernels=REFERENCE)
    page_of_four = 4 * 2 * 8 * 4 * 2  # bytes
    assert storage.block_bytes == 2 * page_of_four
    assert storage.block_bytes == KVStorage.block_bytes_of(
        groups, block_size=sizes, dtype=torch.float32, kernels=REFERENCE
    )
    kv = {}
    for layer, block in ((1, 1), (2, 1), (4, 1), (5, 1), (0, 2), (3, 2)):
        pages, layout = storage.pages(layer)
        kv[layer] = torch.randn(2, layout.block_size, 2, 8)
        slots = torch.arange(layout.block_size) + block * layout.block_size
        REFERENCE.write_kv(*kv[layer], pages, layout, slots)
    storage.copy(torch.tensor([[1, 3], [2, 4]]))
    for layer, block in ((1, 3), (2, 3), (4, 3), (5, 3), (0, 4), (3, 4)):
        k, v = storage.gather(layer, [block], 4)
        assert torch.equal(k, kv[layer][0]) and torch.equal(v, kv[layer][1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_work_on_pages_that_lie_beside_others(dtype):
    kernels, sizes = ops.resolve("cpu", "cpu", dtype), {"full": 32, "sliding": 16}
    groups = group_layers([0, 20, 20], 2, 32)
    storage = KVStorage(groups, num_blocks=6, block_size=sizes, dtype=dtype, device="cpu", kernels=kernels)
    pages, layout = storage.pages(2)
    alone = torch.zeros(6, layout.page_bytes, dtype=torch.uint8)
    assert pages.stride(0) == 2 * layout.page_bytes and pages.data_ptr() != storage.pages(1)[0].data_ptr()
    k, v, q = (torch.randn(40, heads, 32, dtype=dtype) for heads in (2, 2, 4))
    table = torch.tensor([[3, 1, 4]], dtype=torch.int32)
    slots = table[0].long().repeat_interleave(16)[:40] * 16 + torch.arange(40) % 16
    starts, lengths = torch.tensor([0, 40], dtype=torch.int32), torch.tensor([40], dtype=torch.int32)
    attended = []
    for its in (pages, alone):
        kernels.write_kv(k, v, its, layout, slots)
        attended.append(kernels.paged_attention(q, its, layout, table, starts, lengths, scale=0.2, window=20))
    assert torch.equal(*attended) and attended[0].abs().sum() > 0
    assert not storage.pages(1)[0][:, : layout.page_bytes].any()


def test_all_blocks_can_be_had_by_either_group():
    core = core_of(8, 2, enable_prefix_caching=False)
    core.add_request(TEXT[:16], greedy(1))
    core.step()
    events = [e for e in core.events.since(0)[0] if e.kind is EventKind.ALLOCATED]
    assert [(e.group, e.numbers["logical"]) for e in events] == [
        (0, 0), (1, 0), (1, 1), (1, 2), (1, 3), (0, 1), (1, 4), (1, 5), (1, 6), (1, 7),
    ]  # fmt: skip


# --- prefix hits ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(4, 6), (6, 4), (12, 3), (3, 12), (12, 4)])
@pytest.mark.parametrize(
    ("length", "found"), [(11, 0), (12, 0), (13, 12), (23, 12), (24, 12), (25, 24), (36, 24), (37, 36)]
)
def test_a_hit_fills_blocks_of_every_group(sizes, length, found):
    """All of these have 12 tokens in common blocks."""
    core = core_of(*sizes)
    assert cached_tokens(core, TEXT[:length], max_tokens=1) == 0
    assert cached_tokens(core, TEXT[:length], max_tokens=1) == found
    assert cached_tokens(core, [*TEXT[:length], 91, 92], max_tokens=5) == length // 12 * 12


def test_a_text_that_goes_on_is_found_to_the_end_of_its_last_common_block():
    core = core_of(4, 6)
    cached_tokens(core, TEXT[:10], max_tokens=20)
    text = TEXT[:10] + core.get(1).children[0].output_token_ids
    assert cached_tokens(core, text) == 24


def test_what_a_window_lost_shortens_a_hit_to_the_common_block_before():
    core = core_of(4, 2)
    cached_tokens(core, TEXT[:17], max_tokens=1)
    cache, pool = core.tables.cache, core.tables.pool
    seen = [b for b in pool.eviction_order().tolist() if cache.group_of(b) == 1 and len(cache.text_of(b)) == 8 * 14]
    core.tables._uncache(seen[0], Cause.CACHE_RESET, {"idle_steps": 0})  # tokens 12 and 13, which token 16 sees
    assert cached_tokens(core, TEXT[:17], max_tokens=1) == 12
    assert cached_tokens(core, TEXT[:17], max_tokens=1) == 16, "and then it is there again"


def test_a_radix_hit_ends_inside_blocks_of_both_groups_and_copies_either():
    core = core_of(8, 2, prefix_cache="radix")
    cached_tokens(core, TEXT[:20], max_tokens=1)
    before = core.events.next_index
    assert cached_tokens(core, [*TEXT[:13], 91, 92]) == 13
    copied = [(e.group, e.numbers["tokens"]) for e in core.events.since(before)[0] if e.kind is EventKind.COPIED]
    assert copied == [(0, 5), (1, 1)]
    before = core.events.next_index
    assert cached_tokens(core, [*TEXT[:12], 93, 94]) == 12
    copied = [(e.group, e.numbers["tokens"]) for e in core.events.since(before)[0] if e.kind is EventKind.COPIED]
    assert copied == [(0, 4)], "the other group's block ends there"


def test_a_radix_tree_keeps_what_falls_out_of_a_window_before_the_larger_block_is_full():
    core = core_of(32, 4, prefix_cache="radix")
    cached_tokens(core, TEXT[:10], max_tokens=40)
    text = TEXT[:10] + core.get(1).children[0].output_token_ids
    assert cached_tokens(core, text[:22]) == 21


# --- what counts ------------------------------------------------------------------------------------------------------


def test_all_blocks_count_alike_in_snapshots_and_in_the_ledger():
    core = core_of(8, 2)
    core.add_request(TEXT[:11], greedy(8))
    core.step()
    snapshot = core.snapshot()
    assert (snapshot.block_size, snapshot.block_sizes, snapshot.block_words) == (8, (8, 2), "8 or 2")
    full, sliding = snapshot.requests[0].block_tables
    assert snapshot.slots[full].tolist() == [8, 8] and snapshot.filled[full].tolist() == [8, 3]
    held = sliding[sliding > 0]
    assert snapshot.slots[held].tolist() == [2] * len(held)
    assert snapshot.filled[held].tolist() == [2, 2, 1] and snapshot.written[held].tolist() == [8, 8, 4]
    division = divide(snapshot)
    assert division.capacity == 8 * 59
    assert (division.token, division.internal) == (8 + 3 + 8 + 8 + 4, 5 + 4)
    assert core.metrics()["kvscope:num_slots_used"] == division.token
    run(core)


def test_each_group_lets_go_of_what_fell_out_of_its_window():
    core = core_of(8, 2, max_num_batched_tokens=64)
    core.add_request(TEXT[:24], greedy(2))
    core.step()
    full, sliding = (table.tolist() for table in core.get(1).children[0].block_tables)
    assert all(full) and len(full) == 3
    assert sliding[:10] == [0] * 10 and all(sliding[10:]) and len(sliding) == 12  # token 24 sees tokens 20 to 23
    run(core)


def test_an_engine_and_its_recordings_say_what_its_blocks_hold(tmp_path):
    folder = tiny.tiny_model(
        tmp_path / "model", "gemma2", tokenizer=False, head_dim=20, query_pre_attn_scalar=9, sliding_window=9
    )
    sizes = {"full": 8, "sliding": 4}
    with Engine(str(folder), block_size=sizes, num_blocks=40, dtype="float32", num_threads=1) as engine:
        assert engine.config.block_size == sizes and "40 blocks of 8 or 4>" in repr(engine)
        assert (engine.info.block_size, engine.info.block_sizes) == (8, (8, 4))
        assert [group.block_size for group in engine.info.spec.kv_groups] == [8, 4]
        tape = engine.record()
        wanted = tiny.oracle(folder, TEXT[:21], 8)
        for found in (0, 16):
            output = engine.generate([TEXT[:21]], greedy(8, ignore_eos=True))[0]
            assert output.outputs[0].token_ids == wanted and output.num_cached_tokens == found
        engine.wait_idle()
        loaded = Recording.load(tape.recording().save(tmp_path / "run.kvscope"))
    assert loaded.info.block_sizes == (8, 4) and loaded.info.block_words == "8 or 4"
    last = loaded.at(loaded.last_step).snapshot()
    assert last.block_sizes == (8, 4) and set(last.slots[last.eviction_order].tolist()) == {8, 4}


# --- what is refused ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"block_size": {"full": 8}}, "one for each of 'full' and 'sliding' layers"),
        ({"block_size": {"full": 8, "sliding": 0}}, r"'sliding': 0\}: each must be an integer of at least 1"),
        ({"block_size": {"full": 8, "sliding": 4}, "kv_allocator": "orca-max", "enable_prefix_caching": False},
         "two need kv_allocator='paged', not 'orca-max'"),
    ],
)  # fmt: skip
def test_sizes_that_cannot_be_are_refused(options, complaint):
    with pytest.raises(ValueError, match=f"^block_size=.*{complaint}"):
        EngineConfig(**options)


@pytest.mark.parametrize(("windows", "missing", "number"), [((0, 0), "sliding", 8), ((5,), "full", 4)])
def test_a_model_without_such_layers_is_named(windows, missing, number):
    with pytest.raises(
        ValueError, match=f"the model has no '{missing}' layers; give one number for all, such as {number}"
    ):
        core_of(8, 4, windows=windows)


def test_two_equal_sizes_are_one():
    assert EngineConfig(block_size={"full": 8, "sliding": 8}) == EngineConfig(block_size=8)


def test_a_request_that_can_never_fit_is_told_both_sizes():
    core = core_of(8, 2, num_blocks=6)
    with pytest.raises(
        ValueError, match=r"a prompt of 40 tokens and .* need 17 blocks of 8 or 2 tokens, the pool has 5"
    ):
        core.add_request(TEXT[:40], greedy(2))
