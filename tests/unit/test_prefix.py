"""The index of full blocks by content."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvlab.kv.prefix import Prefix, PrefixIndex, chained_hash


def publish(index: PrefixIndex, tokens: Sequence[int], blocks: Sequence[int], salt: object = None) -> list[Prefix]:
    """Index these blocks as those of a sequence, from its start; stops where the index takes no more."""
    size, nodes = index.block_size, []
    node: Prefix | None = index.root(salt)
    for entry, block in enumerate(blocks):
        assert node is not None
        node = index.extend(node, *index.split(tokens[entry * size : (entry + 1) * size]))
        if node is None:
            break
        node.block = block
        nodes.append(node)
    return nodes


def drop(index: PrefixIndex, block: int) -> None:
    """A block has lost its content."""
    node = next(node for node in index.nodes() if node.block == block)
    node.block = None
    index.prune(node)


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

    def test_reads_and_changes_nothing(self) -> None:
        index = PrefixIndex(2)
        assert index.match([1, 2], "nobody") == []
        assert (index._roots, index._nodes) == ({}, {})


class TestSalt:
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
    """A hash function that always says the same: at most fewer hits, never those of another prompt."""

    def test_nothing_is_mixed(self) -> None:
        index = PrefixIndex(2, lambda parent, tokens: 0)
        publish(index, [1, 2, 3, 4], [5, 6])
        publish(index, [8, 9], [7])
        publish(index, [1, 2], [4], "salt")
        assert index.match([1, 2, 3, 4]) == [5]
        for tokens, salt in (([8, 9], None), ([3, 4], None), ([1, 2], "salt"), ([1, 2, 1, 2], "salt")):
            assert index.match(tokens, salt) == []
        assert index.match([1, 2, 1, 2]) == [5]
        assert len(index._roots) == 1  # no root for a salt whose content was not indexed

    def test_the_place_is_free_again_once_its_content_is_gone(self) -> None:
        index = PrefixIndex(2, lambda parent, tokens: 0)
        publish(index, [1, 2], [5])
        assert index.extend(index.root(), *index.split([8, 9])) is None
        drop(index, 5)
        publish(index, [8, 9], [5])
        assert (index.match([8, 9]), index.match([1, 2])) == ([5], [])

    def test_equal_tokens_behind_parents_whose_keys_collide(self) -> None:
        index = PrefixIndex(1, lambda parent, tokens: chained_hash(0, tokens))  # blind to the prefix
        publish(index, [1, 9], [0, 1])
        publish(index, [2, 9], [2, 3])
        assert index.match([1, 9]) == [0, 1]
        assert index.match([2, 9]) == [2]
        assert index.match([9]) == []


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
        assert (index._nodes, index._roots) == ({}, {})

    def test_a_long_prompt_is_found_whole(self) -> None:
        """Tokens are packed some blocks at a time."""
        index, tokens = PrefixIndex(2), list(range(301))
        publish(index, tokens, range(150))
        assert index.match(tokens) == list(range(150))
