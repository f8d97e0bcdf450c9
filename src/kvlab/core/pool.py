"""What a pool of blocks holds, and what it has done."""

from __future__ import annotations

from operator import sub
from typing import NamedTuple

Salt = str | int | None  # whose prefixes are apart: requests share with those of the same one


class PoolStats(NamedTuple):
    """A pool of blocks at one moment, made for each step. Ratios are 0 where there is nothing to divide by."""

    block_size: int  # token slots of a block
    blocks_total: int
    blocks_in_use: int
    tokens_stored: int  # tokens whose K and V are in blocks in use, each block counted once
    blocks_cached: int = 0  # free, but holding content that can be shared
    shared_blocks: int = 0  # references beyond the first: blocks that sharing saves now
    sequences: int = 0
    kv_bytes: int = 0  # bytes of the whole pool
    blocks_pinned: int = 0  # in use or cached, with content that stays
    host_blocks: int = 0  # in host memory, behind the pool
    disk_blocks: int = 0  # on disk, behind host memory
    loading_sequences: int = 0  # that wait for content from one of them

    @property
    def token_slots(self) -> int:
        """Token slots of the whole pool."""
        return self.blocks_total * self.block_size

    @property
    def block_utilization(self) -> float:
        """Blocks in use over blocks in the pool."""
        return self.blocks_in_use / self.blocks_total if self.blocks_total else 0.0

    @property
    def internal_fragmentation(self) -> float:
        """1 - stored tokens / token slots of the blocks in use."""
        in_use = self.blocks_in_use * self.block_size
        return 1 - self.tokens_stored / in_use if in_use else 0.0


class PoolCounters(NamedTuple):
    """What a pool did since its start. The difference of two is what it did in between."""

    blocks_allocated: int = 0  # handed out
    blocks_freed: int = 0  # returned
    evictions: int = 0  # times that memory for new tokens was taken from cached content
    evicted_blocks: int = 0
    cow_copies: int = 0  # blocks copied before they were written, or for a part of them
    merged_blocks: int = 0  # copies given back because an equal block was there
    prompt_tokens: int = 0  # tokens of prompts at their first admission
    hit_tokens: int = 0  # of those, served from blocks computed before
    same_step_hit_tokens: int = 0  # of those hits, in blocks that another sequence computes in the same step
    recompute_hit_tokens: int = 0  # tokens that a preempted sequence found again on its return
    expired_blocks: int = 0  # given up because nobody had used them for kv.ttl_s
    quota_evictions: int = 0  # evicted blocks of tenants that were over kv.quota
    pinned_evictions: int = 0  # evicted blocks that were pinned: nothing else was left
    pins_refused: int = 0  # prefixes that were not pinned, for lack of kv.pinned_share or kv.quota
    host_stored_blocks: int = 0  # copied to host memory
    host_hit_tokens: int = 0  # of prompts, loaded from host memory; hit or found again too
    host_loaded_blocks: int = 0  # copied from host memory; several sequences may hit one
    disk_stored_blocks: int = 0  # the same of the disk
    disk_hit_tokens: int = 0
    disk_loaded_blocks: int = 0
    store_us: int = 0  # microseconds that copies to host memory and disk took
    load_us: int = 0  # microseconds that copies from them took
    failed_pages: int = 0  # blocks that host memory or the disk lost: misses
    swapped_out_blocks: int = 0  # kept in host memory or on disk for a sequence that was preempted
    swapped_in_blocks: int = 0  # of those, copied back when it returned; others were in the pool still

    def __sub__(self, earlier: PoolCounters) -> PoolCounters:
        """What was added since `earlier`."""
        return PoolCounters(*map(sub, self, earlier))


#: The fields of PoolCounters that are 0 without tiers.
TIER_COUNTERS = (
    *(f"{tier}_{name}" for tier in ("host", "disk") for name in ("stored_blocks", "hit_tokens", "loaded_blocks")),
    *("store_us", "load_us", "failed_pages", "swapped_out_blocks", "swapped_in_blocks"),
)
