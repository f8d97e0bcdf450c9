"""What others do with a pool: follow which contents it has, and hold blocks of it that they read."""

from __future__ import annotations

from collections.abc import Sequence

from kvlab.kv.content_log import ContentLog
from kvlab.kv.pool import BlockPool


def follow(pool: BlockPool) -> ContentLog:
    """What becomes findable in a pool and what is gone from now on, for one more reader."""
    known = pool.allocator.content_log
    if known is not None:
        return known.beside()
    log = pool.allocator.content_log = ContentLog(has_groups=len(pool.groups) > 1)
    return log


def lend(pool: BlockPool, blocks: Sequence[int]) -> int:
    """A slot of blocks that have content, one behind the other: they stay until it is freed. Of a pool without
    windows.
    """
    (group,) = pool.groups
    slot = group.ledger.open(blocks)
    for column in (group.tables.stored, group.tables.lengths, group.tables.cached):
        column[slot] = len(blocks) * pool.block_size
    group.sharing.open(slot, None, None, (), resumed=True)
    pool.allocator.touch(blocks)
    return slot
