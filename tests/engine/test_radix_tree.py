"""The radix tree alone, with blocks of 4 tokens: what is found, in which blocks, and why no more."""

from array import array

import pytest
from kvscope.engine.events import Cause
from kvscope.engine.kvcache.prefix_cache import Hit
from kvscope.engine.kvcache.radix_tree import RadixTree
from kvscope.engine.models.base import KVGroup


class Library:
    """A tree, and a short hand: a text is a string, a letter a token."""

    def __init__(self, windows: tuple[int, ...] = (0,), **options):
        groups = tuple(KVGroup((g,), 1, 1, window, 4) for g, window in enumerate(windows))
        self.tree = RadixTree(before=array("i", bytes(4 * 64)), groups=groups, **options)

    def text(self, letters: str, salt: str | None = None):
        return self.tree.begin(() if salt is None else (("salt", salt),), array("q", map(ord, letters)))

    def publish(self, letters: str, *tables, salt=None, request=1, recorded=0):
        """Publish a text whose blocks are `tables`, one list a group, the first `recorded` of which are on record."""
        self.kept = self.text(letters, salt)
        self.kept.num_blocks = recorded
        change = self.tree.publish(self.kept, len(letters), tables, request)
        for published in change.published:
            self.tree.before[published.block] = published.before
        self.tree.check_integrity()
        return [p.block for p in change.published], change.superseded

    def look_up(self, letters: str, salt=None):
        """(tokens found, their blocks, why no more)"""
        text, most = self.text(letters, salt), len(letters) - 1
        hit = self.tree.match(text, most)
        return hit.num_tokens, *hit.tables, self.tree.explain(text, hit, most)

    def forget(self, *blocks, step=7):
        for block in blocks:
            self.tree.forget(block, step)
            self.tree.check_integrity()

    def edges(self) -> list[str]:
        """The edges that lead to blocks, each with its blocks: "abcd[1]"."""
        nodes = [n for n in self.tree.nodes() if n.parent and not n.is_lost]
        letters = ["".join(map(chr, array("q", n.tokens))) for n in nodes]
        return sorted(f"{text}{n.blocks[0]}" for text, n in zip(letters, nodes, strict=True))


@pytest.fixture
def library():
    return Library()


def test_a_hit_ends_at_any_token_and_leaves_one(library):
    library.publish("abcdefgh", [1, 2])
    assert library.look_up("abcdefgh") == (7, [1, 2], None), "the last token is computed again, in a copy of block 2"
    assert library.look_up("abcdefx") == (6, [1, 2], None), "all but the last token were found"
    assert library.look_up("abcdefxyz") == (6, [1, 2], (Cause.FIRST_DIFFERENCE, -1, 6))
    assert library.look_up("abcdefghi") == (8, [1, 2], None)
    assert library.look_up("abcdefghij") == (8, [1, 2], (Cause.NEVER_SEEN, -1, -1)), "nobody went on from there"
    assert library.look_up("abx") == (2, [1], None)
    assert library.look_up("xbc") == (0, (Cause.NEVER_SEEN, -1, -1))
    assert library.tree.match(library.text("a"), 0) == Hit(), "a single token is computed, whatever is cached"


def test_texts_part_inside_a_block_and_each_branch_has_whole_tables(library):
    library.publish("abcdefghij", [1, 2, 3])
    assert library.publish("abcdefxy", [1, 5], recorded=1, request=2) == ([5], [])
    assert library.edges() == ["abcdef[[1], []]", "ghij[[2], [3]]", "xy[[5]]"]
    assert library.look_up("abcdefxyz") == (8, [1, 5], None)
    assert library.look_up("abcdefghijk") == (10, [1, 2, 3], None)
    assert library.look_up("abcdef!") == (6, [1, 2], None), "where both hold the tokens the first child's block is read"
    assert library.look_up("abcdef!!") == (6, [1, 2], (Cause.FIRST_DIFFERENCE, -1, 6))


