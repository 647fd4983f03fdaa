"""The prefix index alone: what is found, what is not, and why not."""

from array import array

import pytest
from kvscope.engine.events import Cause
from kvscope.engine.kvcache import prefix_hash
from kvscope.engine.kvcache.prefix_hash import PrefixIndex, hash_root
from kvscope.engine.models.base import KVGroup


class Library:
    """An index of blocks of 2 tokens, and a short hand for lookups."""

    def __init__(self, windows: tuple[int, ...] = (0,), **options):
        groups = tuple(KVGroup((g,), 1, 1, window, 2) for g, window in enumerate(windows))
        self.index = PrefixIndex(before=array("i", bytes(4 * 64)), groups=groups, **options)

    def publish(self, tokens, blocks, *, salt=None, request=1):
        """Publish a text block by block; `blocks` holds one id (or one a group) per block."""
        text = self.text(tokens, salt)
        tables = list(zip(*(block if isinstance(block, tuple) else (block,) for block in blocks), strict=True))
        for published in self.index.publish(text, 2 * len(blocks), tables, request).published:
            self.index.before[published.block] = published.before
        self.index.check_integrity()
        return text.nodes[-1]

    def text(self, tokens, salt=None):
        self.kept = self.index.begin(() if salt is None else (("salt", salt),), array("q", tokens))
        return self.kept

    def look_up(self, tokens, *, salt=None):
        """(blocks found, why no more)"""
        text, limit = self.text(tokens, salt), len(tokens) - 1
        hit = self.index.match(text, limit)
        return list(hit.tables[0]) if hit.tables else [], self.index.explain(text, hit, limit)


def test_a_hit_covers_whole_blocks_and_leaves_one_token():
    library = Library()
    library.publish([1, 2, 3, 4, 5, 6], [11, 12, 13])
    assert library.look_up([1, 2, 3, 4, 5, 6, 7]) == ([11, 12, 13], None)
    blocks, miss = library.look_up([1, 2, 3, 4, 5, 6])
    assert blocks == [11, 12] and miss.cause is Cause.FULL_BLOCKS_ONLY


def test_a_prompt_shorter_than_a_block_has_nothing_to_look_up():
    assert Library().look_up([1]) == ([], (Cause.FULL_BLOCKS_ONLY, -1, -1))


def test_a_text_nobody_asked_for():
    library = Library()
    library.publish([1, 2, 3, 4], [11, 12])
    assert library.look_up([8, 9, 3, 4, 5]) == ([], (Cause.NEVER_SEEN, -1, -1))
    assert library.look_up([1, 2, 3, 4, 5, 6, 7]) == ([11, 12], (Cause.NEVER_SEEN, -1, -1))


def test_a_text_that_differs_says_from_which_token_on():
    library = Library()
    library.publish([1, 2, 3, 4, 5, 6], [11, 12, 13])
    assert library.look_up([1, 2, 3, 9, 5, 6, 7]) == ([11], (Cause.FIRST_DIFFERENCE, -1, 3))
    assert library.look_up([1, 2, 9, 4, 5, 6, 7]) == ([11], (Cause.FIRST_DIFFERENCE, -1, 2))
    assert library.look_up([1, 9, 3, 4, 5, 6, 7]) == ([], (Cause.FIRST_DIFFERENCE, -1, 1))


def test_a_text_that_was_evicted_says_when():
    library = Library()
    library.publish([1, 2, 3, 4], [11, 12])
    library.index.forget(12, step=185)
    assert library.look_up([1, 2, 3, 4, 5]) == ([11], (Cause.EVICTED, 185, -1))
    library.publish([1, 2, 3, 4], [21, 22], request=2)
    assert library.look_up([1, 2, 3, 4, 5]) == ([21, 22], None), "published again, it is found again, in one table"


def test_another_salt_shares_nothing_and_the_same_salt_does():
    library = Library()
    keep = library.publish([1, 2, 3, 4], [11, 12], salt="a")
    assert library.look_up([1, 2, 3, 4, 5], salt="a") == ([11, 12], None)
    assert library.look_up([1, 2, 3, 4, 5], salt="b") == ([], (Cause.SALT_DIFFERS, -1, -1))
    assert library.look_up([1, 2, 3, 4, 5]) == ([], (Cause.SALT_DIFFERS, -1, -1))
    assert keep.is_cached


def test_kinds_of_extra_keys_cannot_pass_for_each_other():
    keys = [(("salt", "x"),), (("adapter", "x"),), (("salt", "xadapter"),), (("salt", "x"), ("adapter", "")), ()]
    assert len({hash_root(key) for key in keys}) == len(keys)


def test_any_string_serves_as_a_salt():
    keys = [(("salt", salt),) for salt in ("a", "\ud800", "\udc80", "\x00")]
    assert len({hash_root(key) for key in keys}) == len(keys)


def test_equal_text_is_one_node_however_many_blocks_hold_it():
    library = Library()
    first = library.publish([1, 2], [11])
    assert library.publish([1, 2], [12], request=2) is first and first.computed_for == 1
    library.index.forget(11, step=3)
    assert library.look_up([1, 2, 3]) == ([12], None), "one of its blocks is enough"


@pytest.fixture
def constant_hash(monkeypatch):
    monkeypatch.setattr(prefix_hash, "hash_block", lambda parent_key, tokens: b"same")


def test_a_colliding_hash_is_a_miss(constant_hash):
    library = Library()
    library.publish([1, 2, 3, 4], [11, 12])
    assert library.look_up([3, 4, 1, 2, 9])[0] == []
    assert library.look_up([1, 2, 1, 2, 9])[0] == [11]
    library.publish([3, 4, 3, 4], [21, 22])
    assert library.look_up([3, 4, 3, 4, 9])[0] == [21, 22]
    assert library.look_up([1, 2, 3, 4, 9])[0] == [11, 12], "the same tokens below another parent are another text"


def test_a_text_counts_as_cached_when_every_group_holds_it():
    library = Library(windows=(0, 0))
    library.publish([1, 2, 3, 4], [(11, 21), (12, 22)])
    assert library.look_up([1, 2, 3, 4, 5])[0] == [11, 12]
    library.index.forget(22, step=9)
    assert library.look_up([1, 2, 3, 4, 5]) == ([11], (Cause.EVICTED, 9, -1))
    library.index.check_integrity()


def test_tombstones_are_bounded_and_the_oldest_is_dropped():
    library = Library(max_tombstones=2)
    for i in range(4):
        library.publish([i, i], [i + 1])
    for i in range(4):
        library.index.forget(i + 1, step=10 + i)
        library.index.check_integrity()
    assert library.look_up([0, 0, 9])[1].cause is Cause.NEVER_SEEN
    assert library.look_up([3, 3, 9])[1] == (Cause.EVICTED, 13, -1)
    assert len(library.index._buckets) == 2 and len(library.kept.root.children) == 2


def test_a_root_that_nothing_holds_is_forgotten():
    library = Library()
    library.look_up([1, 2, 3], salt="once")
    library.text([1])
    assert len(library.index._roots) == 1


def test_the_audit_finds_a_spoiled_index():
    library = Library()
    library.publish([1, 2], [11])
    library.index._node_of[12] = library.index.node_of(11)
    with pytest.raises(RuntimeError, match="block 12 and the index disagree"):
        library.index.check_integrity()
