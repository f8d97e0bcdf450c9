"""Checks that a pool's tables, its allocator and its index agree, and its tiers with them."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvlab.kv.allocator import BlockAllocator
from kvlab.kv.group_blocks import GroupBlocks
from kvlab.kv.prefix import PrefixIndex, PrefixPart
from kvlab.kv.table import BlockTables
from kvlab.kv.tiers.offload import Offload


@dataclass(frozen=True, slots=True)
class Finding:
    """A broken rule: which one, on which block or slot, who holds it, and what was found.

    Rules: `leaked` (more references than table entries), `dangling` (fewer), `queue` (free with references, or
    the other way round), `conservation` (free + allocated is not the total), `overrun` (tokens beyond a slot's
    blocks), `content` (a block and the index's node of its content do not name each other, a free block is in
    the wrong part of the queue, is cached behind content that was evicted before it, or somebody goes on from a
    block that is not full), `groups` (groups of layers disagree on a slot's length, or the next token would see
    a block that was given back), `retention` (pins and quotas disagree with the blocks that they are of),
    `tier` (a content in two places of a tier, two in one, one held that nothing loads, or a load for a dead
    slot or to a block that nobody holds or that has content already).
    """

    rule: str
    subject: str
    detail: str
    holders: tuple[object, ...] = ()

    def __str__(self) -> str:
        held = f", held by {', '.join(map(repr, self.holders))}" if self.holders else ""
        return f"{self.rule}: {self.subject}: {self.detail}{held}"


def audit(
    allocator: BlockAllocator, groups: Sequence[GroupBlocks], index: PrefixIndex, offload: Offload
) -> list[Finding]:
    """Every way in which tables, allocator, index, eviction and tiers disagree; empty for a sound pool."""
    tables, size = groups[0].tables, groups[0].tables.block_size
    allocated, returned = allocator.allocated_block_ids(), allocator.returned_block_ids()
    first = allocator.first_untouched
    touched = set(range(first))  # few of the millions of a large device

    def is_free(block: int) -> bool:
        return block in returned or block >= first

    findings = _references(allocator, allocated, [group.tables for group in groups])
    for block in sorted(allocated ^ (touched - returned)):
        where = "in the free queue" if is_free(block) else "not in the free queue"
        findings.append(Finding("queue", f"block {block}", f"{allocator.ref_count(block)} reference(s), {where}"))
    free = len(touched & returned) + allocator.num_blocks - first
    if free != allocator.num_free():
        detail = f"{allocator.num_free()} entries for {free} free blocks of {allocator.num_blocks}"
        findings.append(Finding("conservation", "free queue", detail))
    for slot in sorted(tables.live):
        stored, room = int(tables.stored[slot]), int(min(group.tables.counts[slot] for group in groups)) * size
        if stored > room or tables.lengths[slot] > stored:
            detail = f"{int(tables.lengths[slot])} tokens computed, {stored} stored, blocks for {room}"
            findings.append(Finding("overrun", f"slot {slot}", detail))
        findings += _groups(slot, groups)
    kept = [Finding("retention", *flaw) for flaw in allocator.eviction.broken()]
    below = [Finding("tier", *flaw) for flaw in _tiers(offload, tables, allocator)]
    is_whole = all(group.layers.window is None for group in groups)
    return findings + _contents(allocator, is_free, index, is_whole=is_whole) + kept + below


def _groups(slot: int, groups: Sequence[GroupBlocks]) -> Iterator[Finding]:
    """Where the groups have a slot of another length, or one lacks a block that the slot's next token sees."""
    tables = groups[0].tables
    known = [int(column[slot]) for column in (tables.lengths, tables.stored, tables.reserved)]
    for number, group in enumerate(groups):
        own, subject = group.tables, f"slot {slot}, group {number}"
        counts = [int(column[slot]) for column in (own.lengths, own.stored, own.reserved)]
        if counts != known:
            yield Finding("groups", subject, f"computed, stored, reserved {counts}, in the first group {known}")
        next_token = max(int(own.lengths[slot]) + 1, int(own.stored[slot]))  # stored: while it is loaded
        needed = group.layers.first_block(next_token, own.block_size)
        if own.first[slot] > needed:
            yield Finding("groups", subject, f"block {needed} was given back, and its next token sees it")


def _references(allocator: BlockAllocator, allocated: set[int], groups: Sequence[BlockTables]) -> list[Finding]:
    findings = []
    entries = Counter(block for tables in groups for slot in tables.live for block in tables.blocks(slot))
    for block in sorted(allocated | set(entries)):
        held, named = allocator.ref_count(block), entries[block]
        if held != named:
            rule = "leaked" if held > named else "dangling"
            detail = f"{held} reference(s), {named} table entry(ies)"
            findings.append(Finding(rule, f"block {block}", detail, tuple(allocator.owners.holders(block))))
    return findings


def _contents(
    allocator: BlockAllocator, is_free: Callable[[int], bool], index: PrefixIndex, *, is_whole: bool
) -> list[Finding]:
    """`is_whole`: who has a block has all before it, as no layer has a window."""
    wrong: dict[int, str] = {}
    evictable = set(allocator.eviction.blocks())
    indexed = {id(node) for node in index.nodes()}
    held = set()
    for block in allocator.content_block_ids() | evictable:
        node = allocator.content(block)
        held.add(id(node))
        if node is not None and node.block != block and block not in allocator.copies.of(node):
            wrong[block] = f"its content is said to be in block {node.block}"
        elif node is not None and id(node) not in indexed:
            wrong[block] = "its content is not indexed"
        elif is_free(block) and (node is not None) != (block in evictable):
            wrong[block] = "free with content, but not evictable" if node else "evictable, but without content"
        elif isinstance(node, PrefixPart) and (node.children is not None or not is_free(block)):
            wrong[block] = "it is not full, and in use or followed by others"
    for node in index.nodes():
        if node.block is None:
            continue
        before = node.parent
        if id(node) not in held:
            wrong[node.block] = "indexed, but without content"
        elif is_whole and is_free(node.block) and before and before.parent and before.block is None:
            wrong[node.block] = "cached, but what it continues was evicted before it, so that nobody finds it"
    return [
        Finding("content", f"block {block}", detail, tuple(allocator.owners.holders(block)))
        for block, detail in sorted(wrong.items())
    ]


def _tiers(offload: Offload, tables: BlockTables, allocator: BlockAllocator) -> Iterator[tuple[str, str]]:
    """Where tiers, and what is being loaded from them, do not agree with the pool: whose, and how."""
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
