"""Paged memory: a sequence takes blocks of a few tokens as it grows (PagedAttention, SOSP 2023)."""

from __future__ import annotations

from kvlab.kv.pool import BlockPool
from kvlab.kv.pools import POOLS


@POOLS.register("paged")
class PagedKVCachePool(BlockPool):
    """A sequence of n tokens holds ceil(n / block_size) blocks, wherever in the pool they are.

    With `prefix_sharing`, full blocks with equal tokens behind equal prefixes are stored once, and outlive their
    sequences until `eviction` gives them up.
    """

    def free_token_capacity(self) -> int | None:
        """Token slots of free blocks, those with cached content included."""
        return self.allocator.num_free() * self.block_size

    def is_paged(self) -> bool:
        """True: a sequence may span several blocks."""
        return True

    def _initial_blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _fork_blocks(self, slot: int) -> list[int]:
        return self.tables.blocks(slot)

    def _own_fork(self, slot: int, copy: int, blocks: list[int]) -> None:
        self.allocator.share(blocks, copy)
        self._forked |= {slot, copy}
