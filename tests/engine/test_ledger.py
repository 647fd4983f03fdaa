"""The waste ledger: by hand where a few slots can be counted, and by its sum everywhere else."""

import random

import pytest
from fake_model import greedy, make_core
from kvscope.engine import SamplingParams
from kvscope.engine.kvcache.ledger import PURPOSES, WasteLedger


def observe(core):
    """Serve what waits; the ledger of every step."""
    ledger, seen = WasteLedger(), 0
    while core.has_work:
        core.step()
        core.check_integrity()
        events, seen, lost = core.events.since(seen)
        assert not lost
        ledger.add(core.snapshot(), events)
    return ledger


def slots(ledger, step):
    return ledger.instants[step - 1][3:]


def test_paging_wastes_what_is_left_of_the_last_block():
    core = make_core(num_blocks=9)  # 32 slots, blocks of 4
    core.add_request([1] * 5, greedy(2))  # 6 tokens with KV
    ledger = observe(core)
    assert slots(ledger, 1) == (5, 1, 2, 0, 24), "block 2: one token is written, one will be, two never are"
    assert slots(ledger, 2) == (0, 0, 0, 0, 32)


@pytest.mark.parametrize(
    ("allocator", "expected"),
    [
        ("orca-oracle", (5, 9, 1, 1, 48)),  # 5 + 10 tokens asked for in 4 blocks; the last token has no KV
        ("orca-pow2", (5, 9, 7, 11, 32)),  # 5 + 16 in 8 blocks
        ("orca-max", (5, 9, 26, 24, 0)),  # 40 in 16 blocks
    ],
)
def test_a_reservation_wastes_what_was_asked_for_in_vain_and_what_was_rounded_up(allocator, expected):
    core = make_core(num_blocks=17, kv_allocator=allocator, enable_prefix_caching=False, max_model_len=40)
    core.add_request([1] * 5, greedy(10))
    ledger = observe(core)
    assert slots(ledger, 1) == expected


def test_free_slots_that_cannot_serve_the_head_of_the_line_are_external():
    core = make_core(num_blocks=9, kv_allocator="orca-max", enable_prefix_caching=False, max_model_len=16)
    for _ in range(3):
        core.add_request([1] * 3, greedy(4))
    core.add_request([2] * 3, greedy(2))
    ledger = observe(core)
    first = ledger.instants[0]
    assert first.waits and first.free == 0 and first.external == 0, "two runs of 4 blocks fill the pool"
    core = make_core(num_blocks=8, kv_allocator="orca-max", enable_prefix_caching=False, max_model_len=16)
    for _ in range(2):
        core.add_request([1] * 3, greedy(4))
    first = observe(core).instants[0]
    assert first.waits and (first.free, first.external) == (0, 12), "3 blocks are free, in pieces of 2 and 1"


def test_a_shared_slot_counts_once():
    core = make_core(num_blocks=17)
    core.add_request([1] * 8, SamplingParams(n=4, temperature=1.0, max_tokens=4))
    ledger = observe(core)
    assert slots(ledger, 1) == (8, 0, 0, 0, 56)
    assert slots(ledger, 2) == (12, 8, 4, 0, 40), "a block for each sample: 1 written, 2 to come, 1 for nobody"


@pytest.mark.parametrize("allocator", ["paged", "orca-max", "orca-pow2", "orca-oracle"])
def test_the_five_purposes_add_up_to_the_capacity_at_every_instant(allocator):
    draw, num_blocks = random.Random(7), 129 if allocator == "paged" else 513  # three samples need a piece of 128 each
    core = make_core(
        num_blocks=num_blocks, kv_allocator=allocator, enable_prefix_caching=allocator == "paged", max_model_len=120,
        windows=(0, 9) if allocator == "paged" else (0, 0, 0),
    )  # fmt: skip
    for _ in range(40):
        params = SamplingParams(n=draw.choice([1, 1, 3]), temperature=1.0, max_tokens=draw.randint(1, 40))
        core.add_request([draw.randrange(9) for _ in range(draw.randint(1, 30))], params)
    ledger = observe(core)
    for instant in ledger.instants:
        assert sum(instant[3:]) == (num_blocks - 1) * 4 and min(instant[3:]) >= 0
    shares = ledger.shares()
    assert tuple(shares) == PURPOSES and sum(shares.values()) == pytest.approx(1)


def test_on_one_trace_each_step_of_knowledge_wastes_less_and_paging_least():
    used = {}
    for allocator in ("orca-max", "orca-pow2", "orca-oracle", "paged"):
        draw = random.Random(3)
        core = make_core(num_blocks=257, kv_allocator=allocator, enable_prefix_caching=False, max_model_len=256)
        for _ in range(60):
            core.add_request([1] * draw.randint(4, 60), greedy(draw.randint(4, 90)))
        used[allocator] = observe(core).shares()["token"]
    print(used)
    assert list(used.values()) == sorted(used.values()) and used["paged"] > 0.8


def test_where_nobody_waits_there_is_nothing_to_average():
    core = make_core()
    core.add_request([1], greedy(3))
    with pytest.raises(ValueError, match="nobody ever waited"):
        observe(core).shares()
