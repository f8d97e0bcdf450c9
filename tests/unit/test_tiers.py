"""A tier's ledger, the pages of a pool's blocks, and loads of a pool without tensors."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from kvlab.errors import CapacityError, SlotError
from kvlab.kv.eviction import EVICTION_POLICIES, LruEviction
from kvlab.kv.pools.paged import PagedKVCachePool
from kvlab.kv.prefix import PrefixIndex
from kvlab.kv.spec import KVSpec, PageLayout
from kvlab.kv.storage import KVStorage
from kvlab.kv.tiers import host
from kvlab.kv.tiers.base import Key, key_of
from kvlab.kv.tiers.host import BlockPages, HostStore
from kvlab.kv.tiers.offload import Offload
from kvlab.kv.tiers.tier import Tier
from tests.support.tiers import SlowStore, modelled_pool, modelled_tier, slow_tier, tier_of, tiered_pool, zeros


def key(number: int) -> Key:
    return number.to_bytes(32, "big")


class TestLedger:
    def test_the_policy_says_what_goes_and_the_new_content_takes_its_place(self) -> None:
        tier = Tier("host", 2, 100, LruEviction())
        assert [tier.add(key(1)), tier.add(key(2))] == [(0, None), (1, None)]
        tier.refresh(key(1))
        assert tier.add(key(3)) == (1, key(2))
        assert (key(1) in tier, key(2) in tier, len(tier)) == (True, False, 2)

    def test_what_is_held_stays_until_it_is_released_as_often(self) -> None:
        tier = Tier("host", 1, 100, LruEviction())
        tier.add(key(1))
        assert [tier.hold(key(1)), tier.hold(key(1))] == [0, 0]
        for _ in range(2):
            assert tier.add(key(2)) is None
            tier.release(key(1))
        assert tier.add(key(2)) == (0, key(1))

    def test_what_is_lost_leaves_room_even_if_it_was_held(self) -> None:
        tier = Tier("host", 1, 100, LruEviction())
        tier.add(key(1))
        tier.hold(key(1))
        tier.drop(key(1))
        tier.release(key(1))
        assert tier.add(key(2)) == (0, None)
        assert list(tier.broken()) == []

    def test_room_that_is_not_used_takes_no_memory(self) -> None:
        tier = Tier("store", 10**15, 100, LruEviction())
        assert [tier.add(key(1)), tier.add(key(2))] == [(0, None), (1, None)]
        tier.drop(key(1))
        assert tier.add(key(3)) == (0, None)
        assert list(tier.broken()) == []

    @pytest.mark.parametrize("policy", EVICTION_POLICIES.names())
    def test_random_calls_leave_a_sound_ledger(self, policy: str) -> None:
        chance, tier = random.Random(policy), Tier("host", 6, 100, EVICTION_POLICIES.get(policy)())
        held: list[Key] = []
        evicted = 0
        for _ in range(400):
            asked = key(chance.randrange(12))
            if asked not in tier:
                added = tier.add(asked)
                evicted += added is not None and added[1] is not None
            elif chance.random() < 0.1:
                tier.drop(asked)
                held = [each for each in held if each != asked]
            elif chance.random() < 0.4 and len(held) < 4:
                tier.hold(asked)
                held.append(asked)
            elif chance.random() < 0.5:
                tier.refresh(asked)
            elif held:
                tier.release(held.pop(chance.randrange(len(held))))
            assert list(tier.broken()) == []
            assert all(each in tier for each in held)
            assert len(tier) <= 6
        assert evicted > 50


class TestKeys:
    def test_a_key_is_of_the_salt_and_all_tokens_and_the_same_in_every_tree(self) -> None:
        def last(tokens: list[int], salt: str | None = None) -> Key:
            index = PrefixIndex(2)
            node = index.extend(index.root(salt), tokens, list(range(len(tokens) // 2)), {})[-1]
            return key_of(node)

        assert last([1, 2, 3, 4]) == last([1, 2, 3, 4])
        others = [last([1, 2, 3, 4], "a"), last([3, 4]), last([1, 3, 3, 4]), last([1, 2, 3, 4, 3, 4])]
        assert len({last([1, 2, 3, 4]), *others}) == 5


class TestPages:
    @pytest.mark.parametrize("layout", list(PageLayout))
    @pytest.mark.parametrize(
        ("dtype", "value_dtype"),
        [
            ("float32", None),
            ("bfloat16", None),
            ("int8", None),
            ("fp8_e4m3", None),
            ("int4", None),
            ("int8", "int4"),
        ],
    )
    def test_a_block_comes_back_bit_for_bit_in_every_format(
        self, dtype: str, value_dtype: str | None, layout: PageLayout
    ) -> None:
        spec = KVSpec(3, 2, 32, dtype, value_dtype)
        storage = KVStorage(spec, 4, 5, layout=layout)
        pages = BlockPages(storage)
        assert pages.page_bytes == 5 * spec.bytes_per_token
        for tensor in storage.block_bytes():
            tensor.copy_(torch.randint(0, 256, tensor.shape, dtype=torch.uint8))
        before = [tensor.clone() for tensor in storage.block_bytes()]
        store = HostStore(2, pages.page_bytes)
        pages.save(2, store.page(1))
        pages.load(0, store.page(1))
        for tensor, old in zip(storage.block_bytes(), before, strict=True):
            assert torch.equal(tensor[:, 0], old[:, 2])
            assert torch.equal(tensor[:, 1:], old[:, 1:])
        assert not store.page(0).any()

    def test_memory_that_is_not_there_is_refused_before_it_is_taken(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(host, "_free_memory", lambda: 10 * 2**20)
        with pytest.raises(
            CapacityError, match=r"30 blocks take 30\.0 MiB .* 10\.0 MiB available; kv\.offload=9MiB"
        ):
            HostStore(30, 2**20)
        HostStore(2, 2**20)


def visit(pool: PagedKVCachePool, tokens: list[int]) -> None:
    slot = pool.allocate_slot(token_ids=tokens)
    assert not pool.is_loading(slot)
    pool.view([slot], [len(tokens) - pool.get_seq_len(slot)]).advance()
    pool.free_slot(slot)


def visited(pages: int = 16, **options: str) -> PagedKVCachePool:
    """A pool of 6 blocks of 4 tokens whose tier has the prompt 0 .. 15; a load takes a second."""
    pool = modelled_pool(6, modelled_tier(pages, **options))
    visit(pool, list(range(16)))
    visit(pool, list(range(100, 124)))
    return pool


class TestModelledLoads:
    def test_a_load_is_done_when_its_link_says_so(self) -> None:
        pool = visited()
        slot = pool.allocate_slot(token_ids=[*range(16), 99])
        assert (pool.is_loading(slot), pool.next_arrival(), pool.get_seq_len(slot)) == (True, 1.0, 0)
        for call in (pool.reserve, pool.view):
            with pytest.raises(SlotError, match=f"slot {slot} is being loaded"):
                call([slot], [1])
        with pytest.raises(SlotError, match=f"slot {slot} is being loaded"):
            pool.fork_slot(slot)
        assert pool.receive(0.9) == []
        assert pool.receive(1.0) == [slot]
        assert (pool.get_seq_len(slot), pool.next_arrival(), pool.audit()) == (16, None, [])

    def test_who_goes_first_leaves_the_load_to_those_who_wait_for_it(self) -> None:
        pool = visited()
        first = pool.allocate_slot(token_ids=list(range(16)))
        second = pool.allocate_slot(token_ids=[*range(8), 99])
        shared = pool.tables.blocks(first)[:2]
        assert pool.tables.blocks(second)[:2] == shared
        pool.free_slot(first)
        assert pool.audit() == []
        third = pool.allocate_slot(token_ids=list(range(16)))
        assert pool.tables.blocks(third)[:2] == shared
        assert not set(pool.tables.blocks(third)[2:]) & set(pool.tables.blocks(second))
        assert pool.audit() == []
        assert sorted(pool.receive(2.0)) == sorted([second, third])
        assert (pool.get_seq_len(second), pool.get_seq_len(third)) == (8, 15)
        assert pool.audit() == []

    def test_nobody_waits_for_what_all_have_left(self) -> None:
        pool = visited()
        pool.free_slot(pool.allocate_slot(token_ids=list(range(16))))
        assert (pool.next_arrival(), pool.receive(5.0), pool.audit()) == (None, [], [])

    def test_content_that_is_being_loaded_does_not_leave_its_tier(self) -> None:
        pool = visited(pages=4)
        assert pool.prefix_tokens(list(range(16))) == 16
        stored = tier_of(pool).counts.stored
        slot = pool.allocate_slot(token_ids=list(range(16)))  # evicts others, for which there is no room
        assert tier_of(pool).counts.stored == stored
        assert pool.receive(1.0) == [slot]
        assert pool.get_seq_len(slot) == 15

    def test_a_prompt_is_found_in_the_pool_then_in_a_tier(self) -> None:
        pool = modelled_pool(6, modelled_tier(16))
        visit(pool, list(range(16)))
        visit(pool, list(range(100, 116)))  # the tail of the other goes first
        slot = pool.allocate_slot(token_ids=list(range(16)))
        assert (pool.get_seq_len(slot), pool.is_loading(slot)) == (8, True)
        assert pool.prefix_tokens(list(range(16))) == 16
        pool.receive(1.0)
        assert pool.get_seq_len(slot) == 15
        counters = pool.counters()
        assert (counters.hit_tokens, counters.host_hit_tokens) == (15, 8)

    def test_two_tiers_pass_content_on(self) -> None:
        pool = modelled_pool(6, modelled_tier(2), modelled_tier(8, name="disk"))
        visit(pool, list(range(16)))
        visit(pool, list(range(100, 124)))
        assert (len(tier_of(pool)), len(tier_of(pool, 1))) == (2, 2)
        slot = pool.allocate_slot(token_ids=list(range(16)))
        assert pool.receive(1.0) == [slot]
        counters = pool.counters()
        assert (counters.host_hit_tokens, counters.disk_hit_tokens) == (8, 8)


def offload_of(pool: PagedKVCachePool) -> Offload:
    assert pool.offload is not None
    return pool.offload


def load_twice_to_a_block(pool: PagedKVCachePool, slot: int) -> None:
    blocks = offload_of(pool).loads[0].blocks
    blocks.update(dict.fromkeys(blocks, pool.tables.blocks(slot)[0]))


BREAKING: dict[str, Callable[[PagedKVCachePool, int], object]] = {
    "two contents in one": lambda pool, slot: tier_of(pool)._places.update({key(1): 0}),
    "places used and": lambda pool, slot: tier_of(pool)._unused.append(99),
    "its eviction has other places": lambda pool, slot: tier_of(pool)._policy.victim(),
    "not those that are being loaded": lambda pool, slot: tier_of(pool).hold(next(iter(tier_of(pool)._places))),
    "are not live": lambda pool, slot: offload_of(pool).waiting.update({77: offload_of(pool).waiting[slot]}),
    "two contents are loaded to one block": load_twice_to_a_block,
    "nobody holds it": lambda pool, slot: pool.allocator.force_free(pool.tables.blocks(slot)[:1]),
    "no slot waits for": lambda pool, slot: offload_of(pool).loads[0].users.clear(),
    "is not what the loads are of": lambda pool, slot: offload_of(pool).loading.popitem(),
}


@pytest.mark.parametrize("text", BREAKING)
def test_the_audit_finds_what_is_broken(text: str) -> None:
    pool = visited()
    slot = pool.allocate_slot(token_ids=list(range(16)))
    assert pool.audit() == []
    BREAKING[text](pool, slot)
    assert any(text in finding.detail for finding in pool.audit() if finding.rule == "tier")


def test_slots_that_waited_for_a_lost_page_do_not_write_one_block() -> None:
    store = SlowStore()
    pool = tiered_pool(12, 0, store, max_seq_len=40)
    visit(pool, list(range(16)))
    visit(pool, list(range(100, 136)))
    visit(pool, list(range(200, 236)))
    store.broken.update(tier_of(pool)._places)
    slots = [pool.allocate_slot(token_ids=[*range(16), number]) for number in (50, 51)]
    assert pool.tables.blocks(slots[0])[:4] == pool.tables.blocks(slots[1])[:4]
    pool.await_arrival(10)
    assert sorted(pool.receive(0)) == sorted(slots)
    pool.reserve(slots, [17, 17])
    assert not set(pool.tables.blocks(slots[0])) & set(pool.tables.blocks(slots[1]))
    assert pool.counters().cow_copies == 4


def test_more_than_a_store_keeps_up_with_is_not_kept() -> None:
    store = SlowStore()
    pool = tiered_pool(6, 0, store)
    tier = tier_of(pool)
    room = offload_of(pool)._room[tier]
    while room.acquire(blocking=False):
        pass
    visit(pool, list(range(16)))
    visit(pool, list(range(100, 124)))
    assert (len(tier), tier.counts.stored) == (0, 0)
    assert pool.audit() == []


def test_places_of_what_an_earlier_process_left_are_in_its_order() -> None:
    tier = slow_tier(3, 4, SlowStore({key(number): zeros(4) for number in (1, 2)}))
    assert [tier.add(key(3)), tier.add(key(4))] == [(2, None), (0, key(1))]


def test_parts_of_blocks_stay_in_the_pool() -> None:
    """What is found in tiers are whole blocks; behind those that the pool has, a part of one, too."""
    pool = tiered_pool(6, 16, parts=True)
    visit(pool, list(range(10)))
    visit(pool, list(range(100, 124)))
    assert len(tier_of(pool)) == 2
    slot = pool.allocate_slot(token_ids=list(range(12)))
    pool.await_arrival(10)
    pool.receive(0)
    assert pool.get_seq_len(slot) == 8
    pool.view([slot], [3]).advance()
    pool.free_slot(slot)
    assert pool.get_seq_len(pool.allocate_slot(token_ids=list(range(12)))) == 11
    assert pool.audit() == []


def test_no_part_is_found_behind_what_is_loaded() -> None:
    """Those that the pool has begin a prompt, or are behind the last block that it has."""
    pool = tiered_pool(6, 16, parts=True)
    visit(pool, list(range(8)))
    visit(pool, list(range(100, 120)))  # a block is missing for it
    assert len(tier_of(pool)) == 1
    visit(pool, [0, 1, 2, 3, 9, 9])
    visit(pool, [9, 9])
    slot = pool.allocate_slot(token_ids=[*range(8), 9, 9, 5])
    pool.await_arrival(10)
    pool.receive(0)
    assert pool.get_seq_len(slot) == 8
    assert pool.counters().cow_copies == 0
