"""Every event has words, in the agreed style."""

import itertools
import re

import pytest
from fake_frames import FakeEngine, all_events
from kvscope.engine.events import Cause, Event, EventKind
from kvscope.workbench.markup import amount, size
from kvscope.workbench.sentences import Context, lines, sentence, story

NUMBERS = {
    "prompt_tokens": 182, "max_tokens": 96, "n": 4, "needed": 14, "available": 11, "reserved": 3, "behind": 10,
    "cached_tokens": 64, "waited_steps": 12, "blocks": 4, "computed_for": 1, "matched_tokens": 48, "evicted_step": 185,
    "at_token": 48, "logical": 3, "ref_count": 2, "samples": 4, "shared_blocks": 8, "source": 52,
    "source_generation": 1, "tokens": 2, "bytes": 737280, "reader": 6, "reader_child": 2, "idle_steps": 11,
    "needed_by": 11, "needed_by_child": 2, "cached": 1, "released_blocks": 15, "recompute_tokens": 231,
    "total_tokens": 295, "output_tokens": 160, "cached_blocks": 10, "freed_blocks": 1, "limit": 160,
    "prefill_tokens": 52, "decode_tokens": 12, "running": 10, "waiting": 2, "sequences": 13, "seconds": 0.045,
    "used_host_blocks": 12,
}  # fmt: skip
NEVER = re.compile(r"successfully|!|unfortunately|sorry|please|should have|your fault|error:", re.IGNORECASE)


def event(kind, cause=Cause.NONE, *, request_id=6, child=0, block_id=95, step=93, text="", **numbers):
    return Event(1, step, 0.0, kind, request_id, child, 0, block_id, 2, cause, numbers, text)


def context(*forked, prompts=()):
    known = Context(block_size=16)
    known.learn([event(EventKind.FORKED, request_id=r) for r in forked])
    known._prompts.update(prompts)
    return known


@pytest.mark.parametrize("kind", list(EventKind))
@pytest.mark.parametrize("numbers", [NUMBERS, {}], ids=["numbers", "no numbers"])
def test_every_kind_and_cause_is_a_short_sentence(kind, numbers):
    for cause in Cause:
        said = sentence(event(kind, cause, **numbers), context(6, 11))
        assert len(said.headline.split()) <= 20, said
        assert len(said.consequence.split()) <= 20, said
        for text in said:
            assert text.endswith(".") and not text.endswith(".."), text
            assert text[0].isupper() or text[0].isdigit() or text.startswith("None"), text
            assert "  " not in text and "None " not in text.removeprefix("None of"), text
            assert not NEVER.search(text), text


