"""Checks that tiers, and what is being loaded from them, agree with the pool."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from kvlab.kv.allocator import BlockAllocator
from kvlab.kv.table import BlockTables
from kvlab.kv.tiers.offload import Offload


def broken(offload: Offload, tables: BlockTables, allocator: BlockAllocator) -> Iterator[tuple[str, str]]:
    """What does not agree: whose, and how. For the audit."""
    for tier in offload.tiers:
        yield from ((tier.name, text) for text in tier.broken())
        loading = Counter(key for load in offload.loads if load.tier is tier for key in load.blocks)
        if loading + offload.swaps.held(tier) != tier.held():
            yield tier.name, "its held contents are not those that are being loaded or were swapped out"
    if dead := offload.waiting.keys() - tables.live:
        yield "loads", f"slots {sorted(dead)} wait for loads and are not live"
    for load in offload.loads:
        for block in load.blocks.values():
            if not allocator.ref_count(block) or allocator.content(block) is not None:
                yield f"block {block}", "a content is loaded to it, but nobody holds it or it has one already"
    blocks = [block for load in offload.loads for block in load.blocks.values()]
    if len(blocks) > len(set(blocks)):
        yield "loads", "two contents are loaded to one block"
    if {key: load for load in offload.loads for key in load.blocks} != offload.loading:
        yield "loads", "what is being loaded is not what the loads are of"
    if any(not load.users for load in offload.loads):
        yield "loads", "a load goes on that no slot waits for"
