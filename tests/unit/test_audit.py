from __future__ import annotations

from kvlab.kv.pool import KVCachePool
from tests.unit.pools import paged, store


class TestAudit:
    """Each rule finds what breaks it, by name."""

    def broken(self, pool: KVCachePool) -> list[tuple[str, str]]:
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
        assert str(pool.audit()[0]) == f"leaked: block {block}: 2 reference(s), 1 table entry(ies)"

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
        pool.allocator._free.pop()
        assert self.broken(pool) == [("conservation", "pool")]

    def test_tokens_beyond_the_blocks(self) -> None:
        pool = paged()
        slot = pool.allocate_slot(4)
        pool.tables.lengths[slot] = 5
        assert self.broken(pool) == [("overrun", f"slot {slot}")]

    def test_nothing_in_a_sound_pool(self) -> None:
        pool = paged()
        slot = pool.allocate_slot(4)
        store(pool, [slot], [4])
        assert self.broken(pool) == []
