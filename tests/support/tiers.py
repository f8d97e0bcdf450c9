"""Pools with tiers behind them, for tests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from threading import Event

import numpy as np

from kvlab.engine.core import EngineCore
from kvlab.errors import TierError
from kvlab.kv.eviction import EVICTION_POLICIES
from kvlab.kv.pool import BlockPool
from kvlab.kv.pools.paged import PagedKVCachePool
from kvlab.kv.prefix import Prefix
from kvlab.kv.spec import KVSpec, PageLayout
from kvlab.kv.storage import KVStorage
from kvlab.kv.tiers.base import Key, Link, Page, PageStore
from kvlab.kv.tiers.host import BlockPages, HostStore
from kvlab.kv.tiers.offload import Offload
from kvlab.kv.tiers.tier import Tier
from tests.support.model import tiny_config
from tests.support.pools import BLOCK_SIZE, MAX_SEQ_LEN


class SlowStore(PageStore):
    """Pages in a dictionary, read when `gate` is open; keys in `broken` cannot be read, nor any be written while it
    `is_full`.
    """

    def __init__(self, kept: Mapping[Key, Page] | None = None) -> None:
        self.pages = {} if kept is None else dict(kept)
        self.gate = Event()
        self.gate.set()
        self.broken: set[Key] = set()
        self.is_full = self.is_closed = False

    def kept(self) -> Iterable[Key]:
        return list(self.pages)

    def write(self, place: int, key: Key, page: Page) -> None:
        if self.is_full:
            raise OSError(28, "no space")
        self.pages[key] = page.copy()

    def read(self, place: int, key: Key, page: Page) -> None:
        self.gate.wait(10)
        if key in self.broken or key not in self.pages:
            raise TierError("a page is broken")
        page[:] = self.pages[key]

    def remove(self, place: int, key: Key) -> None:
        self.pages.pop(key, None)

    def close(self) -> None:
        self.is_closed = True


class FixedLink(Link):
    """Each transfer takes a second."""

    def transfer(self, ready_s: float, num_bytes: int) -> float:
        return ready_s + 1

    def seconds(self, num_bytes: int) -> float:
        return 1.0


def host_tier(pages: int, page_bytes: int, eviction: str = "lru") -> Tier:
    return Tier("host", pages, page_bytes, EVICTION_POLICIES.get(eviction)(), HostStore(pages, page_bytes))


def slow_tier(pages: int, page_bytes: int, store: SlowStore) -> Tier:
    return Tier("disk", pages, page_bytes, EVICTION_POLICIES.get("lru")(), store)


def modelled_tier(pages: int, *, name: str = "host", eviction: str = "lru") -> Tier:
    return Tier(name, pages, 100, EVICTION_POLICIES.get(eviction)(), up=FixedLink())


def tiered_pool(
    num_blocks: int,
    host_pages: int,
    store: SlowStore | None = None,
    *,
    slow_pages: int = 64,
    spec: KVSpec | None = None,
    layout: PageLayout = PageLayout.HND,
    block_size: int = BLOCK_SIZE,
    max_seq_len: int = MAX_SEQ_LEN,
    parts: bool = False,
) -> PagedKVCachePool:
    """One for the tiny decoder, whose evicted blocks are overwritten as soon as the tiers have them. With a `store`
    it is behind host memory, or alone.
    """
    spec = spec or tiny_config().kv_spec("float32")
    storage = KVStorage(spec, num_blocks, block_size, layout=layout)
    pages = BlockPages(storage)
    tiers = [host_tier(host_pages, pages.page_bytes)] if host_pages else []
    if store is not None:
        tiers.append(slow_tier(slow_pages, pages.page_bytes, store))
    offload = Offload(tiers, pages)
    pool = PagedKVCachePool(
        num_blocks, block_size, max_seq_len, storage, prefix_sharing=True, partial_reuse=parts, offload=offload
    )
    poison_evicted(pool)
    return pool


def poison_evicted(pool: BlockPool) -> None:
    """A block that is evicted is overwritten as soon as the tiers have it."""
    offload, storage = pool.offload, pool.storage
    assert offload is not None
    assert storage is not None

    def evict(blocks: Sequence[int], contents: Mapping[int, Prefix]) -> None:
        offload.evicted(blocks, contents)
        for tensor in storage.block_bytes():
            tensor[:, list(blocks)] = 255  # no number at all in floating point

    pool.allocator._on_evict = evict


def modelled_pool(num_blocks: int, *tiers: Tier, block_size: int = BLOCK_SIZE) -> PagedKVCachePool:
    """One without tensors."""
    return PagedKVCachePool(num_blocks, block_size, MAX_SEQ_LEN, prefix_sharing=True, offload=Offload(tiers))


def tier_of(engine_or_pool: EngineCore | BlockPool, index: int = 0) -> Tier:
    pool = engine_or_pool.pool if isinstance(engine_or_pool, EngineCore) else engine_or_pool
    assert isinstance(pool, BlockPool)
    assert pool.offload is not None
    return pool.offload.tiers[index]


def zeros(size: int) -> Page:
    return np.zeros(size, np.uint8)