def test_a_node_splits_at_every_offset_of_a_block():
    for at in range(1, 8):
        library, text = Library(), "abcdefgh"
        library.publish(text, [1, 2])
        other = text[:at] + "zzzzzzzz"[: 8 - at]
        mine = [1, 5] if at >= 4 else [4, 5]
        library.publish(other, mine, recorded=at // 4)
        assert library.look_up(text + "!")[:2] == (8, [1, 2])
        assert library.look_up(other + "!")[:2] == (8, mine)


def test_text_is_lost_from_its_end_and_a_miss_knows_when(library):
    library.publish("abcdefghij", [1, 2, 3])
    library.forget(3, step=5)
    assert library.look_up("abcdefghij") == (8, [1, 2], (Cause.EVICTED, 5, -1))
    library.forget(2, step=9)
    assert library.look_up("abcdefghij") == (4, [1], (Cause.EVICTED, 9, -1))
    assert library.look_up("abcdzz") == (4, [1], (Cause.FIRST_DIFFERENCE, -1, 4))
    library.forget(1, step=11)
    assert library.look_up("abcdefghij") == (0, (Cause.EVICTED, 11, -1)), "nothing is left"


def test_a_branch_that_goes_takes_the_tokens_that_only_its_block_held(library):
    library.publish("abcdefgh", [1, 2])
    library.publish("abcdefxy", [1, 5], recorded=1)
    library.forget(2)
    assert library.look_up("abcdef!") == (6, [1, 5], None), "block 5 still begins with them"
    library.forget(5, step=8)
    assert library.edges() == ["abcd[[1]]"]
    assert library.look_up("abcdef!") == (4, [1], (Cause.EVICTED, 8, -1))


def test_lost_text_is_found_again_when_someone_publishes_it_again(library):
    library.publish("abcdefgh", [1, 2])
    library.forget(2, 1)
    library.publish("abcdef", [3, 4], request=2)
    assert library.look_up("abcdefgh") == (6, [3, 4], (Cause.EVICTED, 7, -1)), (
        "of the rest it is still known that it was lost"
    )
    library.publish("abcdefghijkl", [3, 5, 6], recorded=1, request=2)
    assert library.look_up("abcdefghijklm") == (12, [3, 5, 6], None)


def test_text_that_was_lost_block_by_block_comes_back_as_one_edge(library):
    library.publish("abcdefghijkl", [1, 2, 3])
    library.forget(3, 2)
    library.publish("abcdefghijkl", [1, 4, 5], recorded=1)
    assert library.edges() == ["abcdefghijkl[[1], [4], [5]]"]
    library.forget(5, 4)
    library.publish("abcdefghijxx", [1, 4, 5], recorded=1, request=2)
    assert library.edges() == ["abcd[[1]]", "efghij[[4], []]", "xx[[5]]"], "another's computation, and another end"


def test_a_partly_filled_end_is_superseded_by_a_fuller_block(library):
    assert library.publish("abcdef", [1, 2]) == ([1, 2], [])
    assert library.publish("abcdefgh", [1, 3], recorded=1, request=2) == ([3], [2])
    assert library.look_up("abcdefg") == (6, [1, 3], None)
    assert library.publish("abcdefghi", [1, 3, 4], recorded=2, request=2) == ([4], [])
    assert library.publish("abcdefghij", [1, 3, 5], recorded=2, request=2) == ([5], [4]), (
        "also in the node of the same request"
    )
    assert library.publish("abcdefghi", [1, 3, 6], recorded=2, request=2) == ([], []), "block 5 holds all of it"


def test_equal_text_in_two_blocks_is_found_in_one_table(library):
    library.publish("abcdefgh", [1, 2])
    library.publish("abcdefgh", [3, 4], request=2)
    assert library.look_up("abcdefgh!")[1] == [1, 2]
    assert library.tree.twin(4) == 2 and library.tree.twin(2) == 4
    library.forget(2)
    assert library.look_up("abcdefgh!")[1] == [3, 4], "block 4 was published after block 3, and is read after it"
    assert library.tree.twin(4) == 0 and library.tree.twin(3) == 1
    library.forget(1)
    assert library.look_up("abcdefgh!")[:2] == (8, [3, 4])


def test_a_request_that_goes_on_extends_its_own_edge(library):
    library.publish("abcd", [1])
    library.publish("abcdefgh", [1, 2], recorded=1)
    assert library.edges() == ["abcdefgh[[1], [2]]"]
    library.publish("abcdefghijkl", [1, 2, 3], recorded=2, request=2)
    assert library.edges() == ["abcdefgh[[1], [2]]", "ijkl[[3]]"], "another's computation has an edge of its own"
    assert library.tree.match(library.text("abcdefghijklm"), 12).computed_for == 1, "of most tokens"


def test_salts_share_nothing_and_a_miss_knows_it(library):
    library.publish("abcdefgh", [1, 2], salt="x")
    kept = library.kept
    assert library.look_up("abcdefgh", salt="x")[0] == 7
    for other in ("y", None):
        assert library.look_up("abcdefgh", salt=other) == (0, (Cause.SALT_DIFFERS, -1, -1))
        assert library.look_up("abc!!", salt=other)[-1].cause is Cause.NEVER_SEEN, "three equal tokens prove nothing"
    library.publish("abzz", [3], salt="y")
    assert library.look_up("abcdefgh", salt="y") == (2, [3], (Cause.SALT_DIFFERS, -1, -1))
    assert kept.root.children


def test_kinds_of_extra_keys_have_trees_of_their_own():
    tree = Library().tree
    keys = [(("salt", "x"),), (("adapter", "x"),), (("salt", "x"), ("adapter", "")), ()]
    texts = [tree.begin(key, array("q", [1, 2])) for key in keys]
    assert len({id(text.root) for text in texts}) == len(keys)
    assert tree.begin(keys[1], array("q")).root is texts[1].root


def test_a_root_that_nothing_holds_is_forgotten(library):
    library.look_up("abc", salt="once")
    assert not library.tree._roots


def test_tombstones_are_bounded_and_the_oldest_goes_first():
    library = Library(max_tombstones=2)
    for i, letter in enumerate("abcd"):
        library.publish(letter * 4, [i + 1])
    for i in range(4):
        library.forget(i + 1, step=10 + i)
    assert library.look_up("aaaaa")[-1].cause is Cause.NEVER_SEEN
    assert library.look_up("ddddd") == (0, (Cause.EVICTED, 13, -1))


def test_the_bound_holds_while_lost_text_is_published_again():
    library = Library(max_tombstones=1)
    library.publish("abcdefgh", [1, 2])
    library.forget(2, 1)
    library.publish("abxx", [3], request=2)  # parts in the middle of the tombstone, which is the oldest
    assert library.look_up("abxxx")[:2] == (4, [3])
    assert library.look_up("abcdefgh") == (2, [3], (Cause.EVICTED, 7, -1))


def test_a_window_needs_only_what_the_next_token_sees():
    library = Library(windows=(0, 6))
    library.publish("abcdefghijkl", [1, 2, 3], [11, 12, 13])
    assert library.look_up("abcdefghijklm") == (12, [1, 2, 3], [0, 12, 13], None), "token 12 sees tokens 7 to 12"
    library.forget(11)
    assert library.look_up("abcdefghijk") == (10, [1, 2, 3], [0, 12, 13], None)
    assert library.look_up("abcdefgh") == (0, (Cause.EVICTED, 7, -1)), "token 7 would see tokens 2 and 3"
    library.forget(13)
    assert library.look_up("abcdefghijklm")[0] == 0, "and so would every shorter hit"


def test_a_hole_shortens_a_hit_to_the_full_block_before():
    library = Library(windows=(0, 2))
    library.publish("abcdefghijkl", [1, 2, 3], [11, 12, 13])
    library.forget(12)
    assert library.look_up("abcdefghij") == (9, [1, 2, 3], [0, 0, 13], None)
    assert library.look_up("abcdefg") == (4, [1], [11], (Cause.EVICTED, 7, -1))


def test_the_blocks_of_a_text_are_known_by_their_place(library):
    library.publish("abcdefgh", [1, 2])
    library.publish("abcdefgh", [3, 4], request=2)
    assert library.tree.holders(library.kept, 0, 1) == [2, 4] and library.tree.holders(library.kept, 0, 0) == [1, 3]
    assert library.tree.text_of(4) == library.kept.token_ids.tobytes() and library.tree.text_of(9) is None
    assert [library.tree.group_of(block) for block in (1, 4)] == [0, 0]


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda tree, node: tree._node_of.__setitem__(9, node), "block 9 and the tree disagree"),
        (lambda tree, node: node.blocks[0][1].clear(), "no block holds the last token"),
        (lambda tree, node: node.blocks[0].pop(), r"has \[1\] blocks, not 2"),
        (lambda tree, node: setattr(node, "start", 1), "and its children disagree"),
        (lambda tree, node: setattr(tree, "num_published", 3), "2 blocks are published, the counter says 3"),
        (lambda tree, node: tree._tombstones.__setitem__(node, None), r"wrongly \(not\) a tombstone"),
        (lambda tree, node: node.blocks[0][0].append(2), "block 2 is listed"),
    ],
)
def test_the_audit_finds_a_spoiled_tree(library, spoil, complaint):
    library.publish("abcdefgh", [1, 2])
    spoil(library.tree, library.kept.root.children[array("q", [ord("a")]).tobytes()])
    with pytest.raises(RuntimeError, match=complaint):
        library.tree.check_integrity()
