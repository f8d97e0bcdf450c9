"""Parts of blocks that prompts find (`kv.partial_reuse`), in a pool of 16 blocks of 4 tokens."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from kvlab.cli.compose import compose_run
from kvlab.kv.eviction.lru import LruEviction
from kvlab.kv.groups import LayerGroup
from kvlab.kv.pool import BlockPool
from kvlab.kv.pools.paged import PagedKVCachePool
from kvlab.kv.retention import Limits, Retention
from kvlab.lab.run.peer_plan import plan_any
from kvlab.lab.run.reporter import Reporter
from kvlab.lab.terminal import Terminal
from tests.support.pools import paged
from tests.support.runs import context_of
from tests.unit.test_sharing_pool import PROMPT, cached, computed, contents, equal, write


class TestParts:
    """What a new slot finds of a block that it cannot share whole."""

    def found(self, pool: BlockPool, tokens: list[int], **others: Any) -> tuple[int, int]:
        """How many of its tokens a new slot has, and how many copies that took."""
        copies = pool.counters().cow_copies
        slot = pool.allocate_slot(token_ids=tokens, **others)
        assert pool.audit() == []
        return pool.get_seq_len(slot), pool.counters().cow_copies - copies

    def test_of_a_block_in_use_are_copied(self) -> None:
        pool = paged(parts=True)
        first = computed(pool, PROMPT)
        assert pool.prefix_tokens([*PROMPT[:7], 1, 2]) == 4  # schedulers and routers count whole blocks
        second = pool.allocate_slot(token_ids=[*PROMPT[:7], 1, 2])
        assert pool.get_seq_len(second) == 7
        assert equal(contents(pool, second), contents(pool, first, 7))
        done, stats = pool.counters(), pool.stats()
        assert (done.hit_tokens, done.cow_copies, stats.blocks_in_use, stats.tokens_stored) == (7, 1, 4, 11)
        before = contents(pool, first)
        write(pool, [second], [2])
        assert equal(contents(pool, first), before)
        assert pool.audit() == []

    def test_of_the_last_block_of_a_sequence_are_found_by_its_next_turn(self) -> None:
        pool = paged(parts=True)
        blocks = cached(pool, [*PROMPT, 1, 2])
        assert (pool.stats().blocks_cached, pool.stats().blocks_in_use) == (3, 0)
        slot = pool.allocate_slot(token_ids=[*PROMPT, 1, 2, 3, 4, 5])
        assert pool.get_seq_len(slot) == 10
        assert pool.tables.blocks(slot)[:3] == blocks  # nobody else needs the last: it is not copied
        assert (pool.counters().cow_copies, pool.counters().evicted_blocks, pool.stats().blocks_cached) == (0, 0, 0)
        assert pool.audit() == []

    def test_of_a_block_that_others_continue_leave_it_cached(self) -> None:
        pool = paged(parts=True)
        cached(pool, PROMPT)
        assert self.found(pool, [*PROMPT[:3], 1, 2]) == (3, 1)
        assert pool.prefix_tokens(PROMPT) == 8
        assert self.found(pool, [*PROMPT[:6], 1, 2]) == (6, 0)
        assert pool.prefix_tokens(PROMPT) == 4

    def test_of_a_pinned_block_leave_it_cached(self) -> None:
        retention = Retention(LruEviction, Limits(pinned=2))
        pool = PagedKVCachePool(16, 4, 40, prefix_sharing=True, partial_reuse=True, eviction=retention)
        slot = pool.allocate_slot(token_ids=PROMPT)
        pool.pin_prefix(slot, 8)
        pool.view([slot], [8]).advance()
        pool.free_slot(slot)
        assert self.found(pool, [*PROMPT[:6], 1, 2]) == (6, 1)
        assert pool.prefix_tokens(PROMPT) == 8

    def test_the_longest_one_is_taken_and_of_equal_ones_the_one_that_is_no_more(self) -> None:
        pool = paged(parts=True)
        for tail in ([1, 2, 3, 4], [1, 2, 5, 6], [1, 2]):
            cached(pool, [*PROMPT, *tail, *([9] * (len(tail) == 4))])
        assert self.found(pool, [*PROMPT, 1, 2, 5, 7, 8]) == (11, 1)  # others continue it
        assert self.found(pool, [*PROMPT, 1, 2, 0]) == (10, 0)
        assert self.found(pool, [*PROMPT, 1, 2, 0]) == (10, 1)

    def test_that_a_step_is_to_fill_are_not_found(self) -> None:
        pool = paged(parts=True)
        slot = pool.allocate_slot(token_ids=PROMPT)
        pool.reserve([slot], [8])
        assert self.found(pool, [*PROMPT[:6], 1, 2]) == (4, 0)  # a block of the same step, whole

    def test_without_their_last_token_and_not_where_nothing_is_to_be_reused(self) -> None:
        pool = paged(parts=True)
        cached(pool, [*PROMPT, 1, 2])
        assert self.found(pool, [*PROMPT, 1, 2], reuse=False) == (0, 0)
        assert self.found(pool, [*PROMPT, 1, 2], salt="other") == (0, 0)
        assert self.found(pool, [*PROMPT, 1, 2]) == (9, 0)

    def test_count_as_found_again_where_they_are(self) -> None:
        pool = paged(parts=True)
        cached(pool, [*PROMPT, 1, 2])
        pool.allocate_slot(token_ids=[*PROMPT, 1, 2, 3], resumed=True)
        assert (pool.counters().hit_tokens, pool.counters().recompute_hit_tokens) == (0, 10)

    def test_have_room_for_what_is_computed_behind_them(self) -> None:
        pool = paged(parts=True)
        cached(pool, [*PROMPT, 1, 2, 3])
        slot = pool.allocate_slot(token_ids=[*PROMPT, 1, 2, 3, *range(10)], first_tokens=4)
        assert (pool.get_seq_len(slot), len(pool.tables.blocks(slot))) == (11, 4)

    def test_of_a_fork_belong_to_the_last_that_has_them(self) -> None:
        pool = paged(parts=True)
        first = computed(pool, [*PROMPT, 1])
        second = pool.fork_slot(first, [*PROMPT, 1])
        pool.free_slot(first)
        assert self.found(pool, [*PROMPT, 1, 2]) == (8, 0)
        pool.free_slot(second)
        assert self.found(pool, [*PROMPT, 1, 2]) == (9, 0)

    def test_that_are_not_known_are_not_found(self) -> None:
        """A step computed tokens that the slot's list did not have: what is appended later stands elsewhere."""
        pool, tokens = paged(parts=True), [1, 2]
        slot = pool.allocate_slot(token_ids=tokens)
        write(pool, [slot], [4])
        tokens.append(9)
        pool.free_slot(slot)
        assert self.found(pool, [1, 2, 9, 5]) == (0, 0)

    def test_are_none_where_only_a_token_behind_the_list_is_not_in_a_whole_block(self) -> None:
        pool = paged(parts=True)
        slot = computed(pool, PROMPT)
        write(pool, [slot], [1])
        pool.free_slot(slot)
        assert (len(list(pool.index.nodes())), pool.stats().blocks_cached) == (2, 2)

    def test_are_not_found_where_layers_have_groups(self) -> None:
        groups = (LayerGroup((0,)), LayerGroup((1,), window=8))
        pool = PagedKVCachePool(16, 4, 40, prefix_sharing=True, partial_reuse=True, groups=groups)
        slot = pool.allocate_slot(token_ids=[*PROMPT, 1, 2])
        pool.view([slot], [10]).advance()
        pool.free_slot(slot)
        assert self.found(pool, [*PROMPT, 1, 2, 3]) == (8, 0)


@pytest.mark.parametrize("model", ["gemma3_tiny", "qwen3_tiny"])
def test_a_run_says_where_layers_have_windows(model: str, tmp_path: Path) -> None:
    words = ("executor=simulated", "hardware=h100_sxm", "framework=trtllm", "kv.num_blocks=64")
    config = compose_run([f"model={model}", "workload.num_requests=2", *words]).config
    printed = io.StringIO()
    Reporter(context_of(config, tmp_path, Terminal(file=printed, width=200))).announce(plan_any(config))
    said = "warning: kv.partial_reuse finds whole blocks alone here: layers of gemma3_tiny have sliding windows"
    assert (said in printed.getvalue()) is (model == "gemma3_tiny")
