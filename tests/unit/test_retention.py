"""Pins, a time to live and quotas in front of each eviction policy."""

from __future__ import annotations

import random
from collections import Counter
from typing import ClassVar

import pytest

from kvlab.kv.eviction import EVICTION_POLICIES
from kvlab.kv.pools.paged import PagedKVCachePool
from kvlab.kv.prefix import Prefix
from kvlab.kv.retention import Limits, Retention


class Watched(Retention):
    """Compares each victim with what the description of Retention says, worked out from the contents alone."""

    checked = 0
    evicted: ClassVar[set[int]] = set()

    def victims(self, count: int) -> list[int]:
        found = []
        for _ in range(count):
            found.append(self._checked_victim())
            self.evicted.add(found[-1])
        self.evicted.clear()
        return found

    def _checked_victim(self) -> int:
        cached, kept = list(self.blocks()), set(self.kept())
        by_salt = Counter(salt_of(node) for block, node in self._nodes.items() if block not in self.evicted)
        if self._asking[0] is not None:
            by_salt[self._asking[0].salt] += self._asking[1]
        ordinary = [block for block in cached if block not in kept]
        counts = {block: by_salt[salt_of(self._nodes[block])] for block in ordinary}
        most = max(counts.values(), default=0)
        is_over = self.limits.quota is not None and most > self.limits.quota
        group = [block for block in ordinary if not is_over or counts[block] == most]
        (block,) = super().victims(1)
        assert block in (group or kept)
        parents = {self._nodes[other].parent for other in cached if other != block}
        assert self._nodes[block] not in parents, "it goes before a block that continues it"
        self.checked += 1
        return block


def salt_of(node: Prefix) -> bytes:
    while node.parent is not None:
        node = node.parent
    return node.tokens


def make_pool(limits: Limits, *, policy: str = "lru", blocks: int = 8) -> PagedKVCachePool:
    retention = Watched(EVICTION_POLICIES.get(policy), limits)
    return PagedKVCachePool(blocks, 1, 64, prefix_sharing=True, eviction=retention)


def visit(pool: PagedKVCachePool, text: str, salt: str | None = None, *, pin: int = 0) -> int:
    """Store a text of one token a letter and let it go; how many of them were found."""
    tokens = list(map(ord, text))
    slot = pool.allocate_slot(token_ids=tokens, salt=salt)
    pool.pin_prefix(slot, pin)
    found = pool.get_seq_len(slot)
    pool.view([slot], [len(tokens) - pool.get_seq_len(slot)]).advance()
    pool.free_slot(slot)
    assert not pool.audit()
    return found


def cached(pool: PagedKVCachePool, text: str, salt: str | None = None) -> int:
    return pool.prefix_tokens(list(map(ord, text)), salt)


@pytest.mark.parametrize("policy", EVICTION_POLICIES.names())
def test_random_traffic_evicts_from_the_right_group(policy: str) -> None:
    chance, now = random.Random(policy), 0.0
    pool = make_pool(Limits(pinned=6, pin_ttl_s=30, ttl_s=3, quota=8), policy=policy, blocks=32)
    slots: list[int] = []
    for _ in range(250):
        now += chance.random()
        pool.expire(now)
        if len(slots) > chance.randint(0, 1):
            pool.free_slot(slots.pop(chance.randrange(len(slots))))
        tokens = [chance.randint(1, 5), *chance.choices((0, 1, 2), (6, 2, 1), k=chance.randint(0, 9))]
        slot = pool.allocate_slot(token_ids=tokens, salt=chance.choice(["a", "a", "b", None]))
        pool.pin_prefix(slot, chance.choice([0, 0, 0, 3]))
        pool.view([slot], [len(tokens) - pool.get_seq_len(slot)]).advance()
        slots.append(slot)
        assert not pool.audit()
    retention, counters = pool.eviction, pool.counters()
    assert isinstance(retention, Watched)
    assert retention.checked == counters.evicted_blocks > 100
    assert counters.quota_evictions
    assert counters.pins_refused
    assert counters.expired_blocks
    for slot in slots:
        pool.free_slot(slot)
    pool.expire(now + 30)
    pool.expire(now + 60)
    assert not retention.blocks()
    left = {key for key, value in vars(retention).items() if isinstance(value, dict | set) and value}
    assert not left, "what is gone is not forgotten"


