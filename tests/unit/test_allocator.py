from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.errors import BlockError, KvlabError, OutOfBlocksError
from kvlab.kv.allocator import BlockAllocator
from kvlab.kv.journal import BlockState
from tests.support.pools import content, fill


def snapshot(allocator: BlockAllocator) -> tuple[object, ...]:
    """All that can be asked of an allocator."""
    return (
        allocator.num_free(),
        allocator.num_allocated(),
        [allocator.ref_count(block) for block in range(allocator.num_blocks)],
        allocator.allocated_block_ids(),
        allocator.free_block_ids(),
        allocator.num_evictable(),
        allocator.num_references,
        allocator.total_allocated,
        allocator.total_freed,
    )


@contextmanager
def refused(
    allocator: BlockAllocator, error: type[Exception], match: str | None = None
) -> Iterator[pytest.ExceptionInfo[Any]]:
    """The body raises `error`, and the allocator is as it was."""
    before = snapshot(allocator)
    with pytest.raises(error, match=match) as caught:
        yield caught
    assert snapshot(allocator) == before


def free_order(allocator: BlockAllocator) -> list[int]:
    """The free blocks in the order they would be handed out."""
    blocks = allocator.allocate(allocator.num_free())
    allocator.free(blocks)
    return blocks


class TestAllocate:
    def test_a_new_pool_is_free(self) -> None:
        allocator = BlockAllocator(5)
        assert (allocator.num_blocks, allocator.num_free(), allocator.num_allocated()) == (5, 5, 0)
        assert allocator.allocated_block_ids() == set()
        assert [allocator.ref_count(block) for block in range(5)] == [0] * 5

    def test_blocks_are_distinct_ids_of_the_pool_with_one_reference_each(self) -> None:
        allocator = BlockAllocator(6)
        blocks = allocator.allocate(4) + allocator.allocate(2)
        assert sorted(blocks) == list(range(6))
        assert [allocator.ref_count(block) for block in blocks] == [1] * 6
        assert allocator.allocated_block_ids() == set(blocks)

    def test_counters_follow(self) -> None:
        allocator = BlockAllocator(6)
        blocks = allocator.allocate(4)
        allocator.free(blocks[:3])
        allocator.allocate(1)
        assert (allocator.num_free(), allocator.num_allocated()) == (4, 2)
        assert (allocator.total_allocated, allocator.total_freed) == (5, 3)

    def test_a_shortage_says_what_was_wanted_and_what_there_is(self) -> None:
        allocator = BlockAllocator(8)
        allocator.allocate(5)
        with refused(allocator, OutOfBlocksError, match=r"4 wanted, 3 free .* 8 in the pool") as caught:
            allocator.allocate(4)
        error = caught.value
        assert (error.wanted, error.free, error.evictable, error.total, error.slots) == (4, 3, 0, 8, ())

    def test_a_shortage_leaves_the_order_of_reuse(self) -> None:
        allocator, twin = BlockAllocator(5), BlockAllocator(5)
        for each in (allocator, twin):
            each.free(each.allocate(3)[::-1])
        with refused(allocator, OutOfBlocksError):
            allocator.allocate(6)
        assert free_order(allocator) == free_order(twin)

    @pytest.mark.parametrize("count", [-1, True, False, 1.0, "1", None])
    def test_a_count_that_is_no_number_of_blocks_is_refused(self, count: object) -> None:
        allocator = BlockAllocator(3)
        with refused(allocator, ValueError, match=f"count={count!r}"):
            allocator.allocate(count)  # type: ignore[arg-type]

    def test_can_allocate_says_whether_allocate_would(self) -> None:
        allocator = BlockAllocator(3)
        allocator.allocate(1)
        assert [allocator.can_allocate(count) for count in range(5)] == [True, True, True, False, False]


class TestPoolOfZeroBlocks:
    @pytest.mark.parametrize("count", [-1, True, 2.0, "2", None])
    def test_a_pool_of_no_whole_number_is_refused(self, count: object) -> None:
        with pytest.raises(ValueError, match=f"num_blocks={count!r}"):
            BlockAllocator(count)  # type: ignore[arg-type]


