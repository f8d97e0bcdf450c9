"""Contiguous memory: every sequence takes a slot as long as the longest sequence could get."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from kvlab.config import KVConfig
from kvlab.kv.journal import BlockJournal
from kvlab.kv.pool import BlockPool
from kvlab.kv.pools import POOLS
from kvlab.kv.tiers.offload import Offload

if TYPE_CHECKING:
    from kvlab.kv.storage import KVStorage


@POOLS.register("contiguous")
class ContiguousKVCachePool(BlockPool):
    """Paging with one page per sequence: a block is `max_seq_len` tokens. Nothing is shared; a fork copies."""

    unit = "slot"
    first_blocks = 1
    fork_shares = False

    def __init__(
        self,
        num_slots: int,
        max_seq_len: int,
        storage: KVStorage | None = None,
        *,
        journal: BlockJournal | None = None,
    ) -> None:
        super().__init__(num_slots, max_seq_len, max_seq_len, storage, journal=journal)

    def free_token_capacity(self) -> int | None:
        """None: a slot is taken whole, whatever its sequence needs."""
        return None

    @classmethod
    def is_paged(cls) -> bool:
        return False

    @classmethod
    def block_size_for(cls, config: KVConfig, max_seq_len: int) -> int:
        """`max_seq_len`: a slot takes the longest sequence; `kv.block_size` is only the unit of `kv.num_blocks`."""
        return max_seq_len

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
    ) -> Self:
        """See KVBackend."""
        return cls(num_blocks, max_seq_len, storage, journal=journal)
