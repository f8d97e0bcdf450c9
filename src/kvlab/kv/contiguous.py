"""Contiguous memory: every sequence takes a slot as long as the longest sequence could get."""

from __future__ import annotations

from kvlab.kv.pool import KVCachePool
from kvlab.kv.storage import KVStorage


class SlottedKVCachePool(KVCachePool):
    """Paging with one page per sequence: a block is `max_seq_len` tokens."""

    def __init__(self, num_slots: int, max_seq_len: int, storage: KVStorage | None = None) -> None:
        super().__init__(num_slots, max_seq_len, max_seq_len, storage)

    def free_token_capacity(self) -> int | None:
        """None: a slot is taken whole, whatever its sequence needs."""
        return None

    def is_paged(self) -> bool:
        """False: a sequence is one block."""
        return False

    def _initial_blocks(self, tokens: int) -> int:
        return 1
