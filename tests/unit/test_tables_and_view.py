from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvlab.errors import OutOfBlocksError, SlotError
from kvlab.kv.pools.paged import PagedKVCachePool
from kvlab.kv.storage import KVStorage
from kvlab.kv.table import BlockTables
from tests.support.pools import SPEC, paged, store


class TestBlockTables:
    @pytest.mark.parametrize("position", [-1, 8, 100])
    def test_a_position_outside_the_blocks_is_refused(self, position: int) -> None:
        tables = BlockTables(width=3, block_size=4)
        slot = tables.add([7, 2])
        with pytest.raises(SlotError, match=f"slot {slot}: position {position} is outside its 8 token slots"):
            tables.locate(slot, position)

    def test_growth_appends_and_keeps_the_old_entries(self) -> None:
        tables = BlockTables(width=4, block_size=4)
        slot = tables.add([7])
        tables.append(slot, [2, 9])
        assert tables.blocks(slot) == [7, 2, 9]
        tables.append(slot, [1])
        assert tables.blocks(slot) == [7, 2, 9, 1]

    def test_a_closed_slot_gives_its_blocks_and_its_number_back(self) -> None:
        tables = BlockTables(width=4, block_size=4)
        slot = tables.add([7, 2])
        tables.lengths[slot] = 5
        assert tables.remove(slot) == [7, 2]
        assert len(tables) == 0
        again = tables.add([3])
        assert tables.blocks(again) == [3]
        assert int(tables.lengths[again]) == 0

    def test_more_slots_than_it_began_with_leave_the_first_as_they_were(self) -> None:
        tables = BlockTables(width=2, block_size=4)
        slots = [tables.add([index, 1000 + index]) for index in range(100)]
        assert len(set(slots)) == len(tables) == 100
        assert [tables.blocks(slot) for slot in slots] == [[index, 1000 + index] for index in range(100)]
        assert tables.live == set(slots)

    @pytest.mark.parametrize("slot", [1, -1, 99, True, None])
    def test_a_slot_that_is_not_live_is_refused_by_name(self, slot: Any) -> None:
        tables = BlockTables(width=2, block_size=4)
        live = tables.add([0])
        message = rf"slot {slot!r} is not live; live slots: \[{live}\]"
        for call in (tables.check, tables.blocks, tables.remove, lambda slot: tables.locate(slot, 0)):
            with pytest.raises(SlotError, match=message):
                call(slot)
        assert tables.live == {live}


