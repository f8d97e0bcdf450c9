from __future__ import annotations

import pytest
import torch

from kvlab.errors import OutOfBlocksError, SlotError
from kvlab.kv.pools.contiguous import ContiguousKVCachePool
from kvlab.kv.pools.paged import PagedKVCachePool
from tests.support.pools import paged, store


class TestAllocateSlot:
    @pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (33, 3)])
    def test_paged_has_the_capacity_of_the_blocks_left(self, tokens: int, blocks: int) -> None:
        pool = PagedKVCachePool(64, 16, 1024)
        slot = pool.allocate_slot(tokens)
        assert len(pool.tables.blocks(slot)) == blocks
        assert (pool.free_slot_count(), pool.free_token_capacity()) == (64 - blocks, (64 - blocks) * 16)
        assert pool.get_seq_len(slot) == 0

    @pytest.mark.parametrize("tokens", [0, 1024])
    def test_contiguous_takes_one_slot_whatever_its_tokens(self, tokens: int) -> None:
        pool = ContiguousKVCachePool(3, 1024)
        pool.allocate_slot(tokens)
        assert (pool.free_slot_count(), pool.free_token_capacity()) == (2, None)

    def test_token_ids_stand_for_their_number(self) -> None:
        pool = paged()
        assert len(pool.tables.blocks(pool.allocate_slot(token_ids=list(range(9))))) == 3

    @pytest.mark.parametrize("tokens", [41, -1])
    def test_tokens_that_no_slot_takes_are_refused(self, tokens: int) -> None:
        pool = paged()
        with pytest.raises(SlotError, match=str(tokens)):
            pool.allocate_slot(tokens)
        assert pool.free_slot_count() == 16

    def test_the_longest_sequence_is_that_of_the_pool_or_of_the_setting(self) -> None:
        assert paged(num_blocks=16, max_seq_len=40).max_sequence_tokens == 40
        assert paged(num_blocks=9, max_seq_len=40).max_sequence_tokens == 36
        assert ContiguousKVCachePool(2, 10).max_sequence_tokens == 10


class TestReserve:
    def test_twice_for_the_same_step_is_refused_and_takes_no_block(self) -> None:
        pool = paged()
        slot, other = pool.allocate_slot(4), pool.allocate_slot(4)
        pool.reserve([slot], [9])
        with pytest.raises(SlotError, match=f"slot {slot} is reserved for this step already"):
            pool.reserve([other, slot], [9, 9])
        assert [len(pool.tables.blocks(each)) for each in (slot, other)] == [3, 1]

    @pytest.mark.parametrize("end", ["advance", "rollback"])
    def test_again_once_the_step_has_ended(self, end: str) -> None:
        pool = paged()
        slot = pool.allocate_slot(4)
        pool.reserve([slot], [2])
        getattr(pool.view([slot], [2]), end)()
        pool.reserve([slot], [9])
        assert len(pool.tables.blocks(slot)) == 3

    def test_a_shortage_names_the_slots_that_did_not_fit_and_gives_none_of_them_room(self) -> None:
        pool = paged(num_blocks=6)
        roomy, first, second, third = (pool.allocate_slot(n) for n in (3, 4, 4, 4))
        store(pool, [roomy, first, second, third], [2, 4, 4, 4])
        with pytest.raises(OutOfBlocksError) as caught:
            pool.reserve([third, roomy, first, second], [4, 1, 1, 1])
        error = caught.value
        assert error.slots == (second,)
        assert (error.wanted, error.free, error.total) == (3, 2, 6)
        assert f"for slots [{second}]" in str(error)
        assert [len(pool.tables.blocks(slot)) for slot in (roomy, first, second, third)] == [1] * 4
        assert pool.free_slot_count() == 2

    def test_nothing_reserves_nothing(self) -> None:
        pool = paged()
        pool.reserve([], [])
        assert pool.free_slot_count() == 16


class TestFreeSlot:
    def test_the_tail_of_a_sequence_is_reused_before_its_head(self) -> None:
        pool = paged()
        slot = pool.allocate_slot(12)
        blocks = pool.tables.blocks(slot)
        pool.free_slot(slot)
        assert pool.allocator.allocate(3) == blocks[::-1]


@pytest.mark.parametrize("action", ["reserve", "view"])
class TestWhatNoStepTakes:
    def test_a_slot_given_twice(self, action: str) -> None:
        pool = paged()
        first, second = pool.allocate_slot(4), pool.allocate_slot(4)
        with pytest.raises(SlotError, match=f"slot {second} is given twice"):
            getattr(pool, action)([second, first, second], [1, 1, 1])

    def test_a_dead_slot(self, action: str) -> None:
        pool = paged()
        live, dead = pool.allocate_slot(4), pool.allocate_slot(4)
        pool.free_slot(dead)
        with pytest.raises(SlotError, match=f"slot {dead} is not live"):
            getattr(pool, action)([live, dead], [1, 1])

    def test_more_than_the_longest_sequence(self, action: str) -> None:
        pool = paged(max_seq_len=10)
        slot = pool.allocate_slot(8)
        store(pool, [slot], [8])
        with pytest.raises(SlotError, match=rf"slot {slot}: 8 \+ 3 tokens are more than max_seq_len=10"):
            getattr(pool, action)([slot], [3])
        assert len(pool.tables.blocks(slot)) == 2

    @pytest.mark.parametrize("tokens", [0, -1])
    def test_no_new_token(self, action: str, tokens: int) -> None:
        pool = paged()
        slot = pool.allocate_slot(4)
        with pytest.raises(SlotError, match=f"slot {slot}: {tokens} new tokens"):
            getattr(pool, action)([slot], [tokens])

    def test_lists_of_different_lengths(self, action: str) -> None:
        pool = paged()
        with pytest.raises(SlotError, match="1 slots but 0 token counts"):
            getattr(pool, action)([pool.allocate_slot(4)], [])


class TestLedgerWithoutTensors:
    def test_counts_as_one_with_tensors(self) -> None:
        pool = PagedKVCachePool(1_000_000, 16, 100_000)
        slot = pool.allocate_slot(70_000)
        view = pool.view([slot], [70_000])
        assert view.positions[-1] == 69_999
        view.advance()
        assert (pool.stats().tokens_stored, pool.stats().kv_bytes) == (70_000, 0)
        assert pool.audit() == []

    def test_has_nothing_to_read_or_write(self) -> None:
        pool = PagedKVCachePool(4, 4, 16)
        view = pool.view([pool.allocate_slot(4)], [4])
        for call in (
            lambda: view.keys(0),
            lambda: view.gather(0, 0),
            lambda: view.update(0, *torch.zeros(2, 4, 2, 4)),
        ):
            with pytest.raises(RuntimeError, match="ledger without tensors"):
                call()
