"""Figures about a pool at one moment."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Memory in use now, and what was handed out since the start. Ratios are 0 for an empty pool."""

    block_size: int
    blocks_total: int
    blocks_in_use: int
    sequences: int
    tokens_stored: int  # tokens whose K and V are in the cache
    kv_bytes: int  # bytes of the whole pool
    blocks_allocated: int  # handed out since the start
    blocks_freed: int  # returned since the start

    @property
    def token_slots(self) -> int:
        """Token slots of the whole pool."""
        return self.blocks_total * self.block_size

    @property
    def block_utilization(self) -> float:
        """Blocks in use over blocks in the pool."""
        return self.blocks_in_use / self.blocks_total if self.blocks_total else 0.0

    @property
    def token_utilization(self) -> float:
        """Stored tokens over token slots of the pool."""
        return self.tokens_stored / self.token_slots if self.token_slots else 0.0

    @property
    def internal_fragmentation(self) -> float:
        """1 - stored tokens / token slots of the blocks in use."""
        in_use = self.blocks_in_use * self.block_size
        return 1 - self.tokens_stored / in_use if in_use else 0.0
