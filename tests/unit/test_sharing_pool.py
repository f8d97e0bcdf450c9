"""Prefix sharing and copy-on-write in a pool of 16 blocks of 4 tokens."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from kvlab.errors import OutOfBlocksError, SlotError
from kvlab.kv.pool import BlockPool
from kvlab.kv.pools.paged import PagedKVCachePool
from tests.property.reference import look, state
from tests.support.pools import SPEC, paged, sharing, store

PROMPT = list(range(100, 108))  # two blocks


def computed(pool: BlockPool, tokens: list[int], salt: str | None = None) -> int:
    """A slot whose tokens were all computed."""
    slot = pool.allocate_slot(token_ids=tokens, salt=salt)
    write(pool, [slot], [len(tokens) - pool.get_seq_len(slot)])
    return slot


def cached(pool: BlockPool, tokens: list[int], salt: str | None = None) -> list[int]:
    """Compute a prompt and close its slot; returns its blocks."""
    slot = computed(pool, tokens, salt)
    blocks = pool.tables.blocks(slot)
    pool.free_slot(slot)
    return blocks


def write(pool: BlockPool, slots: list[int], new: list[int]) -> None:
    """A step that writes random K and V."""
    view = pool.view(slots, new)
    for layer in range(SPEC.num_layers):
        view.update(layer, *torch.rand(2, sum(new), SPEC.num_kv_heads, SPEC.head_dim))
    view.advance()


def contents(pool: BlockPool, slot: int, length: int | None = None) -> list[torch.Tensor]:
    """K and V of a slot on every layer, copied."""
    view = look(pool, [slot])
    return [part[:, :length].clone() for layer in range(SPEC.num_layers) for part in view.gather(layer, 0)]


def equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


class TestHits:
    def test_a_cached_prompt_costs_its_last_token_and_writes_nothing(self) -> None:
        pool = sharing()
        blocks = cached(pool, PROMPT)
        assert pool.storage is not None
        before = pool.storage.keys.clone(), pool.storage.values.clone()
        slot = pool.allocate_slot(token_ids=PROMPT)
        assert pool.tables.blocks(slot) == blocks
        assert pool.get_seq_len(slot) == 7
        view = pool.view([slot], [1])
        assert (view.positions.tolist(), view.slot_mapping.tolist(), view.lengths) == ([7], [-1], [8])
        for layer in range(SPEC.num_layers):
            view.update(layer, *torch.full((2, 1, SPEC.num_kv_heads, SPEC.head_dim), torch.nan))
        view.advance()
        assert torch.equal(pool.storage.keys, before[0])
        assert torch.equal(pool.storage.values, before[1])
        assert (pool.get_seq_len(slot), pool.stats().blocks_in_use, pool.stats().tokens_stored) == (8, 2, 8)
        assert (pool.counters().prompt_tokens, pool.counters().hit_tokens) == (16, 7)
        assert pool.audit() == []

    def test_in_one_batch_with_one_that_writes(self) -> None:
        pool = sharing()
        cached(pool, PROMPT)
        slot, other = pool.allocate_slot(token_ids=PROMPT), pool.allocate_slot(token_ids=[1, 2, 3])
        view = pool.view([slot, other], [1, 3])
        (block,) = pool.tables.blocks(other)
        assert view.slot_mapping.tolist() == [-1, 4 * block, 4 * block + 1, 4 * block + 2]
        k, v = torch.rand(2, 4, SPEC.num_kv_heads, SPEC.head_dim)
        view.update(0, k, v)
        keys, values = view.gather(0, 1)
        assert torch.equal(keys, k[1:].transpose(0, 1))
        assert torch.equal(values, v[1:].transpose(0, 1))

    def test_a_slot_of_unknown_tokens_is_not_shared(self) -> None:
        pool = sharing()
        slot = pool.allocate_slot(8)
        store(pool, [slot], [8])
        assert pool.stats().blocks_cached == 0
        pool.free_slot(slot)
        assert pool.stats().blocks_cached == 0

    def test_tokens_behind_unknown_ones_are_not_taken_for_a_prompt(self) -> None:
        """A step computed a token that the list did not have: what is appended later stands elsewhere."""
        pool = sharing()
        tokens: list[int] = []
        slot = pool.allocate_slot(token_ids=tokens)
        write(pool, [slot], [4])
        for token in (*PROMPT[:4], *PROMPT[:4]):
            tokens.append(token)
            write(pool, [slot], [1])
        assert pool.get_seq_len(pool.allocate_slot(token_ids=[*PROMPT[:4], 1])) == 0

    def test_blocks_filled_by_a_fork_without_a_list_of_its_own_are_not_shared(self) -> None:
        pool = sharing()
        tokens = list(PROMPT)
        slot = computed(pool, tokens)
        copy = pool.fork_slot(slot)
        tokens += [1] * 4  # of the source alone
        write(pool, [copy], [4])
        assert pool.get_seq_len(pool.allocate_slot(token_ids=[*PROMPT, 1, 1, 1, 1, 1])) == 8

    def test_a_pool_that_does_not_share_finds_nothing(self) -> None:
        pool = paged()
        cached(pool, PROMPT)
        assert pool.get_seq_len(pool.allocate_slot(token_ids=PROMPT)) == 0
        assert pool.stats().blocks_cached == 0


class TestSalt:
    @pytest.mark.parametrize("salt", [1.5, b"a", ("a",), ["a"]])
    def test_of_another_type_is_refused(self, salt: object) -> None:
        pool = sharing()
        before = state(pool)
        with pytest.raises(SlotError, match="must be text or a whole number"):
            pool.allocate_slot(token_ids=PROMPT, salt=salt)  # type: ignore[arg-type]
        assert state(pool) == before


class TestDemand:
    """A hit that nobody references takes a block out of the free queue, too."""

    @pytest.mark.parametrize("eviction", ["lru", "fifo", "lfu"])
    def test_cached_hits_count(self, eviction: str) -> None:
        pool = sharing(num_blocks=5, eviction=eviction)
        cached(pool, PROMPT)
        other = computed(pool, [7] * 8)  # 3 blocks are free, 2 of them cached
        before = state(pool)
        with pytest.raises(OutOfBlocksError) as caught:
            pool.allocate_slot(token_ids=[*PROMPT, *range(8)])
        assert (caught.value.wanted, caught.value.free, caught.value.evictable) == (4, 3, 2)
        assert state(pool) == before
        pool.free_slot(other)
        assert pool.get_seq_len(pool.allocate_slot(token_ids=[*PROMPT, *range(8)])) == 8

    def test_hits_that_run_do_not(self) -> None:
        pool = sharing(num_blocks=5)
        computed(pool, PROMPT)
        assert pool.get_seq_len(pool.allocate_slot(token_ids=[*PROMPT, *range(12)])) == 8
        assert pool.free_slot_count() == 0

    @pytest.mark.parametrize(("keep_free", "fits"), [(0, True), (1, True), (2, False), (9, False)])
    def test_what_is_to_be_left_is_left(self, keep_free: int, fits: bool) -> None:
        pool = sharing(num_blocks=5)
        cached(pool, PROMPT)
        if fits:
            pool.allocate_slot(token_ids=[*PROMPT, *range(8)], keep_free=keep_free)
            assert pool.free_slot_count() == 1
            return
        before = state(pool)
        with pytest.raises(OutOfBlocksError) as caught:
            pool.allocate_slot(token_ids=[*PROMPT, *range(8)], keep_free=keep_free)
        assert (caught.value.wanted, caught.value.free) == (4, max(0, 5 - keep_free))
        assert state(pool) == before


class TestSameStep:
    def test_a_block_is_shared_once_the_step_that_fills_it_is_prepared(self) -> None:
        pool = sharing()
        first = pool.allocate_slot(token_ids=[*PROMPT, 1])
        early = pool.allocate_slot(token_ids=[*PROMPT, 2])
        pool.reserve([first], [9])
        late = pool.allocate_slot(token_ids=[*PROMPT, 2])
        assert [pool.get_seq_len(slot) for slot in (early, late)] == [0, 8]
        stats, done = pool.stats(), pool.counters()
        assert (done.hit_tokens, done.same_step_hit_tokens, stats.tokens_stored) == (8, 8, 0)
        write(pool, [first, late], [9, 1])
        assert equal(contents(pool, first, 8), contents(pool, late, 8))
        assert pool.stats().tokens_stored == 10
        pool.allocate_slot(token_ids=[*PROMPT, 3])
        assert (pool.counters().hit_tokens, pool.counters().same_step_hit_tokens) == (16, 8)
        assert pool.audit() == []

    def test_the_last_token_of_a_prompt_that_is_filled_as_a_whole_is_no_hit(self) -> None:
        pool = sharing()
        first = pool.allocate_slot(token_ids=PROMPT)
        pool.reserve([first], [8])
        second = pool.allocate_slot(token_ids=PROMPT)
        assert pool.get_seq_len(second) == 7
        assert (pool.counters().hit_tokens, pool.counters().same_step_hit_tokens) == (7, 7)
        pool.view([first, second], [8, 1]).rollback()
        assert (pool.counters().hit_tokens, pool.counters().same_step_hit_tokens) == (0, 0)

    def test_a_step_that_failed_takes_its_blocks_back(self) -> None:
        pool = sharing()
        first = pool.allocate_slot(token_ids=PROMPT)
        pool.reserve([first], [8])
        second = pool.allocate_slot(token_ids=PROMPT)
        pool.view([first, second], [8, 1]).rollback()
        assert pool.shares_prefixes
        assert (list(pool.index.nodes()), pool.index._roots) == ([], {})
        assert pool.audit() == []
        assert pool.get_seq_len(pool.allocate_slot(token_ids=PROMPT)) == 0
        pool.free_slot(second)
        pool.free_slot(first)
        assert (pool.stats().blocks_cached, pool.audit()) == (0, [])

    def test_blocks_of_a_failed_step_are_no_hits(self) -> None:
        """Its first tokens were never computed."""
        pool = sharing()
        first = pool.allocate_slot(token_ids=PROMPT)
        pool.reserve([first], [8])
        second = pool.allocate_slot(token_ids=[*PROMPT, 1])
        pool.view([first, second], [8, 1]).rollback()
        assert (pool.get_seq_len(first), pool.get_seq_len(second)) == (0, 0)

    def test_the_same_slot_shares_once_it_is_run_again(self) -> None:
        pool = sharing()
        slot = pool.allocate_slot(token_ids=PROMPT)
        pool.view([slot], [8]).rollback()
        write(pool, [slot], [8])
        assert pool.get_seq_len(pool.allocate_slot(token_ids=PROMPT)) == 7

    def test_a_slot_freed_before_its_step_ran_takes_its_blocks_back(self) -> None:
        pool = sharing()
        slot = pool.allocate_slot(token_ids=PROMPT)
        pool.reserve([slot], [8])
        pool.free_slot(slot)
        assert pool.shares_prefixes
        assert (list(pool.index.nodes()), pool.stats().blocks_cached, pool.audit()) == ([], 0, [])

    @pytest.mark.parametrize("make_pool", [sharing, paged])
    def test_a_slot_freed_in_a_step_leaves_the_others_theirs(
        self, make_pool: Callable[[], PagedKVCachePool]
    ) -> None:
        pool = make_pool()
        slot, other = pool.allocate_slot(token_ids=PROMPT), pool.allocate_slot(token_ids=[1] * 6)
        view = pool.view([slot, other], [8, 6])
        pool.free_slot(slot)
        view.rollback()
        write(pool, [other], [6])
        assert (pool.get_seq_len(other), pool.stats().blocks_in_use, pool.audit()) == (6, 2, [])


class TestMerge:
    def test_equal_blocks_become_one_once_the_second_is_computed(self) -> None:
        pool = sharing()
        first, second = (pool.allocate_slot(token_ids=[*PROMPT, last]) for last in (1, 2))
        own = pool.tables.blocks(second)
        view = pool.view([first, second], [9, 9])
        assert pool.tables.blocks(second) == own  # until then it writes its own
        k = torch.arange(9.0).repeat(2)[:, None, None].expand(18, SPEC.num_kv_heads, SPEC.head_dim)
        for layer in range(SPEC.num_layers):
            view.update(layer, k, -k)
        view.advance()
        assert pool.tables.blocks(second) == [*pool.tables.blocks(first)[:2], own[2]]
        stats = pool.stats()
        assert pool.counters().merged_blocks == 2
        assert (stats.shared_blocks, stats.blocks_in_use, stats.tokens_stored) == (2, 4, 10)
        assert equal(contents(pool, first), contents(pool, second))
        assert set(own[:2]) <= pool.allocator.free_block_ids()
        assert pool.audit() == []

    def test_with_an_unreferenced_cached_block(self) -> None:
        pool = sharing()
        slot = pool.allocate_slot(token_ids=PROMPT)
        other = pool.allocate_slot(token_ids=PROMPT)
        write(pool, [other], [8])
        blocks = pool.tables.blocks(other)
        pool.free_slot(other)
        write(pool, [slot], [8])
        assert pool.tables.blocks(slot) == blocks
        assert (pool.stats().blocks_in_use, pool.stats().tokens_stored, pool.stats().blocks_cached) == (2, 8, 0)
        assert pool.audit() == []

    def test_what_a_closed_slot_kept_of_proposals_is_evicted_before_the_equal_block_that_it_continues(self) -> None:
        pool = PagedKVCachePool(8, 1, 20, prefix_sharing=True)
        own = [10]
        slot = pool.allocate_slot(token_ids=own)
        pool.view([slot], [1]).advance()
        own.append(11)
        pool.reserve([slot], [3], [2])
        pool.view([slot], [3]).advance(np.array([3]))
        other = pool.allocate_slot(token_ids=[10, 11, 12])
        pool.view([other], [1]).advance()
        pool.free_slot(other)
        own += [12, 13, 14]
        pool.free_slot(slot)
        assert pool.prefix_tokens(own) == pool.stats().blocks_cached == 4
        pool.allocate_slot(5)
        assert pool.prefix_tokens(own) == pool.stats().blocks_cached == 3
        assert pool.audit() == []


class TestPreempted:
    def test_finds_its_own_blocks_and_that_is_no_hit(self) -> None:
        pool = sharing()
        blocks = cached(pool, [*PROMPT, 1])
        slot = pool.allocate_slot(token_ids=[*PROMPT, 1], resumed=True)
        assert pool.tables.blocks(slot)[:2] == blocks[:2]
        done = pool.counters()
        assert (done.prompt_tokens, done.hit_tokens, done.recompute_hit_tokens) == (9, 0, 8)