class TestPins:
    def test_a_pinned_prefix_goes_when_nothing_else_is_left(self) -> None:
        pool = make_pool(Limits(pinned=2))
        visit(pool, "sys1", pin=2)
        visit(pool, "abcdef")
        assert (cached(pool, "sys1"), pool.stats().blocks_pinned) == (2, 2)
        assert visit(pool, "sy23") == 2
        visit(pool, "ABCDEFG")
        assert (cached(pool, "sys1"), pool.stats().blocks_pinned, pool.counters().pinned_evictions) == (1, 1, 1)

    def test_of_a_block_that_is_pinned_in_part_nothing_is(self) -> None:
        retention = Retention(EVICTION_POLICIES.get("lru"), Limits(8))
        pool = PagedKVCachePool(8, 4, 64, prefix_sharing=True, eviction=retention)
        visit(pool, "abcdefgh", pin=7)
        assert pool.stats().blocks_pinned == 1

    def test_a_pin_beyond_the_limit_is_refused_as_a_whole_and_counted(self) -> None:
        pool = make_pool(Limits(pinned=3))
        visit(pool, "abc", pin=2)
        visit(pool, "xyz", pin=2)
        assert (pool.stats().blocks_pinned, pool.counters().pins_refused) == (2, 1)
        visit(pool, "abc", pin=3)  # of which two are pinned already
        assert (pool.stats().blocks_pinned, pool.counters().pins_refused) == (3, 1)

    def test_without_a_limit_none_is_granted(self) -> None:
        pool = PagedKVCachePool(8, 1, 64, prefix_sharing=True)
        visit(pool, "abc", pin=2)
        assert (pool.stats().blocks_pinned, pool.counters().pins_refused) == (0, 1)

    def test_a_tenant_pins_no_more_than_its_quota(self) -> None:
        pool = make_pool(Limits(pinned=6, quota=3))
        visit(pool, "abcd", "a", pin=4)
        visit(pool, "abc", "b", pin=3)
        assert (pool.stats().blocks_pinned, pool.counters().pins_refused) == (3, 1)

    def test_a_pin_ends_that_nobody_used_and_a_use_renews_it(self) -> None:
        pool = make_pool(Limits(pinned=4, pin_ttl_s=10))
        visit(pool, "ab", pin=2)
        pool.expire(9)
        visit(pool, "abc")
        assert not pool.expire(18.9)
        assert pool.stats().blocks_pinned == 2
        assert pool.expire(19)
        assert (pool.stats().blocks_pinned, cached(pool, "abc"), pool.counters().expired_blocks) == (0, 3, 0)

    def test_what_failed_before_it_was_computed_is_not_pinned(self) -> None:
        pool = make_pool(Limits(pinned=4))
        slot = pool.allocate_slot(token_ids=[1, 2, 3])
        pool.pin_prefix(slot, 3)
        pool.view([slot], [2]).advance()
        pool.reserve([slot], [1])
        pool.free_slot(slot)
        assert pool.stats().blocks_pinned == 2
        assert not pool.audit()


class TestTimeToLive:
    def test_what_nobody_used_is_given_up_and_a_use_renews_it(self) -> None:
        pool = make_pool(Limits(ttl_s=10))
        visit(pool, "abc")
        visit(pool, "xyz")
        pool.expire(9)
        assert visit(pool, "ab") == 1  # its last token is computed in any case
        assert pool.expire(10)
        assert (cached(pool, "abc"), cached(pool, "xyz"), pool.counters().expired_blocks) == (2, 0, 4)
        assert not pool.expire(18)
        assert pool.expire(19)
        assert pool.stats().blocks_cached == 0

    def test_what_is_in_use_or_pinned_does_not_age(self) -> None:
        pool = make_pool(Limits(pinned=2, ttl_s=10))
        visit(pool, "ab", pin=2)
        slot = pool.allocate_slot(token_ids=[1, 2])
        pool.view([slot], [2]).advance()
        assert not pool.expire(100)
        pool.free_slot(slot)
        assert not pool.expire(109)
        assert pool.expire(110)
        assert (cached(pool, "ab"), pool.stats().blocks_cached) == (2, 2)


class TestQuotas:
    def test_a_tenant_over_its_quota_gives_first_whoever_asks(self) -> None:
        pool = make_pool(Limits(quota=3))
        visit(pool, "old", "calm")
        visit(pool, "abcde", "busy")
        visit(pool, "vwxyz", "busy")
        assert (cached(pool, "old", "calm"), pool.counters().quota_evictions) == (3, 5)
        assert cached(pool, "abcde", "busy") == 0

    def test_within_their_quotas_the_policy_alone_decides(self) -> None:
        pool = make_pool(Limits(quota=4))
        visit(pool, "abcd", "a")
        visit(pool, "abcd", "b")
        visit(pool, "xy", "c")
        assert [cached(pool, "abcd", salt) for salt in "ab"] == [2, 4]
        assert pool.counters().quota_evictions == 0

    def test_memory_that_nobody_else_wants_is_not_taken_away(self) -> None:
        pool = make_pool(Limits(quota=2))
        visit(pool, "abcdefgh", "a")
        assert cached(pool, "abcdefgh", "a") == 8

    def test_who_has_most_gives_first(self) -> None:
        pool = make_pool(Limits(quota=1))
        visit(pool, "abc", "a")
        visit(pool, "vwxyz", "b")
        visit(pool, "12", "c")
        assert (cached(pool, "abc", "a"), cached(pool, "vwxyz", "b")) == (3, 3)


def test_the_audit_finds_what_does_not_agree() -> None:
    pool = make_pool(Limits(pinned=4, quota=4))
    visit(pool, "abcd", "a", pin=2)
    retention = pool.eviction
    assert isinstance(retention, Retention)
    (tenant,) = retention._tenants.values()
    first = pool.index.match([ord("a")], "a")[0] if pool.shares_prefixes else -1
    tenant.contents += 1
    retention._pinned.remove(first)
    found = {(finding.rule, finding.subject) for finding in pool.audit()}
    second = pool.index.match([ord("a"), ord("b")], "a")[1] if pool.shares_prefixes else -1
    assert found == {
        ("retention", f"block {first}"),
        ("retention", f"block {second}"),
        ("retention", "salt b\"'a'\""),
        ("retention", "quotas"),
    }