@pytest.mark.parametrize(
    "said, expected",
    [
        (event(EventKind.CACHE_HIT, Cause.PREFIX_MATCH, request_id=2, blocks=4, computed_for=1, cached_tokens=64, prompt_tokens=92),
         ("Request 2 reused 4 blocks that were computed for request 1.",
          "64 of 92 prompt tokens came from the cache; 28 are left for prefill.")),
        (event(EventKind.CACHE_MISS, Cause.NEVER_SEEN, request_id=8, prompt_tokens=182),
         ("Request 8 missed the cache because no earlier prompt starts with “Meeting notes …”.",
          "All 182 prompt tokens must be computed.")),
        (event(EventKind.CACHE_MISS, Cause.EVICTED, request_id=16, prompt_tokens=190, evicted_step=185),
         ("Request 16 missed the cache because its first block was evicted at step 185.",
          "All 190 prompt tokens must be computed.")),
        (event(EventKind.CACHE_MISS, Cause.FULL_BLOCKS_ONLY, request_id=9, prompt_tokens=64, matched_tokens=48),
         ("Request 9 matched only 48 of 64 tokens because caching works in full blocks of 16.",
          "The last block is computed again.")),
        (event(EventKind.FORKED, Cause.PARALLEL_SAMPLING, request_id=3, samples=4, shared_blocks=8),
         ("Request 3 split into 4 samples, 3a to 3d, that share 8 blocks.",
          "Nothing was copied. The first write into a shared block will copy it.")),
        (event(EventKind.COPIED, Cause.SHARED_WRITE, child=1, source=52, tokens=2, bytes=737280, reader=6, reader_child=2),
         ("6b copied block 52 to block 95 before writing, because 6c still reads block 52.",
          "Copy-on-write: 2 tokens, one block of 720 KiB.")),
        (event(EventKind.EVICTED, Cause.LEAST_RECENTLY_USED, block_id=111, idle_steps=11, needed_by=1),
         ("Block 111 was evicted because request 1 needed a block and none was free.",
          "It had been unused for longest (11 steps). Its text is no longer cached.")),
        (event(EventKind.EVICTED, Cause.LEAST_FREQUENTLY_USED, block_id=111, idle_steps=11, needed_by=1),
         ("Block 111 was evicted because request 1 needed a block and none was free.",
          "It had been used least often (unused for 11 steps). Its text is no longer cached.")),
        (event(EventKind.EVICTED, Cause.SUPERSEDED, block_id=111, idle_steps=0),
         ("Block 111 was evicted because a fuller block holds its tokens too.", "Its text is no longer cached.")),
        (event(EventKind.COPIED, Cause.CACHED_WRITE, source=52, tokens=2, bytes=737280, reader=-1),
         ("6a copied block 52 to block 95 before writing, because its text stays cached.",
          "Copy-on-write: 2 tokens, one block of 720 KiB.")),
        (event(EventKind.PREEMPTED, Cause.NO_FREE_BLOCK, request_id=10, released_blocks=15, recompute_tokens=231, needed_by=11, needed_by_child=2),
         ("Request 10 was preempted because 11c needed a block and none was free or evictable.",
          "15 blocks were released; 231 tokens will be recomputed later.")),
        (event(EventKind.PREEMPTED, Cause.NO_FREE_BLOCK, child=1, released_blocks=2, recompute_tokens=44, needed_by=6),
         ("6b was preempted because 6a needed a block and none was free or evictable.",
          "2 blocks were released; 44 tokens will be recomputed later.")),
        (event(EventKind.PREEMPTED, Cause.NO_FREE_BLOCK, child=1, released_blocks=1, recompute_tokens=44, needed_by=6, needed_by_child=1),
         ("6b was preempted because it needed a block and none was free or evictable.",
          "1 block was released; 44 tokens will be recomputed later.")),
        (event(EventKind.PREEMPTED, Cause.NO_FREE_BLOCK, request_id=10, released_blocks=3, recompute_tokens=0, swapped_tokens=44, needed_by=6),
         ("Request 10 was preempted because 6a needed a block and none was free or evictable.",
          "3 blocks were released; the KV of 44 tokens waits in host memory.")),
        (event(EventKind.SWAPPED_OUT, Cause.NO_FREE_BLOCK, request_id=10, blocks=3, bytes=2211840, samples=1, used_host_blocks=5),
         ("3 blocks were moved to host memory because request 10 lost its place.",
          "2.11 MiB, nothing to recompute; host memory holds 5 blocks now.")),
        (event(EventKind.SWAPPED_OUT, Cause.NO_FREE_BLOCK, blocks=1, bytes=737280, samples=3, used_host_blocks=1),
         ("1 block was moved to host memory because 3 samples of request 6 lost their place.",
          "720 KiB, nothing to recompute; host memory holds 1 block now.")),
        (event(EventKind.SWAPPED_IN, Cause.CAPACITY, request_id=10, blocks=3, bytes=2211840, samples=1, used_host_blocks=0),
         ("3 blocks were moved back from host memory because there was room for request 10.",
          "2.11 MiB; host memory holds 0 blocks now.")),
        (event(EventKind.RESUMED, Cause.CAPACITY, request_id=10, cached_tokens=0, recompute_tokens=0, total_tokens=45, swapped_tokens=44),
         ("Request 10 resumed because enough blocks had become available.",
          "The KV of 44 tokens came back from host memory.")),
        (event(EventKind.BLOCKED, Cause.BEHIND, child=2, behind=6),
         ("6c is waiting behind another sample of its request.", "Requests are admitted in order of arrival.")),
        (event(EventKind.ADMITTED, Cause.CAPACITY, request_id=2, prompt_tokens=9, waited_steps=1),
         ("Request 2 was admitted because there was room for it.", "All 9 prompt tokens must be computed.")),
        (event(EventKind.RESUMED, Cause.CAPACITY, request_id=13, cached_tokens=272, recompute_tokens=23, total_tokens=295),
         ("Request 13 resumed because enough blocks had become available.",
          "272 of 295 tokens were still cached; 23 are recomputed.")),
        (event(EventKind.BLOCKED, Cause.BEHIND, request_id=15, behind=10, needed=7, available=1, reserved=10),
         ("Request 15 is waiting behind request 10, which needs 7 blocks.",
          "1 is available and 10 are kept in reserve.")),
        (event(EventKind.FINISHED, Cause.LENGTH, request_id=1, output_tokens=160, limit=160, cached_blocks=10, freed_blocks=1),
         ("Request 1 finished: it reached max_tokens (160).",
          "10 blocks stay cached; 1 block was freed.")),
        (event(EventKind.REFUSED, Cause.POOL_TOO_SMALL, request_id=4, needed=90, available=63),
         ("Request 4 was refused because it needs 90 blocks and the pool holds 63.", "Other requests go on.")),
    ],
    ids=lambda value: value.kind.value if isinstance(value, Event) else "",
)  # fmt: skip
def test_wording(said, expected):
    assert (
        sentence(said, context(6, 11, prompts={8: "Meeting notes, platform team".replace(", platform team", "")}))
        == expected
    )


