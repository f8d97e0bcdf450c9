"""What others do with a pool: follow which contents it has, and hold blocks of it that they read."""

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
    """A slot of blocks that have content: they stay until it is freed. Where layers have windows the slot has no
    tokens, and its tables only name the blocks, whichever group they are of.
    """
    slot, width = 0, pool.groups[0].tables.width
    for number, group in enumerate(pool.groups):
        slot = group.ledger.open(blocks[number * width : (number + 1) * width])
        group.sharing.open(slot, None, None, (), resumed=True)
    if len(pool.groups) == 1 and pool.groups[0].layers.window is None:
        tables = pool.groups[0].tables
        tables.stored[slot] = tables.lengths[slot] = len(blocks) * pool.block_size
    pool.allocator.touch(blocks)
    return slot