@dataclass
class Batch:
    """A step over sequences whose blocks lie scattered over the pool."""

    pool: PagedKVCachePool
    slots: list[int]
    stored: list[int]
    new: list[int]


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Prefill from nothing, chunks after a stored prefix, and decodes (one new token), mixed."""
    block_size = draw(st.integers(1, 5))
    stored = draw(st.lists(st.integers(0, 12), min_size=1, max_size=5))
    new = [draw(st.one_of(st.just(1), st.integers(1, 9))) for _ in stored]
    pool = PagedKVCachePool(110, block_size, 21, KVStorage(SPEC, 110, block_size))
    scatter = pool.allocator.allocate(110)
    pool.allocator.free(draw(st.permutations(scatter)))
    slots = [pool.allocate_slot() for _ in stored]
    for slot in draw(st.permutations([slot for slot, n in zip(slots, stored, strict=True) for _ in range(n)])):
        store(pool, [slot], [1])
    order = draw(st.permutations(range(len(slots))))
    chosen = ([values[index] for index in order] for values in (slots, stored, new))
    batch = Batch(pool, *chosen)
    pool.reserve(batch.slots, batch.new)
    return batch


class TestView:
    @given(batch=batches())
    def test_metadata_is_that_of_a_naive_computation(self, batch: Batch) -> None:
        pool, view = batch.pool, batch.pool.view(batch.slots, batch.new)
        positions, places, query_start, seq_lens = [], [], [0], []
        for slot, stored, new in zip(batch.slots, batch.stored, batch.new, strict=True):
            for position in range(stored, stored + new):
                block, offset = pool.tables.locate(slot, position)
                positions.append(position)
                places.append(block * pool.block_size + offset)
            query_start.append(query_start[-1] + new)
            seq_lens.append(stored + new)
        assert view.positions.tolist() == positions
        assert view.slot_mapping.tolist() == places
        assert view.query_start.tolist() == view.starts == query_start
        assert view.seq_lens.tolist() == view.lengths == seq_lens
        assert view.num_new == batch.new
        assert (view.num_sequences, view.num_tokens) == (len(batch.slots), sum(batch.new))
        needed = [-(-length // pool.block_size) for length in seq_lens]
        assert view.block_tables.shape == (len(batch.slots), max(needed))
        for row, (slot, blocks) in enumerate(zip(batch.slots, needed, strict=True)):
            expected = pool.tables.blocks(slot)[:blocks]
            assert view.block_tables[row, :blocks].tolist() == view.blocks(row) == expected

    def test_types_are_those_that_kernels_take(self) -> None:
        pool = paged()
        view = pool.view([pool.allocate_slot(4)], [3])
        assert view.positions.dtype == view.slot_mapping.dtype == torch.int64
        assert view.query_start.dtype == view.seq_lens.dtype == view.block_tables.dtype == torch.int32
        assert view.device == torch.device("cpu")

    @given(batch=batches())
    def test_update_writes_each_token_to_its_place_and_nowhere_else(self, batch: Batch) -> None:
        pool, view = batch.pool, batch.pool.view(batch.slots, batch.new)
        k, v = torch.rand(2, view.num_tokens, 2, 4) + 1
        view.update(1, k, v)
        for cache, given_tokens in ((view.keys, k), (view.values, v)):
            flat = cache(1).transpose(1, 2).reshape(-1, 2, 4)  # [token slots of the pool, kv_heads, head_dim]
            assert torch.equal(flat[view.slot_mapping], given_tokens)
            assert int(flat.count_nonzero()) == given_tokens.numel()
            assert int(cache(0).count_nonzero()) == 0
        assert pool.audit() == []

    @given(batch=batches())
    def test_gather_joins_the_blocks_of_a_sequence_in_order(self, batch: Batch) -> None:
        pool, view = batch.pool, batch.pool.view(batch.slots, batch.new)
        assert pool.storage is not None
        pool.storage.keys.copy_(torch.rand_like(pool.storage.keys))
        pool.storage.values.copy_(torch.rand_like(pool.storage.values))
        for index, slot in enumerate(batch.slots):
            places = [pool.tables.locate(slot, position) for position in range(view.lengths[index])]
            for layer in range(2):
                k, v = view.gather(layer, index)
                keys, values = view.keys(layer), view.values(layer)
                assert torch.equal(k, torch.stack([keys[block, :, offset] for block, offset in places], dim=1))
                assert torch.equal(v, torch.stack([values[block, :, offset] for block, offset in places], dim=1))

    @pytest.mark.parametrize("length", [1, 3, 4])
    def test_gather_of_one_block_is_a_slice_of_the_pool(self, length: int) -> None:
        pool = paged()
        pool.allocate_slot(4)
        slot = pool.allocate_slot(length)
        k, v = pool.view([slot], [length]).gather(1, 0)
        assert pool.storage is not None
        (block,) = pool.tables.blocks(slot)
        for part, cache in ((k, pool.storage.keys), (v, pool.storage.values)):
            assert part.shape == (2, length, 4)
            assert part.data_ptr() == cache[1, block].data_ptr()
            assert part.untyped_storage().data_ptr() == cache.untyped_storage().data_ptr()

    def test_gather_of_several_blocks_reuses_its_buffers(self) -> None:
        pool = paged()
        slots = [pool.allocate_slot(9), pool.allocate_slot(6)]
        view = pool.view(slots, [9, 6])
        first, second = view.gather(0, 0), view.gather(0, 1)
        assert [part.data_ptr() for part in first] == [part.data_ptr() for part in second]
        assert first[0].data_ptr() != first[1].data_ptr()

    def test_advance_makes_the_tokens_part_of_the_sequences(self) -> None:
        pool = paged()
        first, second = pool.allocate_slot(5), pool.allocate_slot(2)
        view = pool.view([second, first], [2, 5])
        assert [pool.get_seq_len(slot) for slot in (first, second)] == [0, 0]
        view.advance()
        assert [pool.get_seq_len(slot) for slot in (first, second)] == [5, 2]
        assert pool.stats().tokens_stored == 7

    def test_rollback_leaves_the_sequences_as_long_as_they_were(self) -> None:
        pool = paged()
        slot = pool.allocate_slot(5)
        pool.view([slot], [5]).rollback()
        assert pool.get_seq_len(slot) == 0

    @pytest.mark.parametrize("first", ["advance", "rollback"])
    @pytest.mark.parametrize("second", ["advance", "rollback"])
    def test_a_step_ends_once(self, first: str, second: str) -> None:
        pool = paged()
        slot = pool.allocate_slot(8)
        view = pool.view([slot], [3])
        getattr(view, first)()
        length = pool.get_seq_len(slot)
        with pytest.raises(RuntimeError, match="already advanced or rolled back"):
            getattr(view, second)()
        assert pool.get_seq_len(slot) == length

    def test_it_reserves_what_is_not_reserved(self) -> None:
        pool = paged()
        reserved, other = pool.allocate_slot(4), pool.allocate_slot(4)
        pool.reserve([reserved], [5])
        assert pool.view([reserved, other], [5, 9]).lengths == [5, 9]
        assert [len(pool.tables.blocks(slot)) for slot in (reserved, other)] == [2, 3]
        with pytest.raises(SlotError, match=f"slot {other} is reserved for this step already"):
            pool.reserve([other], [9])

    def test_without_room_it_is_refused_by_name(self) -> None:
        pool = paged(num_blocks=2)
        roomy, full = pool.allocate_slot(4), pool.allocate_slot(4)
        with pytest.raises(OutOfBlocksError, match=rf"1 wanted for slots \[{full}\], 0 free"):
            pool.view([roomy, full], [4, 5])
        assert pool.view([roomy, full], [4, 4]).lengths == [4, 4]

    def test_of_another_number_of_tokens_than_was_reserved_is_refused(self) -> None:
        pool = paged()
        slot, other = pool.allocate_slot(4), pool.allocate_slot(4)
        pool.reserve([slot], [3])
        with pytest.raises(SlotError, match=f"slot {slot}: 3 tokens were reserved for this step, not 4"):
            pool.view([other, slot], [9, 4])
        assert len(pool.tables.blocks(other)) == 1

    def test_its_uses_for_prefill_and_decode(self) -> None:
        pool = paged()
        slot, other = pool.allocate_slot(8), pool.allocate_slot(4)
        for view, tokens in (
            (lambda: pool.prefill_view(slot), [8]),
            (lambda: pool.batched_prefill_view([slot, other], [5, 4]), [5, 4]),
            (lambda: pool.decode_view([other, slot]), [1, 1]),
        ):
            step = view()
            assert step.num_new == tokens
            step.rollback()
        with pytest.raises(SlotError, match="slot 99 is not live"):
            pool.prefill_view(99)

    def test_growth_of_the_tables_leaves_an_open_view_as_it_was(self) -> None:
        pool = paged(num_blocks=64)
        slot = pool.allocate_slot(6)
        view = pool.view([slot], [6])
        expected = [block * 4 + offset for block, offset in (pool.tables.locate(slot, p) for p in range(6))]
        for _ in range(40):
            pool.allocate_slot(1)
        assert view.slot_mapping.tolist() == expected
        view.advance()
        assert pool.get_seq_len(slot) == 6
