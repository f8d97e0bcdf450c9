"""Groups of layers, and what they hold of a sequence."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from kvlab.errors import OutOfBlocksError
from kvlab.kv.groups import LayerGroup, layer_groups, longest_sequence
from kvlab.kv.lending import lend
from kvlab.kv.pools.paged import PagedKVCachePool
from kvlab.kv.spec import KVSpec
from kvlab.kv.storage import KVStorage

FULL, WINDOW = LayerGroup((0,)), LayerGroup((1,), 32)


def pool_of(groups: tuple[LayerGroup, ...], blocks: int = 60, *, size: int = 16, **others: Any) -> PagedKVCachePool:
    storage = KVStorage(KVSpec(len(groups), 1, 2, "float32", groups=groups), blocks, size)
    return PagedKVCachePool(blocks, size, 500, storage, prefix_sharing=True, groups=groups, **others)


def compute(pool: PagedKVCachePool, slot: int, tokens: int) -> None:
    pool.view([slot], [tokens]).advance()


def held(pool: PagedKVCachePool, slot: int) -> list[int]:
    return [len(group.tables.blocks(slot)) for group in pool.groups]


class TestLayerGroups:
    def test_have_as_many_layers_as_the_rarest_kind(self) -> None:
        gemma3_27b = [None if layer % 6 == 5 else 1024 for layer in range(62)]
        full, *windows = layer_groups(gemma3_27b, 131_072)
        assert (len(full.layers), full.window) == (10, None)
        assert [len(group.layers) for group in windows] == [10, 10, 10, 10, 10, 2]
        assert {group.window for group in windows} == {1024}
        assert sorted(layer for group in (full, *windows) for layer in group.layers) == list(range(62))

    def test_of_nearly_equal_kinds_have_as_many_as_the_larger(self) -> None:
        assert [len(group.layers) for group in layer_groups([None, 8] * 6 + [8], 100)] == [6, 7]

    def test_without_a_window_or_with_one_that_no_sequence_leaves_are_one(self) -> None:
        assert layer_groups([None, None], 100) == (LayerGroup((0, 1)),)
        assert layer_groups([None, 100], 100) == (LayerGroup((0, 1)),)
        assert layer_groups([99, 99], 100) == (LayerGroup((0, 1), 99),)

    @pytest.mark.parametrize("block_size", [1, 4, 16])
    @pytest.mark.parametrize("window", [1, 3, 4, 16, 30, 33])
    def test_keep_what_a_query_sees(self, window: int, block_size: int) -> None:
        group = LayerGroup((0,), window)
        for tokens in range(100):
            first = group.first_block(tokens, block_size) * block_size
            assert max(tokens - window - block_size, -1) < first <= max(tokens - window, 0)
            assert group.num_blocks(tokens, block_size) <= group.most_blocks(tokens, block_size, 1)

    def test_longest_sequence_is_the_last_that_fits(self) -> None:
        assert longest_sequence([FULL], 10, 16, step_tokens=1, most=1000) == 160
        assert longest_sequence([FULL, WINDOW], 10, 16, step_tokens=1, most=1000) == 112  # 7 blocks, and 3
        assert longest_sequence([WINDOW], 3, 16, step_tokens=1, most=1000) == 1000
        assert longest_sequence([WINDOW], 2, 16, step_tokens=1, most=1000) == 32


class TestPoolOfGroups:
    def test_holds_what_vllm_says_its_hybrid_manager_holds(self) -> None:
        """One group of full attention, two with a window of 32 tokens: 7 + 2 + 2 blocks for 112 tokens."""
        pool = pool_of((FULL, WINDOW, LayerGroup((2,), 32)))
        slot = pool.allocate_slot(token_ids=list(range(112)))
        compute(pool, slot, 111)
        assert held(pool, slot) == [7, 7, 7]
        compute(pool, slot, 1)
        assert held(pool, slot) == [7, 2, 2]
        assert pool.stats().blocks_in_use == 11
        assert not pool.audit()

    def test_gives_a_prompt_no_more_blocks_of_a_window_than_its_next_step_needs(self) -> None:
        pool = pool_of((FULL, WINDOW), step_tokens=64)
        slot = pool.allocate_slot(token_ids=list(range(320)))
        assert held(pool, slot) == [20, 4]
        compute(pool, slot, 64)
        assert held(pool, slot) == [20, 4]
        compute(pool, slot, 60)
        assert held(pool, slot) == [20, 6]  # from token 33 on, which the step's first token sees
        compute(pool, slot, 1)
        assert held(pool, slot) == [20, 3]

    def test_holds_what_a_step_sees_until_the_next_but_one_is_decided_where_that_is_ahead(self) -> None:
        pool = pool_of((FULL, WINDOW), ahead=True)
        slot = pool.allocate_slot(token_ids=list(range(70)))
        for computed, left in ((64, [5, 5]), (1, [5, 5]), (1, [5, 3])):
            compute(pool, slot, computed)
            assert held(pool, slot) == left

    def test_opens_a_slot_where_a_window_has_room_for_all_that_its_steps_hold_at_once(self) -> None:
        pool, prompt = pool_of((FULL, WINDOW), blocks=13, step_tokens=16), list(range(160))
        with pytest.raises(OutOfBlocksError, match="14 wanted"):  # 10, and 4 for 31 tokens and 16 more
            pool.allocate_slot(token_ids=prompt, first_tokens=16)
        slot = pool.allocate_slot(token_ids=prompt, first_tokens=16, all_fit=False)
        assert held(pool, slot) == [1, 1]

    @pytest.mark.parametrize(
        ("blocks", "keep_free", "refused"), [(18, 5, None), (18, 8, "11 wanted"), (16, 0, "17 wanted")]
    )
    def test_that_a_window_gives_back_may_come_out_of_what_is_kept_free(
        self, blocks: int, keep_free: int, refused: str | None
    ) -> None:
        pool, prompt = pool_of((FULL, WINDOW), blocks=blocks, step_tokens=64), list(range(160))
        with pytest.raises(OutOfBlocksError, match=refused) if refused else nullcontext():
            pool.allocate_slot(token_ids=prompt, first_tokens=16, keep_free=keep_free)

    def test_of_what_was_found_all_is_taken_off_the_room_of_a_window_as_in_vllm(self) -> None:
        pool, prompt = pool_of((FULL, WINDOW), blocks=24, step_tokens=16), list(range(320))
        slot = pool.allocate_slot(token_ids=prompt[:160])
        for _ in range(10):
            compute(pool, slot, 16)
        pool.free_slot(slot)
        with pytest.raises(OutOfBlocksError, match="22 wanted"):  # 12 that are cached, and 10
            pool.allocate_slot(token_ids=prompt, first_tokens=16, keep_free=3)
        assert held(pool, pool.allocate_slot(token_ids=prompt, first_tokens=16)) == [11, 3]

    def test_a_slot_has_what_those_before_it_give_back(self) -> None:
        pool, slots = pool_of((FULL, WINDOW), blocks=12), list[int]()
        for first, computed in ((0, 48), (100, 47)):
            prompt = list(range(first, first + 50))
            slots.append(pool.allocate_slot(token_ids=prompt, first_tokens=computed, all_fit=False))
            compute(pool, slots[-1], computed)
        one, two = slots
        with pytest.raises(OutOfBlocksError) as refusal:  # wants two, and has given back one
            pool.reserve([one, two], [1, 1])
        assert refusal.value.slots == (one,)
        assert [held(pool, slot) for slot in slots] == [[3, 2], [3, 3]]
        pool.reserve([two, one], [1, 1])
        assert [held(pool, slot) for slot in slots] == [[4, 3], [3, 2]]

    def test_a_slot_that_does_not_fit_has_what_all_others_do_not_need(self) -> None:
        pool = pool_of((FULL, WINDOW), blocks=12)
        others = [pool.allocate_slot(token_ids=list(range(first, first + 48))) for first in (0, 100)]
        for slot in others:
            compute(pool, slot, 48)
        assert held(pool, pool.allocate_slot(16)) == [1, 1]
        assert [held(pool, slot) for slot in others] == [[3, 2], [3, 2]]

    def test_what_is_lent_is_not_given_back_for_another(self) -> None:
        pool = pool_of((LayerGroup((0,), 32),), blocks=8)
        slot = pool.allocate_slot(token_ids=list(range(112)))
        compute(pool, slot, 112)
        lent = lend(pool, pool.blocks(slot).tolist())
        pool.free_slot(slot)
        with pytest.raises(OutOfBlocksError):
            pool.allocate_slot(32)
        assert held(pool, lent) == [7]

    def test_opens_a_slot_for_all_groups_or_for_none(self) -> None:
        pool = pool_of((FULL, WINDOW), blocks=13)
        with pytest.raises(Exception, match="14"):
            pool.allocate_slot(token_ids=list(range(112)))
        assert pool.free_slot_count() == 13
        assert not pool.audit()

    def test_reserves_a_step_for_all_groups_or_for_none(self) -> None:
        pool = pool_of((FULL, WINDOW), blocks=15)
        slot = pool.allocate_slot(token_ids=list(range(112)))
        before = held(pool, slot)
        with pytest.raises(Exception, match="pool"):
            pool.reserve([slot], [113])
        assert held(pool, slot) == before

    def test_hits_no_longer_prefix_than_every_window_has_the_end_of(self) -> None:
        pool = pool_of((FULL, WINDOW), blocks=24)
        ids = list(range(160))
        slot = pool.allocate_slot(token_ids=[*ids, 7])
        compute(pool, slot, 160)
        compute(pool, slot, 1)
        pool.free_slot(slot)
        assert pool.prefix_tokens(ids) == 160
        # The window's first blocks were given back first, and are evicted first: the end is found all the same.
        other = pool.allocate_slot(6 * 16)
        assert pool.counters().evicted_blocks
        assert pool.prefix_tokens(ids) == 160
        assert pool.prefix_tokens(ids[:100]) == 0  # whose window is gone
        pool.free_slot(other)
        again = pool.allocate_slot(token_ids=ids)
        assert pool.get_seq_len(again) == 159
        assert held(pool, again) == [10, 2]
        assert not pool.audit()

    @pytest.mark.parametrize("states", [2, 3])
    def test_a_copied_state_fills_its_block_as_the_other_does(self, states: int) -> None:
        pool = pool_of((FULL, LayerGroup((1,), 2, states)))
        slot = pool.allocate_slot(token_ids=list(range(4)))
        compute(pool, slot, 4)
        pool.fork_slot(slot, list(range(4)))
        assert pool.stats().tokens_stored == 4 + 16
        compute(pool, slot, 1)
        assert pool.counters().cow_copies == 2
        assert pool.stats().tokens_stored == (4 + 16) + (5 + 16)

    def test_a_fork_shares_every_group_and_copies_what_it_writes(self) -> None:
        pool = pool_of((FULL, WINDOW))
        slot = pool.allocate_slot(token_ids=list(range(120)))
        compute(pool, slot, 120)
        used = pool.stats().blocks_in_use
        copy = pool.fork_slot(slot, rerun_last=True)
        assert pool.stats().blocks_in_use == used
        pool.view([copy, slot], [2, 1]).advance()
        assert pool.counters().cow_copies == 2  # of the last block, of each group
        assert not pool.audit()

    def test_whoever_shared_what_a_failed_step_would_have_filled_starts_over(self) -> None:
        pool = pool_of((FULL, WINDOW))
        ids = list(range(100))
        first = pool.allocate_slot(token_ids=ids)
        pool.reserve([first], [100])
        second = pool.allocate_slot(token_ids=[*ids[:96], 7, 8])
        assert pool.get_seq_len(second) == 96
        pool.view([first], [100]).rollback()
        assert pool.get_seq_len(second) == 0
        assert held(pool, second) == [0, 0]
        assert not pool.audit()
        compute(pool, second, 97)
        compute(pool, second, 1)
        assert held(pool, second) == [7, 3]

    def test_nothing_is_given_back_that_a_step_still_has_to_fill(self) -> None:
        """Whoever ran on with it is found when that step fails, although the window has moved on."""
        pool = pool_of((LayerGroup((0,), 32),))
        ids = list(range(150))
        first = pool.allocate_slot(token_ids=ids[:100])
        pool.reserve([first], [100])
        second = pool.allocate_slot(token_ids=ids)
        assert pool.get_seq_len(second) == 96
        compute(pool, second, 50)
        compute(pool, second, 4)
        pool.view([first], [100]).rollback()
        assert pool.get_seq_len(second) == 0
        assert not pool.audit()

    def test_the_view_of_a_layer_has_the_tables_of_its_group(self) -> None:
        pool = pool_of((FULL, WINDOW))
        slot = pool.allocate_slot(token_ids=list(range(100)))
        compute(pool, slot, 100)
        view = pool.view([slot], [1])
        for layer, group in enumerate(pool.groups):
            seen, entries = view.of_layer(layer), group.tables.entries[slot, :7]
            assert seen.block_tables.tolist() == [entries.tolist()]
            assert seen.slot_mapping.tolist() == [int(entries[6]) * 16 + 4]
        assert view.of_layer(1).block_tables[0, :4].tolist() == [0, 0, 0, 0]
        k, v = torch.full((2, 1, 1, 2), 3.0)
        view.of_layer(1).update(1, k, v)
        assert view.of_layer(1).gather(1, 0, 100)[0].tolist() == [[[3.0, 3.0]]]
        assert view.of_layer(0).gather(0, 0, 100)[0].tolist() == [[[0.0, 0.0]]]

    def test_names_the_blocks_of_every_group_and_none_that_were_given_back(self) -> None:
        pool = pool_of((FULL, WINDOW))
        slot = pool.allocate_slot(token_ids=list(range(100)))
        compute(pool, slot, 99)
        compute(pool, slot, 1)
        named = pool.blocks(slot).tolist()
        assert len(named) == len(set(named)) == 7 + 3
        assert set(named) == pool.allocator.allocated_block_ids()
        one, other = pool.view([slot], [1]).groups
        assert one.repeated_tokens() == other.repeated_tokens() == 0

    def test_speculated_tokens_are_forgotten_in_every_group(self) -> None:
        pool = pool_of((FULL, WINDOW))
        ids = list(range(94))
        slot = pool.allocate_slot(token_ids=ids)
        compute(pool, slot, 94)
        for _ in range(40):
            pool.reserve([slot], [5], [4])
            pool.view([slot], [5]).advance(np.array([2]))
            ids += [1, 2]
            assert not pool.audit()
        assert held(pool, slot) == [11, 3]


def test_what_a_slot_shared_is_no_hit_once_a_failed_step_makes_it_start_over() -> None:
    """The block before that of the failed step, too: the slot computes it again."""
    pool, prompt = pool_of((FULL, WINDOW)), list(range(40))
    first = pool.allocate_slot(token_ids=list(prompt))
    compute(pool, first, 16)
    pool.reserve([first], [16])
    second = pool.allocate_slot(token_ids=list(prompt))
    assert (pool.counters().hit_tokens, pool.counters().same_step_hit_tokens) == (32, 16)
    pool.view([first], [16]).rollback()
    assert (pool.counters().hit_tokens, pool.get_seq_len(second)) == (0, 0)
