"""Pools for tests, each from a spec, a count of blocks or slots, and the tokens of each."""

from __future__ import annotations

from collections.abc import Callable

from kvlab.kv.allocator import BlockAllocator
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
    parts: bool = False,
    merge: bool = True,
    eviction: str = "lru",
) -> PagedKVCachePool:
    return PagedKVCachePool(
        num_blocks,
        block_size,
        max_seq_len,
        KVStorage(spec, num_blocks, block_size),
        prefix_sharing=sharing or parts,
        partial_reuse=parts,
        merge_equal=merge,
        eviction=EVICTION_POLICIES.get(eviction)(),
    )


def contiguous(num_slots: int, max_seq_len: int, *, spec: KVSpec = SPEC) -> ContiguousKVCachePool:
    return ContiguousKVCachePool(num_slots, max_seq_len, KVStorage(spec, num_slots, max_seq_len))


def sharing(
    num_blocks: int = 16, block_size: int = 4, max_seq_len: int = 40, eviction: str = "lru"
) -> PagedKVCachePool:
    return paged(num_blocks, block_size, max_seq_len, sharing=True, eviction=eviction)


def paged_pool(num_blocks: int = NUM_BLOCKS, *, sharing: bool = False, parts: bool = False) -> PagedKVCachePool:
    """One for the tiny decoder."""
    spec = tiny_config().kv_spec("float32")
    return paged(num_blocks, BLOCK_SIZE, MAX_SEQ_LEN, spec=spec, sharing=sharing, parts=parts)


def sharing_pool(num_blocks: int = NUM_BLOCKS) -> PagedKVCachePool:
    """One for the tiny decoder that shares prefixes."""
    return paged_pool(num_blocks, sharing=True)


def slotted_pool(num_slots: int = 4) -> ContiguousKVCachePool:
    """One of contiguous slots for the tiny decoder."""
    return contiguous(num_slots, MAX_SEQ_LEN, spec=tiny_config().kv_spec("float32"))


def collide(index: PrefixIndex, hash_function: Callable[[bytes], int]) -> None:
    """Let an empty index find the blocks behind a prefix by this hash of their tokens."""

    class Tokens(bytes):
        def __hash__(self) -> int:
            return hash_function(self)

    pack, pack_block = index._pack, index._pack_block
    index._pack = lambda token_ids: [Tokens(tokens) for tokens in pack(token_ids)]  # type: ignore[method-assign]
    index._pack_block = lambda *token_ids: Tokens(pack_block(*token_ids))


def content(number: int, parent: Prefix | None = None, block: int | None = None) -> Prefix:
    """A content that no other number has."""
    return Prefix(parent, str(number).encode(), block)


def fill(allocator: BlockAllocator, block: int, node: Prefix) -> None:
    """A block holds this content."""
    node.block = block
    allocator.set_contents({block: node})


def store(pool: BlockPool, slots: list[int], new: list[int]) -> None:
    """Make tokens part of the sequences, without writing any."""
    pool.reserve(slots, new)
    pool.view(slots, new).advance()