class TestOrderOfReuse:
    def test_the_first_given_to_free_is_the_first_reused(self) -> None:
        allocator = BlockAllocator(8)
        a, b, c = allocator.allocate(3)
        allocator.free([b, c, a])
        assert allocator.allocate(3) == [b, c, a]

    def test_freed_blocks_come_before_untouched_ones(self) -> None:
        allocator = BlockAllocator(8)
        blocks = allocator.allocate(2)
        allocator.free(blocks)
        assert allocator.allocate(2) == blocks

    def test_the_last_call_to_free_is_reused_first(self) -> None:
        allocator = BlockAllocator(8)
        early, late = allocator.allocate(2), allocator.allocate(2)
        allocator.free(early)
        allocator.free(late)
        assert allocator.allocate(4) == late + early

    def test_one_call_or_many_hand_out_the_same_blocks(self) -> None:
        together, one_by_one = BlockAllocator(7), BlockAllocator(7)
        assert together.allocate(5) == [one_by_one.allocate(1)[0] for _ in range(5)]


class TestShare:
    def test_a_block_survives_all_but_the_last_release(self) -> None:
        allocator = BlockAllocator(2)
        (block,) = allocator.allocate(1)
        allocator.share([block])
        allocator.share([block])
        for left in (2, 1):
            allocator.free([block])
            assert allocator.ref_count(block) == left
            assert allocator.num_free() == 1
        allocator.free([block])
        assert (allocator.ref_count(block), allocator.num_free(), allocator.total_freed) == (0, 2, 1)

    def test_naming_a_block_twice_adds_two_references(self) -> None:
        allocator = BlockAllocator(2)
        (block,) = allocator.allocate(1)
        allocator.share([block, block])
        assert allocator.ref_count(block) == 3

    def test_an_unreferenced_block_with_content_is_taken_out_of_the_queue(self) -> None:
        allocator = BlockAllocator(3)
        held, cached = allocator.allocate(2)
        fill(allocator, cached, content(1))
        assert allocator.free([cached]) == [cached]
        assert (allocator.num_free(), allocator.num_evictable()) == (2, 1)
        assert allocator.share([held, cached, cached]) == [cached]  # the one taken from the queue, once
        assert [allocator.ref_count(block) for block in (held, cached)] == [2, 2]
        assert (allocator.num_free(), allocator.num_evictable(), allocator.total_allocated) == (1, 0, 3)

    def test_takes_any_iterable_and_no_block(self) -> None:
        allocator = BlockAllocator(3)
        blocks = allocator.allocate(2)
        allocator.share(block for block in blocks)
        allocator.share([])
        assert [allocator.ref_count(block) for block in blocks] == [2, 2]
        assert (allocator.num_free(), allocator.total_allocated) == (1, 2)

    def test_an_unreferenced_block_is_refused_by_name(self) -> None:
        allocator = BlockAllocator(4)
        held, released = allocator.allocate(2)
        allocator.free([released])
        with refused(allocator, BlockError, match=f"share: block {released} is neither allocated nor cached"):
            allocator.share([held, released])


class TestFree:
    def test_freeing_twice_is_refused_by_name(self) -> None:
        allocator = BlockAllocator(4)
        first, second = allocator.allocate(2)
        allocator.free([second])
        with refused(allocator, BlockError, match=f"free: block {second} is not allocated"):
            allocator.free([first, second])

    def test_more_often_than_referenced_in_one_call_is_refused_by_name(self) -> None:
        allocator = BlockAllocator(4)
        first, second = allocator.allocate(2)
        allocator.share([second])
        with refused(allocator, BlockError, match=rf"block {second} was given 3 times but has 2 reference\(s\)"):
            allocator.free([first, second, second, second])

    def test_returns_the_blocks_that_lost_their_last_reference(self) -> None:
        allocator = BlockAllocator(4)
        blocks = allocator.allocate(3)
        allocator.share([blocks[1]])
        assert allocator.free(blocks) == [blocks[0], blocks[2]]
        assert allocator.free([blocks[1]]) == [blocks[1]]

    def test_nothing_changes_nothing(self) -> None:
        allocator = BlockAllocator(4)
        before = snapshot(allocator)
        assert allocator.free([]) == []
        assert snapshot(allocator) == before

    def test_the_list_given_is_left_as_it_was(self) -> None:
        allocator = BlockAllocator(4)
        blocks = allocator.allocate(3)
        given_blocks = list(blocks)
        allocator.free(given_blocks)
        assert given_blocks == blocks


