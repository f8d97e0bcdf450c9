"""The index of full blocks by content."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvlab.kv.prefix import Prefix, PrefixIndex
from tests.support.pools import collide


def publish(index: PrefixIndex, tokens: Sequence[int], blocks: Sequence[int], salt: object = None) -> list[Prefix]:
    """Index these blocks as those of a sequence, from its start."""
    return index.extend(index.root(salt), tokens[: len(blocks) * index.block_size], blocks, {})


def drop(index: PrefixIndex, block: int) -> None:
    """A block has lost its content."""
    node = next(node for node in index.nodes() if node.block == block)
    node.block = None
    index.prune([node])


class TestMatch:
    def test_finds_whole_blocks_of_the_longest_prefix_in_order(self) -> None:
        index = PrefixIndex(2)
        publish(index, [1, 2, 3, 4, 5, 6], [7, 3, 9])
        assert index.match([1, 2, 3, 4, 5, 6]) == [7, 3, 9]
        assert index.match([1, 2, 3, 4, 5]) == [7, 3]
        assert index.match([1, 2, 3, 4, 0, 0, 5, 6]) == [7, 3]
        assert index.match([1]) == index.match([]) == []

    def test_stops_at_the_first_miss(self) -> None:
        index = PrefixIndex(2)
        publish(index, [1, 2, 3, 4, 5, 6], [7, 3, 9])
        drop(index, 3)
        assert index.match([1, 2, 3, 4, 5, 6]) == [7]

    def test_the_same_block_behind_another_prefix_is_another(self) -> None:
        index = PrefixIndex(2)
        publish(index, [1, 2, 5, 6], [0, 1])
        assert index.match([3, 4, 5, 6]) == []
        assert index.match([5, 6]) == []
        publish(index, [3, 4, 5, 6], [2, 3])
        assert index.match([1, 2, 5, 6]) == [0, 1]
        assert index.match([3, 4, 5, 6]) == [2, 3]

    def test_the_same_prompt_again_is_looked_up_anew_where_something_changed(self) -> None:
        index, asked = PrefixIndex(2), [1, 2, 3, 4, 5, 6]
        publish(index, asked, [7, 3])
        assert index.match(asked) == index.match(asked) == [7, 3]
        assert index.match(asked, "another") == []
        publish(index, asked, [7, 3, 9])
        assert index.match(asked) == [7, 3, 9]
        drop(index, 3)
        assert index.match(asked) == [7]
        drop(index, 7)
        publish(index, asked, [8, 2])
        assert index.match(asked) == [8, 2, 9]

    def test_reads_and_changes_nothing(self) -> None:
        index = PrefixIndex(2)
        assert index.match([1, 2], "nobody") == []
        assert index._roots == {}


class TestSalt:
    def test_a_long_one_is_kept_as_a_digest(self) -> None:
        index, salts = PrefixIndex(2), ["a" * 10**6, "a" * 10**6 + "b", 10**4000]
        for block, salt in enumerate(salts):
            publish(index, [1, 2], [block], salt)
        assert [index.match([1, 2], salt) for salt in salts] == [[0], [1], [2]]
        assert all(len(root) < 64 for root in index._roots)

    def test_separates_equal_prompts(self) -> None:
        index = PrefixIndex(2)
        for block, salt in enumerate((None, "a", 1, "1")):
            publish(index, [1, 2], [block], salt)
        assert [index.match([1, 2], salt) for salt in (None, "a", 1, "1", "b", "None", 0)] == [
            [0],
            [1],
            [2],
            [3],
            [],
            [],
            [],
        ]


class TestCollidingHashes:
    """A hash function that always gives the same number mixes no prompts up."""

    def test_nothing_is_mixed(self) -> None:
        index = PrefixIndex(2)
        collide(index, lambda tokens: 0)
        publish(index, [1, 2, 3, 4], [5, 6])
        publish(index, [8, 9], [7])
        publish(index, [1, 2], [4], "salt")
        assert [index.match(tokens) for tokens in ([1, 2, 3, 4], [8, 9], [3, 4])] == [[5, 6], [7], []]
        assert [index.match(tokens, "salt") for tokens in ([1, 2], [8, 9], [1, 2, 1, 2])] == [[4], [], [4]]
        assert index.match([1, 2, 1, 2]) == [5]

    def test_equal_tokens_behind_prefixes_that_the_hash_does_not_tell_apart(self) -> None:
        index = PrefixIndex(1)
        publish(index, [1, 9], [0, 1])
        publish(index, [2, 9], [2, 3])
        assert [index.match(tokens) for tokens in ([1, 9], [2, 9], [9])] == [[0, 1], [2, 3], []]


class TestRoots:
    def test_a_root_goes_with_its_last_node(self) -> None:
        index = PrefixIndex(1)
        publish(index, [1], [0], "a")
        drop(index, 0)
        assert index._roots == {}
        publish(index, [1], [1], "b")
        assert (index.match([1], "a"), index.match([1], "b")) == ([], [1])


class TestEvictedParents:
    def test_a_child_is_found_again_once_its_parent_is_published_anew(self) -> None:
        index = PrefixIndex(2)
        publish(index, [1, 2, 3, 4, 5, 6], [0, 1, 2])
        drop(index, 0)
        drop(index, 1)
        assert index.match([1, 2, 3, 4, 5, 6]) == []
        publish(index, [1, 2], [7])
        assert index.match([1, 2, 3, 4, 5, 6]) == [7]
        publish(index, [1, 2, 3, 4], [7, 8])
        assert index.match([1, 2, 3, 4, 5, 6]) == [7, 8, 2]

    @pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2], [2, 0, 3, 1]])
    def test_no_node_stays_behind(self, order: list[int]) -> None:
        index = PrefixIndex(2)
        publish(index, [1, 2, 3, 4, 5, 6], [0, 1, 2])
        publish(index, [1, 2, 9, 9], [0, 3])
        for left, block in enumerate(order, start=1):
            drop(index, block)
            assert sum(node.block is not None for node in index.nodes()) == 4 - left
        assert index._roots == {}
