"""Small pools for tests."""

from __future__ import annotations

from kvlab.kv.eviction import EVICTION_POLICIES
from kvlab.kv.pool import BlockPool
from kvlab.kv.pools.paged import PagedKVCachePool
from kvlab.kv.prefix import Prefix
from kvlab.kv.spec import KVSpec
from kvlab.kv.storage import KVStorage

SPEC = KVSpec(num_layers=2, num_kv_heads=2, head_dim=4, dtype="float32")


def paged(num_blocks: int = 16, block_size: int = 4, max_seq_len: int = 40) -> PagedKVCachePool:
    return PagedKVCachePool(num_blocks, block_size, max_seq_len, KVStorage(SPEC, num_blocks, block_size))


def sharing(
    num_blocks: int = 16, block_size: int = 4, max_seq_len: int = 40, eviction: str = "lru"
) -> PagedKVCachePool:
    return PagedKVCachePool(
        num_blocks,
        block_size,
        max_seq_len,
        KVStorage(SPEC, num_blocks, block_size),
        prefix_sharing=True,
        eviction=EVICTION_POLICIES.get(eviction)(),
    )


def content(number: int) -> Prefix:
    """A content that no other number has."""
    return Prefix(None, number.to_bytes(8, "little"), number)


def store(pool: BlockPool, slots: list[int], new: list[int]) -> None:
    """Make tokens part of the sequences, without writing any."""
    pool.reserve(slots, new)
    pool.view(slots, new).advance()
