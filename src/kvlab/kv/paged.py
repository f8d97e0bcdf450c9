"""Paged memory: a sequence takes blocks of a few tokens as it grows (PagedAttention, SOSP 2023)."""

from __future__ import annotations

from kvlab.kv.pool import KVCachePool


class PagedKVCachePool(KVCachePool):
    """A sequence of n tokens holds ceil(n / block_size) blocks, wherever in the pool they are."""

    def free_token_capacity(self) -> int | None:
        """Token slots of free blocks."""
        return self.allocator.num_free() * self.block_size

    def is_paged(self) -> bool:
        """True: a sequence may span several blocks."""
        return True

    def _initial_blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)