def test_evictions_of_one_step_merge_into_one_line():
    events = [
        event(EventKind.EVICTED, Cause.LEAST_RECENTLY_USED, block_id=block, needed_by=11, needed_by_child=child, idle_steps=idle)
        for block, child, idle in ((92, 0, 6), (95, 1, 7), (125, 2, 6))
    ]  # fmt: skip
    (line,) = lines(events, context(11))
    assert (
        line.headline
        == "3 blocks (92, 95 and 125) were evicted because 11a, 11b and 11c needed room and none was free."
    )
    assert line.consequence == "They had been unused for longest (6 to 7 steps)."
    assert len(line.events) == 3


def test_many_evictions_stay_short():
    events = [event(EventKind.EVICTED, block_id=b, needed_by=b, idle_steps=3) for b in range(40)]
    (line,) = lines(events)
    assert line.headline == "40 blocks were evicted because 40 sequences needed room and none was free."
    assert line.consequence == "They had been unused for 3 steps; the first was block 0."


def test_the_story_is_the_most_important_event_of_a_step():
    events = [
        event(EventKind.EVICTED, Cause.LEAST_RECENTLY_USED, block_id=7, needed_by=2),
        event(EventKind.EVICTED, Cause.LEAST_RECENTLY_USED, block_id=8, needed_by=2),
        event(EventKind.ALLOCATED, Cause.DECODE),
        event(EventKind.PREEMPTED, Cause.NO_FREE_BLOCK, request_id=10, needed_by=2),
        event(EventKind.STEP, **NUMBERS),
    ]
    told = story(events)
    assert told.kind is EventKind.PREEMPTED and told.headline.startswith("Request 10 was preempted")
    assert told.others == 1  # the two evictions are one line; taken blocks and the step itself are not told


def test_a_quiet_step_is_told_by_its_numbers_and_nothing_by_none():
    assert story([event(EventKind.STEP, **NUMBERS)]).headline == "Step 93 computed 64 tokens for 13 sequences."
    assert story([]) is None


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.0042, "4.2 ms"),
        (0.859, "859 ms"),
        (0.9996, "1.00 s"),
        (2.4313, "2.43 s"),
        (14.72, "14.7 s"),
        (59.97, "1 min 0 s"),
        (125.2, "2 min 5 s"),
    ],
)
def test_a_step_tells_its_time_as_people_read_it(seconds, words):
    told = story([event(EventKind.STEP, **{**NUMBERS, "seconds": seconds})])
    assert told.consequence.endswith(f", in {words}.")


def test_an_admission_is_told_only_where_the_cache_did_not_tell_it():
    admitted = event(EventKind.ADMITTED, Cause.CAPACITY, request_id=2, prompt_tokens=8)
    hit = event(EventKind.CACHE_HIT, Cause.PREFIX_MATCH, request_id=2, blocks=1)
    assert [line.kind for line in lines([admitted])] == [EventKind.ADMITTED]
    assert [line.kind for line in lines([admitted, hit])] == [EventKind.CACHE_HIT]


def test_a_sample_is_called_by_its_letter_once_the_request_has_split():
    done = event(EventKind.FINISHED, Cause.EOS, request_id=3, child=0, output_tokens=4)
    assert sentence(done, context()).headline.startswith("Request 3 finished")
    assert sentence(done, context(3)).headline.startswith("3a finished")


def test_a_whole_run_is_told_in_short_sentences():
    engine, known = FakeEngine(), Context()
    for _ in range(290):
        engine.step()
        known.learn(snapshot=engine.snapshot())
    events = all_events()
    known.learn(events)
    told = lines(events, known)
    assert {line.kind for line in told} >= {EventKind.COPIED, EventKind.PREEMPTED, EventKind.EVICTED, EventKind.FORKED}
    for line, text in itertools.chain.from_iterable(((line, line.headline), (line, line.consequence)) for line in told):
        assert len(text.split()) <= 20 and text.endswith("."), line


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (2430.4, "2,430"),
        (999.6, "1,000"),
        (859, "859"),
        (24.31, "24.3"),
        (2.4313, "2.43"),
        (90, "90"),
        (0.000123, "0.000123"),
        (0, "0"),
    ],
)
def test_a_number_has_three_digits_that_count_and_no_exponent(value, words):
    assert amount(value) == words


@pytest.mark.parametrize(
    ("num_bytes", "words"),
    [(128, "128 B"), (737280, "720 KiB"), (2211840, "2.11 MiB"), (90 << 20, "90 MiB"), (1_503_238_553, "1.4 GiB")],
)
def test_a_size_is_in_the_unit_that_people_read(num_bytes, words):
    assert size(num_bytes) == words