@pytest.mark.parametrize("action", ["share", "free"])
class TestIdsThatAreNoBlock:
    @pytest.mark.parametrize("block", [-1, 4, 1000])
    def test_out_of_range(self, action: str, block: int) -> None:
        allocator = BlockAllocator(4)
        blocks = allocator.allocate(4)
        with refused(allocator, BlockError, match=f"block {block}: outside the pool of 4 blocks"):
            getattr(allocator, action)([blocks[0], block])

    @pytest.mark.parametrize("block", [True, False, "1", 1.0, None])
    def test_not_a_whole_number(self, action: str, block: object) -> None:
        allocator = BlockAllocator(4)
        allocator.allocate(4)
        with refused(allocator, BlockError, match=f"block {block!r}: a block id is a whole number"):
            getattr(allocator, action)([block])


@pytest.mark.parametrize("block", [-1, 4, True, "1", None])
def test_ref_count_of_what_is_no_block_is_refused(block: object) -> None:
    with pytest.raises(BlockError, match=f"block {block!r}"):
        BlockAllocator(4).ref_count(block)  # type: ignore[arg-type]


def test_errors_are_of_the_kinds_that_callers_expect() -> None:
    assert issubclass(OutOfBlocksError, RuntimeError)
    assert issubclass(BlockError, ValueError)
    assert issubclass(OutOfBlocksError, KvlabError)
    assert issubclass(BlockError, KvlabError)


Calls = list[tuple[str, list[int]]]
calls: st.SearchStrategy[Calls] = st.lists(
    st.tuples(st.sampled_from(["allocate", "share", "free"]), st.lists(st.integers(-1, 6), max_size=6)),
    max_size=30,
)


@given(calls=calls)
def test_any_calls_in_any_order_agree_with_a_multiset_of_references(calls: Calls) -> None:
    """Against a multiset of references; a call the multiset cannot follow is refused and changes nothing."""
    allocator = BlockAllocator(6)
    references: Counter[int] = Counter()
    for action, blocks in calls:
        if action == "allocate":
            if len(blocks) > 6 - len(references):
                with refused(allocator, OutOfBlocksError):
                    allocator.allocate(len(blocks))
            else:
                taken = allocator.allocate(len(blocks))
                assert not references.keys() & set(taken)
                references.update(taken)
        elif action == "share" and all(block in references for block in blocks):
            allocator.share(blocks)
            references.update(blocks)
        elif action == "free" and Counter(blocks) <= references:
            allocator.free(blocks)
            references -= Counter(blocks)
        else:
            with refused(allocator, BlockError):
                getattr(allocator, action)(blocks)
        assert {block: allocator.ref_count(block) for block in range(6)} == {b: references[b] for b in range(6)}
        assert allocator.allocated_block_ids() == set(references)
        assert allocator.num_free() + allocator.num_allocated() == 6
        assert allocator.total_allocated - allocator.total_freed == allocator.num_allocated()


def test_each_block_is_free_cached_in_use_or_shared() -> None:
    allocator = BlockAllocator(6)
    cached, used, shared, back = allocator.allocate(4)
    fill(allocator, cached, content(1))
    allocator.share([shared, shared])
    allocator.free([cached, back])
    found = [BlockState.FREE] * 6
    found[cached], found[used], found[shared] = BlockState.CACHED, BlockState.IN_USE, BlockState.SHARED
    assert allocator.states().tolist() == found
