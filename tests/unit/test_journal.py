"""The journal: what it records of a pool is what the pool did."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from kvlab.errors import OutOfBlocksError
from kvlab.kv.allocator import BlockAllocator
from kvlab.kv.journal import BlockEvent, BlockJournal
from kvlab.kv.pools.contiguous import ContiguousKVCachePool
from kvlab.kv.pools.paged import PagedKVCachePool
from tests.support.pools import content, fill

A, S, F, C, D = (
    BlockEvent.ALLOCATED,
    BlockEvent.SHARED,
    BlockEvent.FREED,
    BlockEvent.CACHED,
    BlockEvent.DROPPED,
)


def entries(journal: BlockJournal) -> list[tuple[int, int, int, int]]:
    """(step, event, block, sequence) for each event."""
    found = journal.columns()
    return list(
        zip(found.step.tolist(), found.event.tolist(), found.block.tolist(), found.sequence.tolist(), strict=True)
    )


def test_each_event_of_a_block_is_written_in_order() -> None:
    journal = BlockJournal()
    allocator = BlockAllocator(2, journal=journal)
    allocator.allocate(2, owner=7)
    fill(allocator, 0, content(0))
    allocator.share([0], owner=8)
    allocator.free([1, 0], owner=7)
    allocator.free([0], owner=8)
    allocator.allocate(2, owner=9)
    found = [(event, block) for _, event, block, _ in entries(journal)]
    assert found == [(A, 0), (A, 1), (S, 0), (F, 1), (F, 0), (F, 0), (C, 0), (D, 0), (A, 1), (A, 0)]


def test_a_failed_call_writes_nothing() -> None:
    journal = BlockJournal()
    allocator = BlockAllocator(1, journal=journal)
    with pytest.raises(OutOfBlocksError):
        allocator.allocate(2)
    with pytest.raises(ValueError, match="not allocated"):
        allocator.free([0])
    assert entries(journal) == []


def test_content_that_is_taken_back_from_a_free_block_is_dropped() -> None:
    journal = BlockJournal()
    allocator = BlockAllocator(1, journal=journal)
    allocator.allocate(1)
    fill(allocator, 0, content(0))
    allocator.free([0])
    allocator.clear_content(0)
    assert [event for _, event, _, _ in entries(journal)] == [A, F, C, D]


def test_force_free_takes_every_reference() -> None:
    journal = BlockJournal()
    allocator = BlockAllocator(1, journal=journal)
    allocator.allocate(1)
    allocator.share([0])
    allocator.force_free([0])
    assert [event for _, event, _, _ in entries(journal)] == [A, S, F, F]


def test_a_slot_number_that_is_used_again_is_another_sequence() -> None:
    journal = BlockJournal()
    pool = PagedKVCachePool(4, 4, 16, journal=journal)
    first = pool.allocate_slot(4)
    journal.assign(first, ("first", 0))
    journal.end_step()
    pool.free_slot(first)
    second = pool.allocate_slot(5)
    journal.assign(second, ("second", 0))
    journal.end_step()
    assert first == second
    assert journal.owners == [("first", 0), ("second", 0)]
    assert [(step, event, sequence) for step, event, _, sequence in entries(journal)] == [
        (0, A, 0),
        (1, F, 0),
        (1, A, 1),
        (1, A, 1),
    ]


def test_a_contiguous_fork_ends_with_one_reference_of_the_copy() -> None:
    journal = BlockJournal()
    pool = ContiguousKVCachePool(2, 8, journal=journal)
    slot = pool.allocate_slot(3)
    journal.assign(slot, ("source", 0))
    journal.assign(pool.fork_slot(slot), ("source", 1))
    held: Counter[tuple[int, int]] = Counter()
    for _, event, block, sequence in entries(journal):
        held[block, sequence] += -1 if event == F else 1
    assert +held == {(0, 0): 1, (1, 1): 1}


@pytest.mark.parametrize("seed", range(3))
def test_following_the_journal_gives_the_pools_own_counts(seed: int) -> None:
    rng, journal = random.Random(seed), BlockJournal()
    pool = PagedKVCachePool(24, 4, 64, prefix_sharing=True, journal=journal)
    slots: list[int] = []
    known: dict[int, list[int]] = {}
    for _ in range(300):
        try:
            if rng.random() < 0.3:
                tokens = [1] * rng.randrange(1, 12) + [rng.randrange(50) for _ in range(rng.randrange(1, 9))]
                slots.append(pool.allocate_slot(token_ids=tokens))
                known[slots[-1]] = tokens
                pool.view(slots[-1:], [len(tokens) - pool.get_seq_len(slots[-1])]).advance()
            elif slots and rng.random() < 0.2:
                source = rng.choice(slots)
                tokens = list(known[source])
                slots.append(pool.fork_slot(source, tokens))
                known[slots[-1]] = tokens
            elif slots and rng.random() < 0.3:
                pool.free_slot(slots.pop(rng.randrange(len(slots))))
            elif slots:
                chosen = rng.sample(slots, rng.randrange(1, len(slots) + 1))
                chosen = [slot for slot in chosen if pool.get_seq_len(slot) < 60]
                for slot in chosen:
                    if len(known[slot]) == pool.get_seq_len(slot):
                        known[slot].append(rng.randrange(50))
                pool.decode_view(chosen).advance()
        except OutOfBlocksError:
            pass
        journal.end_step()
    references: Counter[int] = Counter()
    cached: set[int] = set()
    for _, event, block, _ in entries(journal):
        references[block] += {A: 1, S: 1, F: -1}.get(BlockEvent(event), 0)
        cached = cached | {block} if event == C else cached - {block}
    assert pool.counters().evicted_blocks > 0
    assert +references == {b: pool.allocator.ref_count(b) for b in pool.allocator.allocated_block_ids()}
    assert len(cached) == pool.stats().blocks_cached


def test_owners_are_named_by_plain_keys() -> None:
    """A sequence that is preempted and comes back is the same owner, whatever its slot."""
    journal = BlockJournal()
    for slot, owner in ((0, ("a", 0)), (1, ("a", 1)), (2, ("a", 0)), (3, ("gone", 0))):
        journal.add(A, [slot], slot)
        journal.assign(slot, owner)
    assert journal.columns([("b", 0), ("a", 1), ("a", 0)]).sequence.tolist() == [2, 1, 2, -1]
