from __future__ import annotations

from kvlab.kv.pool import BlockPool
from tests.support.pools import paged, sharing, store


class TestAudit:
    """Each rule finds what breaks it, by name."""

    def broken(self, pool: BlockPool) -> list[tuple[str, str]]:
        return [(finding.rule, finding.subject) for finding in pool.audit()]

    def test_a_block_no_table_names(self) -> None:
        pool = paged()
        (block,) = pool.allocator.allocate(1)
        assert self.broken(pool) == [("leaked", f"block {block}")]

    def test_a_reference_too_many(self) -> None:
        pool = paged()
        (block,) = pool.tables.blocks(pool.allocate_slot(1))
        pool.allocator.share([block])
        assert self.broken(pool) == [("leaked", f"block {block}")]
        assert str(pool.audit()[0]) == f"leaked: block {block}: 2 reference(s), 1 table entry(ies), held by 0"

    def test_a_freed_block_still_in_a_running_table(self) -> None:
        pool = paged()
        first, second = pool.tables.blocks(pool.allocate_slot(8))
        pool.allocator.free([second])
        assert self.broken(pool) == [("dangling", f"block {second}")]
        assert first != second

    def test_a_block_in_two_tables_with_one_reference(self) -> None:
        pool = paged()
        (block,) = pool.tables.blocks(pool.allocate_slot(1))
        pool.tables.add([block])
        assert self.broken(pool) == [("dangling", f"block {block}")]

    def test_a_free_block_that_got_lost(self) -> None:
        pool = paged()
        pool.allocator.free(pool.allocator.allocate(2))
        lost = pool.allocator._scratch.pop()
        assert self.broken(pool) == [("queue", f"block {lost}")]

    def test_a_block_that_is_free_and_referenced(self) -> None:
        pool = paged()
        (block,) = pool.tables.blocks(pool.allocate_slot(1))
        pool.allocator._scratch.append(block)
        assert self.broken(pool) == [("queue", f"block {block}")]
        assert pool.audit()[0].detail == "1 reference(s), in the free queue"

    def test_a_free_block_that_is_queued_twice(self) -> None:
        pool = paged()
        pool.allocator.free(pool.allocator.allocate(2))
        pool.allocator._scratch.append(pool.allocator._scratch[0])
        assert self.broken(pool) == [("conservation", "free queue")]

    def test_a_block_that_was_never_taken_and_is_queued_twice(self) -> None:
        pool = sharing(5000)
        pool.allocator.free(pool.allocator.allocate(2))
        pool.allocator._scratch.append(4999)
        assert self.broken(pool) == [("conservation", "free queue")]

    def test_a_block_that_was_never_taken_and_is_referenced(self) -> None:
        pool = sharing(5000)
        pool.allocator.free(pool.allocator.allocate(2))
        pool.allocator._references[4999] = 1
        assert self.broken(pool) == [("leaked", "block 4999"), ("queue", "block 4999")]

    def test_who_holds_a_leaked_block(self) -> None:
        pool = paged()
        (block,) = pool.allocator.allocate(1, "a crashed worker")
        (finding,) = pool.audit()
        assert (finding.rule, finding.subject, finding.holders) == (
            "leaked",
            f"block {block}",
            ("a crashed worker",),
        )
        assert str(finding).endswith("held by 'a crashed worker'")

    def test_content_that_the_allocator_does_not_know_of(self) -> None:
        pool, block = self.with_cached_block()
        del pool.allocator._contents[block]
        assert self.broken(pool) == [("content", f"block {block}")]

    def test_a_running_block_that_the_index_alone_knows_of(self) -> None:
        pool = sharing()
        (block,) = pool.tables.blocks(pool.allocate_slot(4))
        assert pool.shares_prefixes
        pool.index.extend(pool.index.root(), range(4), [block], {})
        assert self.broken(pool) == [("content", f"block {block}")]

    def test_a_cached_block_among_those_without_content(self) -> None:
        pool, block = self.with_cached_block()
        pool.allocator.eviction.remove(block)
        pool.allocator._scratch.append(block)
        assert self.broken(pool) == [("content", f"block {block}")]

    def test_content_that_the_index_does_not_know_of(self) -> None:
        pool, block = self.with_cached_block()
        node = pool.allocator.content(block)
        assert node is not None
        node.block = None
        assert self.broken(pool) == [("content", f"block {block}")]

    def test_content_that_the_index_cannot_find(self) -> None:
        pool, block = self.with_cached_block()
        assert pool.shares_prefixes
        pool.index._roots.clear()
        assert self.broken(pool) == [("content", f"block {block}")]

    def test_content_that_is_said_to_be_elsewhere(self) -> None:
        pool, block = self.with_cached_block()
        node = pool.allocator.content(block)
        assert node is not None
        node.block = 7
        assert self.broken(pool) == [("content", f"block {block}")]

    def test_content_behind_what_was_evicted_before_it(self) -> None:
        pool = sharing()
        slot = pool.allocate_slot(token_ids=range(8))
        store(pool, [slot], [8])
        first, second = pool.tables.blocks(slot)
        pool.free_slot(slot)
        assert pool.audit() == []
        pool.allocator.clear_content(first)
        assert self.broken(pool) == [("content", f"block {second}")]

    @staticmethod
    def with_cached_block() -> tuple[BlockPool, int]:
        pool = sharing()
        slot = pool.allocate_slot(token_ids=range(4))
        store(pool, [slot], [4])
        (block,) = pool.tables.blocks(slot)
        pool.free_slot(slot)
        assert pool.audit() == []
        return pool, block

    def test_a_block_that_is_not_full_and_in_use(self) -> None:
        pool = paged(parts=True)
        slot = pool.allocate_slot(token_ids=[1, 2, 3])
        store(pool, [slot], [3])
        (block,) = pool.tables.blocks(slot)
        pool.free_slot(slot)
        pool.tables.add(pool.allocator.share([block]))
        assert self.broken(pool) == [("content", f"block {block}")]

    def test_tokens_beyond_the_blocks(self) -> None:
        pool = paged()
        slot = pool.allocate_slot(4)
        pool.tables.lengths[slot] = pool.tables.stored[slot] = 5
        assert self.broken(pool) == [("overrun", f"slot {slot}")]

    def test_tokens_computed_that_are_not_stored(self) -> None:
        pool = paged()
        slot = pool.allocate_slot(4)
        pool.tables.lengths[slot] = 3
        assert self.broken(pool) == [("overrun", f"slot {slot}")]

    def test_nothing_in_a_sound_pool(self) -> None:
        pool = paged()
        slot = pool.allocate_slot(4)
        store(pool, [slot], [4])
        assert self.broken(pool) == []
