"""Gives up what a pool keeps for later prompts."""

from kvlab.kv.pool import BlockPool


def drop_cached(pool: BlockPool) -> int:
    """Give up all content of blocks that no slot uses, pinned or not; returns how many blocks that were. What slots
    use can still be found, and so can what tiers have.
    """
    allocator, eviction = pool.allocator, pool.eviction
    blocks = list(eviction.blocks())
    for block in blocks:
        eviction.remove(block)
    allocator.give_up(blocks)
    log = allocator.content_log
    if log is not None and next(pool.index.nodes(), None) is None:
        log.cleared()
    return len(blocks)
