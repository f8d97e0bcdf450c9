from __future__ import annotations

from hypothesis import settings

from kvlab.kv.contiguous import SlottedKVCachePool
from kvlab.kv.paged import PagedKVCachePool
from kvlab.kv.pool import KVCachePool
from kvlab.kv.storage import KVStorage
from tests.property.pool_machine import SPEC, PoolMachine

SETTINGS = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True)


class PagedMachine(PoolMachine):
    """10 blocks of 4 tokens: two sequences of the longest length already exhaust it."""

    def make_pool(self) -> KVCachePool:
        return PagedKVCachePool(10, 4, 18, KVStorage(SPEC, 10, 4))


class SingleTokenBlocksMachine(PoolMachine):
    """Blocks of one token: every token is a block boundary."""

    def make_pool(self) -> KVCachePool:
        return PagedKVCachePool(24, 1, 15, KVStorage(SPEC, 24, 1))


class SlottedMachine(PoolMachine):
    """Contiguous: a slot is one block of the longest length."""

    first_blocks = 1

    def make_pool(self) -> KVCachePool:
        return SlottedKVCachePool(4, 15, KVStorage(SPEC, 4, 15))


PagedMachine.TestCase.settings = SETTINGS
SingleTokenBlocksMachine.TestCase.settings = settings(SETTINGS, max_examples=20)
SlottedMachine.TestCase.settings = SETTINGS

TestPagedPool = PagedMachine.TestCase
TestPagedPoolOfSingleTokenBlocks = SingleTokenBlocksMachine.TestCase
TestSlottedPool = SlottedMachine.TestCase
