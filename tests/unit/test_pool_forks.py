"""Forks in a pool that shares: what samples of one prompt share, and copy-on-write."""

from __future__ import annotations

import pytest

from kvlab.errors import OutOfBlocksError, SlotError
from kvlab.kv.pools.contiguous import ContiguousKVCachePool
from kvlab.kv.storage import KVStorage
from tests.property.reference import state
from tests.support.pools import SPEC, paged, sharing
from tests.unit.test_sharing_pool import PROMPT, computed, contents, equal, write


class TestFork:
    def test_copy_on_write_without_prefix_sharing_leaves_the_other_bit_for_bit(self) -> None:
        pool = paged()
        tokens = PROMPT[:6]
        slot = computed(pool, tokens)
        expected = contents(pool, slot)
        copy = pool.fork_slot(slot, [*tokens, 1])
        assert pool.tables.blocks(copy) == pool.tables.blocks(slot)
        assert (pool.stats().blocks_in_use, pool.stats().tokens_stored) == (2, 6)
        write(pool, [copy], [1])
        assert pool.tables.blocks(copy)[0] == pool.tables.blocks(slot)[0]
        assert pool.tables.blocks(copy)[1] != pool.tables.blocks(slot)[1]
        assert equal(contents(pool, slot), expected)
        assert equal(contents(pool, copy, 6), expected)  # on every layer
        stats = pool.stats()
        assert (pool.counters().cow_copies, stats.blocks_in_use, stats.tokens_stored) == (1, 3, 9)
        tokens.append(2)
        write(pool, [slot], [1])  # nobody else holds its tail any more
        assert pool.counters().cow_copies == 1
        assert equal(contents(pool, slot, 6), expected)
        assert pool.audit() == []

    def test_of_several_that_write_one_block_in_a_step_the_last_does_not_copy(self) -> None:
        pool = paged()
        slot = computed(pool, PROMPT[:6])
        expected = contents(pool, slot)
        slots = [slot, pool.fork_slot(slot), pool.fork_slot(slot)]
        tail = pool.tables.blocks(slot)[1]
        write(pool, slots, [1, 1, 1])
        assert [pool.tables.blocks(each)[1] == tail for each in slots] == [False, False, True]
        assert pool.counters().cow_copies == 2
        assert all(equal(contents(pool, each, 6), expected) for each in slots)
        assert len({float(contents(pool, each)[0][0, 6, 0]) for each in slots}) == 3

    def test_a_last_token_that_is_run_again_writes_nothing_and_copies_nothing(self) -> None:
        pool = paged()
        slot = computed(pool, PROMPT[:6])
        copy = pool.fork_slot(slot, rerun_last=True)
        assert (pool.get_seq_len(slot), pool.get_seq_len(copy)) == (6, 5)
        view = pool.view([copy], [1])
        assert view.slot_mapping.tolist() == [-1]
        view.advance()
        assert (pool.get_seq_len(copy), pool.counters().cow_copies) == (6, 0)
        assert equal(contents(pool, slot), contents(pool, copy))

    def test_of_an_empty_slot_has_no_token_to_run_again(self) -> None:
        pool = paged()
        assert pool.get_seq_len(pool.fork_slot(pool.allocate_slot(), rerun_last=True)) == 0

    def test_contiguous_copies(self) -> None:
        pool = ContiguousKVCachePool(2, 10, KVStorage(SPEC, 2, 10))
        slot = computed(pool, PROMPT[:6])
        expected = contents(pool, slot)
        copy = pool.fork_slot(slot)
        assert pool.tables.blocks(copy) != pool.tables.blocks(slot)
        assert (pool.stats().tokens_stored, pool.stats().blocks_in_use) == (12, 2)
        write(pool, [slot, copy], [1, 2])
        assert equal(contents(pool, slot, 6), expected)
        assert equal(contents(pool, copy, 6), expected)
        before = state(pool)
        with pytest.raises(OutOfBlocksError, match="1 wanted, 0 free"):
            pool.fork_slot(slot)
        assert state(pool) == before

    def test_of_a_dead_slot_or_one_in_a_step_is_refused(self) -> None:
        pool = sharing()
        slot = pool.allocate_slot(token_ids=PROMPT)
        pool.reserve([slot], [8])
        for each, reason in ((99, "slot 99 is not live"), (slot, f"slot {slot} is in a step")):
            before = state(pool)
            with pytest.raises(SlotError, match=reason):
                pool.fork_slot(each)
            assert state(pool) == before
        pool.view([slot], [8]).advance()
        pool.fork_slot(slot)
