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
    tokens_stored: int  # tokens whose K and V are in blocks in use, each block counted once
    kv_bytes: int  # bytes of the whole pool
    blocks_allocated: int  # handed out since the start
    blocks_freed: int  # returned since the start
    blocks_cached: int = 0  # free, but holding content that can be shared
    shared_blocks: int = 0  # references beyond the first: blocks that sharing saves now
    evictions: int = 0  # times that memory for new tokens was taken from cached content
    evicted_blocks: int = 0
    cow_copies: int = 0  # blocks copied before they were written
    merged_blocks: int = 0  # copies given back because an equal block was there
    prompt_tokens: int = 0  # tokens of prompts at their first admission
    hit_tokens: int = 0  # of those, tokens served from blocks computed before
    same_step_hit_tokens: int = 0  # of those hits, tokens of blocks that another sequence computes in the same step
    recompute_hit_tokens: int = 0  # tokens that a preempted sequence found again on its return

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
    def prefix_hit_rate(self) -> float:
        """Hit tokens over prompt tokens, at first admissions."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def internal_fragmentation(self) -> float:
        """1 - stored tokens / token slots of the blocks in use."""
        in_use = self.blocks_in_use * self.block_size
        return 1 - self.tokens_stored / in_use if in_use else 0.0
