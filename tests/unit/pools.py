"""Small pools for tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvlab.kv.eviction import EVICTION_POLICIES
from kvlab.kv.pool import BlockPool
from kvlab.kv.pools.paged import PagedKVCachePool
from kvlab.kv.prefix import Prefix, PrefixIndex
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
