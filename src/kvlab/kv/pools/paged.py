"""Paged memory: a sequence takes blocks of a few tokens as it grows (PagedAttention, SOSP 2023)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

from kvlab.config import KVConfig
from kvlab.kv.eviction import EVICTION_POLICIES, EvictionPolicy
from kvlab.kv.groups import LayerGroup
from kvlab.kv.journal import BlockJournal
from kvlab.kv.pool import BlockPool
from kvlab.kv.pools import POOLS
from kvlab.kv.retention import Limits, Retention
from kvlab.kv.tiers.offload import Offload

if TYPE_CHECKING:
    from kvlab.kv.storage import KVStorage


@POOLS.register("paged")
class PagedKVCachePool(BlockPool):
    """A sequence of n tokens holds ceil(n / block_size) blocks, wherever in the pool they are.

    With `prefix_sharing`, full blocks with equal tokens behind equal prefixes are stored once, and outlive their
    sequences until `eviction` gives them up.
    """

    frees_windows = True

    def free_token_capacity(self) -> int | None:
        """Token slots of free blocks, those with cached content included."""
        return self.allocator.num_free() * self.block_size

    @classmethod
    def is_paged(cls) -> bool:
        return True

    @classmethod
    def block_size_for(cls, config: KVConfig, max_seq_len: int) -> int:
        """`kv.block_size`."""
        return config.block_size

    @classmethod
    def from_config(
        cls,
        config: KVConfig,
        num_blocks: int,
        max_seq_len: int,
        storage: KVStorage | None = None,
        *,
        journal: BlockJournal | None = None,
        offload: Offload | None = None,
        groups: Sequence[LayerGroup] = (),
        step_tokens: int | None = None,
        ahead: bool = False,
    ) -> Self:
        """See KVBackend."""
        return cls(
            num_blocks,
            config.block_size,
            max_seq_len,
            storage,
            prefix_sharing=config.prefix_sharing,
            partial_reuse=config.partial_reuse,
            merge_equal=config.merge_equal,
            eviction=_eviction(config, num_blocks, journal),
            journal=journal,
            offload=offload,
            groups=groups,
            step_tokens=step_tokens,
            ahead=ahead,
        )


def _eviction(config: KVConfig, num_blocks: int, journal: BlockJournal | None) -> EvictionPolicy:
    """The configured policy, behind what is to be kept longer or shorter, if anything is."""
    policy = EVICTION_POLICIES.get(config.eviction)
    if not config.retention:
        return policy()
    limits = Limits(
        pinned=int(config.pinned_share * num_blocks),
        pin_ttl_s=config.pin_ttl_s,
        ttl_s=config.ttl_s,
        quota=None if config.quota is None else int(config.quota * num_blocks),
    )
    return Retention(policy, limits, journal)
