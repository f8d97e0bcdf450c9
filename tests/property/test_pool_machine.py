"""Each pool against its model. `KVLAB_EXAMPLES=5000` runs that many examples of each machine."""

from __future__ import annotations

import os

from hypothesis import settings

from kvlab.kv.eviction import EVICTION_POLICIES
from kvlab.kv.pool import BlockPool
from kvlab.kv.pools.contiguous import ContiguousKVCachePool
from kvlab.kv.pools.paged import PagedKVCachePool
from kvlab.kv.retention import Limits, Retention
from kvlab.kv.storage import KVStorage
from tests.property.pool_machine import PoolMachine
from tests.property.reference import SPEC
from tests.property.tier_rules import TieredRules
from tests.support.tiers import SlowStore, tiered_pool


def examples(count: int) -> settings:
    count = int(os.environ.get("KVLAB_EXAMPLES", count))
    return settings(max_examples=count, stateful_step_count=50, deadline=None, derandomize=True)


class PagedMachine(PoolMachine):
    """10 blocks of 4 tokens: two sequences of the longest length already exhaust it."""

    def make_pool(self) -> BlockPool:
        return PagedKVCachePool(10, 4, 18, KVStorage(SPEC, 10, 4))


class SingleTokenBlocksMachine(PoolMachine):
    """Blocks of one token: every token is a block boundary."""

    def make_pool(self) -> BlockPool:
        return PagedKVCachePool(24, 1, 15, KVStorage(SPEC, 24, 1))


class SlottedMachine(PoolMachine):
    """Contiguous: a slot is one block of the longest length."""

    first_blocks = 1

    def make_pool(self) -> BlockPool:
        return ContiguousKVCachePool(4, 15, KVStorage(SPEC, 4, 15))


class SharingMachine(PoolMachine):
    """Blocks of two tokens of two kinds: prompts meet often, and eviction is near."""

    sharing = True
    eviction = "lru"

    def make_pool(self) -> BlockPool:
        return PagedKVCachePool(
            10, 2, 12, KVStorage(SPEC, 10, 2), prefix_sharing=True, eviction=EVICTION_POLICIES.get(self.eviction)()
        )


class PartsMachine(SharingMachine):
    """Parts of blocks are found too; blocks of four tokens."""

    parts = True

    def make_pool(self) -> BlockPool:
        return PagedKVCachePool(8, 4, 18, KVStorage(SPEC, 8, 4), prefix_sharing=True, partial_reuse=True)


class RetentionMachine(SharingMachine):
    """Pins, a time to live and quotas on top of it, all so tight that each comes into play."""

    limits = Limits(pinned=3, pin_ttl_s=5, ttl_s=3, quota=3)

    def make_pool(self) -> BlockPool:
        retention = Retention(EVICTION_POLICIES.get(self.eviction), self.limits)
        return PagedKVCachePool(10, 2, 12, KVStorage(SPEC, 10, 2), prefix_sharing=True, eviction=retention)


class TieredMachine(TieredRules):
    """Three pages of host memory and six behind them: content moves on before it is hit again."""

    def make_pool(self) -> BlockPool:
        self.store, self.seen, self.swapped = SlowStore(), [], {}
        return tiered_pool(7, 3, self.store, slow_pages=9, spec=SPEC, block_size=2, max_seq_len=12)


class SharingFifoMachine(SharingMachine):
    eviction = "fifo"


class SharingLfuMachine(SharingMachine):
    eviction = "lfu"


PagedMachine.TestCase.settings = examples(12)
SingleTokenBlocksMachine.TestCase.settings = examples(12)
SlottedMachine.TestCase.settings = examples(12)
SharingMachine.TestCase.settings = examples(50)
PartsMachine.TestCase.settings = examples(20)
RetentionMachine.TestCase.settings = examples(5)
TieredMachine.TestCase.settings = examples(12)
SharingFifoMachine.TestCase.settings = examples(12)
SharingLfuMachine.TestCase.settings = examples(12)

TestPagedPool = PagedMachine.TestCase
TestPagedPoolOfSingleTokenBlocks = SingleTokenBlocksMachine.TestCase
TestSlottedPool = SlottedMachine.TestCase
TestSharingPool = SharingMachine.TestCase
TestPoolThatFindsPartsOfBlocks = PartsMachine.TestCase
TestPoolThatKeepsSomeForLonger = RetentionMachine.TestCase
TestPoolWithTiers = TieredMachine.TestCase
TestSharingPoolThatEvictsTheOldest = SharingFifoMachine.TestCase
TestSharingPoolThatEvictsTheLeastUsed = SharingLfuMachine.TestCase
