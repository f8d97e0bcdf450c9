"""Whose a reference is, and how those of an owner that is gone are found."""

from __future__ import annotations

from collections import Counter

import pytest

from kvlab.errors import BlockError
from kvlab.kv.allocator import BlockAllocator
from tests.support.pools import sharing, store


class TestOwners:
    def test_each_has_its_references_by_block(self) -> None:
        allocator = BlockAllocator(6)
        first, second = allocator.allocate(2, "a")
        allocator.share([first, first], "b")
        assert allocator.owners.blocks_of("a") == Counter([first, second])
        assert allocator.owners.blocks_of("b") == Counter({first: 2})
        assert (allocator.owners.holders(first), allocator.owners.holders(second)) == (["a", "b"], ["a"])
        assert allocator.owners.blocks_of("nobody") == Counter()

    def test_what_they_have_is_a_copy(self) -> None:
        allocator = BlockAllocator(2)
        (block,) = allocator.allocate(1, "a")
        allocator.owners.blocks_of("a").clear()
        assert allocator.owners.blocks_of("a") == Counter([block])

    @pytest.mark.parametrize(("owner", "times"), [("b", 1), ("nobody", 1), ("a", 2)])
    def test_another_cannot_give_them_back(self, owner: str, times: int) -> None:
        allocator = BlockAllocator(4)
        (own,) = allocator.allocate(1, "b")
        (block,) = allocator.allocate(1, "a")
        allocator.share([block], "c")
        with pytest.raises(
            BlockError, match=rf"free: '{owner}' holds \d reference\(s\) to block {block}, not {times}"
        ):
            allocator.free([block] * times, owner)
        assert (allocator.ref_count(block), allocator.ref_count(own)) == (2, 1)
        assert allocator.owners.holders(block) == ["a", "c"]

    def test_an_owner_without_references_is_forgotten(self) -> None:
        allocator = BlockAllocator(4)
        blocks = allocator.allocate(2, "a")
        allocator.free(blocks[:1], "a")
        allocator.free(blocks[1:], "a")
        assert len(allocator.owners) == 0


class TestFindLeakedBlocks:
    def test_names_those_of_owners_that_are_gone(self) -> None:
        allocator = BlockAllocator(8)
        kept, lost = allocator.allocate(2, "alive"), allocator.allocate(3, "gone")
        allocator.share([kept[0], lost[0]], "gone")
        assert allocator.owners.leaked_blocks({"alive"}) == {"gone": sorted([*lost, kept[0], lost[0]])}
        assert allocator.owners.leaked_blocks({"alive", "gone"}) == {}

    def test_blocks_without_an_owner_belong_to_no_sequence(self) -> None:
        allocator = BlockAllocator(4)
        allocator.allocate(2)
        assert allocator.owners.leaked_blocks(()) == {}


class TestFindUnreferencedBlocks:
    def test_names_what_is_allocated_and_in_no_table(self) -> None:
        allocator = BlockAllocator(6)
        a, b, c = allocator.allocate(3)
        assert allocator.find_unreferenced_blocks([b, 5]) == sorted([a, c])
        assert allocator.find_unreferenced_blocks([a, b, c]) == []


class TestForceFree:
    def test_drops_every_reference_of_every_owner(self) -> None:
        allocator = BlockAllocator(4)
        first, second = allocator.allocate(2, "a")
        allocator.share([first, first], "b")
        allocator.share([first])
        assert allocator.force_free([first, first]) == 1
        assert (allocator.ref_count(first), allocator.num_free(), allocator.num_references) == (0, 3, 1)
        assert (allocator.owners.blocks_of("a"), allocator.owners.blocks_of("b")) == (Counter([second]), Counter())
        assert allocator.total_freed == 1
        assert first in allocator.allocate(3)

    def test_leaves_a_free_block_as_it_is(self) -> None:
        allocator = BlockAllocator(3)
        assert allocator.force_free([0, 1, 2]) == 0
        assert (allocator.num_free(), allocator.total_freed) == (3, 0)

    @pytest.mark.parametrize("block", [-1, 3, True, "0"])
    def test_of_what_is_no_block_is_refused_and_changes_nothing(self, block: object) -> None:
        allocator = BlockAllocator(3)
        (held,) = allocator.allocate(1)
        with pytest.raises(BlockError):
            allocator.force_free([held, block])  # type: ignore[list-item]
        assert allocator.ref_count(held) == 1


class TestReclaimLeakedBlocks:
    def test_of_a_slot_that_was_lost(self) -> None:
        """Its table is gone, its references are not."""
        pool = sharing()
        slot = pool.allocate_slot(token_ids=range(9))
        store(pool, [slot], [9])
        pool.tables.remove(slot)
        assert {finding.holders for finding in pool.audit()} == {(slot,)}
        assert pool.reclaim_leaked_blocks() == 3
        assert pool.audit() == []
        stats = pool.stats()
        assert (stats.blocks_in_use, stats.tokens_stored, stats.blocks_cached) == (0, 0, 2)
        again = pool.allocate_slot(token_ids=range(9))  # what was computed is still there
        assert pool.get_seq_len(again) == 8
