"""Pools for tests, each from a spec, a count of blocks or slots, and the tokens of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvlab.kv.eviction import EVICTION_POLICIES
from kvlab.kv.pool import BlockPool
from kvlab.kv.pools.contiguous import ContiguousKVCachePool
from kvlab.kv.pools.paged import PagedKVCachePool
from kvlab.kv.prefix import Prefix, PrefixIndex
from kvlab.kv.spec import KVSpec
from kvlab.kv.storage import KVStorage
from tests.support.model import tiny_config

SPEC = KVSpec(num_layers=2, num_kv_heads=2, head_dim=4, dtype="float32")
BLOCK_SIZE, NUM_BLOCKS, MAX_SEQ_LEN = 4, 24, 96  # of the tiny decoder's pools


def paged(
    num_blocks: int = 16,
    block_size: int = 4,
    max_seq_len: int = 40,
    *,
    spec: KVSpec = SPEC,
    sharing: bool = False,
    eviction: str = "lru",
) -> PagedKVCachePool:
    return PagedKVCachePool(
        num_blocks,
        block_size,
        max_seq_len,
        KVStorage(spec, num_blocks, block_size),
        prefix_sharing=sharing,
        eviction=EVICTION_POLICIES.get(eviction)(),
    )


def contiguous(num_slots: int, max_seq_len: int, *, spec: KVSpec = SPEC) -> ContiguousKVCachePool:
    return ContiguousKVCachePool(num_slots, max_seq_len, KVStorage(spec, num_slots, max_seq_len))


def sharing(
    num_blocks: int = 16, block_size: int = 4, max_seq_len: int = 40, eviction: str = "lru"
) -> PagedKVCachePool:
    return paged(num_blocks, block_size, max_seq_len, sharing=True, eviction=eviction)


def paged_pool(num_blocks: int = NUM_BLOCKS, *, sharing: bool = False) -> PagedKVCachePool:
    """One for the tiny decoder."""
    return paged(num_blocks, BLOCK_SIZE, MAX_SEQ_LEN, spec=tiny_config().kv_spec("float32"), sharing=sharing)


def sharing_pool(num_blocks: int = NUM_BLOCKS) -> PagedKVCachePool:
    """One for the tiny decoder that shares prefixes."""
    return paged_pool(num_blocks, sharing=True)


def slotted_pool(num_slots: int = 4) -> ContiguousKVCachePool:
    """One of contiguous slots for the tiny decoder."""
    return contiguous(num_slots, MAX_SEQ_LEN, spec=tiny_config().kv_spec("float32"))


class _Key(tuple[int, bytes]):
    """A key with a hash of the test's choice; equal as tuples are."""

    hash_function: Callable[[int, bytes], int]

    def __hash__(self) -> int:
        return type(self).hash_function(*self)


def collide(index: PrefixIndex, hash_function: Callable[[int, bytes], int]) -> None:
    """Let an empty index find its nodes by this hash function."""
    key = type("Key", (_Key,), {"hash_function": staticmethod(hash_function)})

    class Nodes(dict[tuple[int, bytes], Prefix]):
        def get(self, wanted: Any, default: Any = None) -> Any:
            return super().get(key(wanted), default)

        def setdefault(self, wanted: Any, node: Any = None) -> Any:
            return super().setdefault(key(wanted), node)

        def pop(self, wanted: Any, default: Any = None) -> Any:
            return super().pop(key(wanted), default)

    index._nodes = Nodes()


def content(number: int) -> Prefix:
    """A content that no other number has."""
    return Prefix(None, (number, b""))


def store(pool: BlockPool, slots: list[int], new: list[int]) -> None:
    """Make tokens part of the sequences, without writing any."""
    pool.reserve(slots, new)
    pool.view(slots, new).advance()
