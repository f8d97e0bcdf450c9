"""Which cached block is given up first."""

from __future__ import annotations

import re
from typing import Any

import pytest

from kvlab.errors import ConfigError
from kvlab.kv.allocator import BlockAllocator
from kvlab.kv.eviction import EVICTION_POLICIES, LruEviction, RankedEviction
from tests.support.pools import content, fill


def full(policy: str, count: int = 4) -> tuple[BlockAllocator, list[int], list[int]]:
    """An allocator of `count` blocks, all in use, filled in order; and a list of those that lost their content."""
    dropped: list[int] = []
    allocator = BlockAllocator(
        count, EVICTION_POLICIES.get(policy)(), lambda nodes: dropped.extend(int(node.tokens) for node in nodes)
    )
    blocks = allocator.allocate(count)
    for block in blocks:
        fill(allocator, block, content(block))
    return allocator, blocks, dropped


def hit(allocator: BlockAllocator, block: int) -> None:
    allocator.share([block])
    allocator.touch([block])
    allocator.free([block])


class TestOrder:
    def test_fifo_gives_up_what_was_filled_first(self) -> None:
        allocator, (a, b, c, d), evicted = full("fifo")
        for block in (c, a, d, b):
            allocator.free([block])
        hit(allocator, a)
        assert allocator.allocate(4) == evicted == [a, b, c, d]

    def test_lfu_gives_up_what_was_hit_least_the_oldest_among_equals(self) -> None:
        allocator, (a, b, c, d), evicted = full("lfu")
        for block in (c, a, d, b):
            allocator.free([block])
        for block, times in ((a, 2), (b, 1), (d, 1)):
            for _ in range(times):
                hit(allocator, block)
        assert allocator.allocate(4) == evicted == [c, d, b, a]

    def test_fifo_counts_from_the_new_content(self) -> None:
        allocator, (a, b, c, _), _ = full("fifo")
        allocator.free([a])
        assert allocator.allocate(1) == [a]
        fill(allocator, a, content(9))
        allocator.free([a, b, c])
        assert allocator.allocate(3) == [b, c, a]


@pytest.mark.parametrize("policy", EVICTION_POLICIES.names())
class TestEveryPolicy:
    def test_scratch_blocks_go_before_cached_ones(self, policy: str) -> None:
        allocator, (a, b, c, d), evicted = full(policy)
        for block in (b, d):
            allocator.clear_content(block)
        evicted.clear()
        allocator.free([a, b, c, d])
        assert (allocator.num_free(), allocator.num_evictable()) == (4, 2)
        assert allocator.allocate(2) == [b, d]
        assert (evicted, allocator.evictions, allocator.evicted_blocks) == ([], 0, 0)
        assert sorted(allocator.allocate(2)) == sorted([a, c])
        assert (sorted(evicted), allocator.evictions, allocator.evicted_blocks) == (sorted([a, c]), 1, 2)

    def test_a_referenced_block_is_never_given_up(self, policy: str) -> None:
        allocator, (a, b, c, d), evicted = full(policy)
        allocator.free([a, b, c, d])
        allocator.share([a, c])
        assert sorted(allocator.allocate(2)) == sorted([b, d])
        assert not allocator.can_allocate(1)
        assert sorted(evicted) == sorted([b, d])
        assert allocator.content(a) is not None
        assert allocator.content(b) is None

    def test_content_that_is_cleared_is_scratch(self, policy: str) -> None:
        allocator, (a, b, _, _), evicted = full(policy)
        allocator.free([a, b])
        allocator.clear_content(b)
        assert (allocator.num_evictable(), evicted) == (1, [b])
        assert allocator.allocate(2) == [b, a]
        assert evicted == [b, a]
        assert allocator.evicted_blocks == 1

    def test_a_block_reused_and_released_many_times_is_in_the_queue_once(self, policy: str) -> None:
        """The heap of a ranked policy is full of outdated entries then."""
        allocator, blocks, _ = full(policy, 6)
        allocator.free(blocks)
        for turn in range(500):
            allocator.share([blocks[turn % 5]])
            assert allocator.num_evictable() == 5
            allocator.free([blocks[turn % 5]])
        assert allocator.num_evictable() == 6
        assert sorted(allocator.allocate(6)) == sorted(blocks)
        assert allocator.num_evictable() == 0

    def test_the_queue_does_not_grow_with_use(self, policy: str) -> None:
        allocator, blocks, _ = full(policy, 4)
        allocator.free(blocks)
        for turn in range(2000):
            hit(allocator, blocks[turn % 4])
        assert sum(map(len, getattr(allocator.eviction, "_heaps", []))) <= 64 + 4 * 4 + 1
        assert len(getattr(allocator.eviction, "_order", [])) <= 64 + 4 * 4 + 1

    def test_nothing_is_kept_of_a_block_whose_content_is_gone(self, policy: str) -> None:
        allocator, blocks, _ = full(policy)
        allocator.free(blocks)
        hit(allocator, blocks[0])
        allocator.allocate(4)
        kept = allocator.eviction
        assert len(kept) == 0
        if isinstance(kept, RankedEviction):
            assert kept._births == kept._parents == kept._children == kept.hits == kept.notes == {}


@pytest.mark.parametrize("policy", EVICTION_POLICIES.names())
class TestChildrenBeforeParents:
    def test_a_parent_whose_child_is_used_again_may_go(self, policy: str) -> None:
        parent = content(0)
        child = content(1, parent)
        allocator = BlockAllocator(2, EVICTION_POLICIES.get(policy)())
        for block, node in zip(allocator.allocate(2), (parent, child), strict=True):
            fill(allocator, block, node)
        allocator.free([1, 0])
        allocator.share([1])
        assert allocator.allocate(1) == [0]


@pytest.mark.parametrize("victims", [[None], [0], [3, 3], [], None])  # of 4 blocks 2 and 3 are in no use
def test_a_victim_that_may_not_be_evicted_is_refused(victims: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(LruEviction):
        def victims(self, count: int) -> list[int]:
            return victims

    monkeypatch.setitem(EVICTION_POLICIES._entries, "wrong", Wrong)
    allocator, blocks, _ = full("wrong")
    allocator.free(blocks[2:])
    count = len(victims or [None])
    with pytest.raises(
        ConfigError, match=re.escape(f"kv.eviction=Wrong: evicts {victims}; has to evict {count}, each a block")
    ):
        allocator.allocate(count)


def test_where_a_victim_is_refused_blocks_without_content_stay_free() -> None:
    class Wrong(LruEviction):
        def victims(self, count: int) -> list[int]:
            return [0]

    allocator = BlockAllocator(3, Wrong())
    (kept, cached) = allocator.allocate(2)
    fill(allocator, cached, content(0))
    allocator.free([cached])
    with pytest.raises(ConfigError, match="eviction=Wrong"):
        allocator.allocate(2)
    assert allocator.free_block_ids() == {cached, 3 - kept - cached}
    assert allocator.num_free() == 2
