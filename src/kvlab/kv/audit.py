"""Checks that a pool's tables and its allocator tell the same story."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from kvlab.kv.allocator import BlockAllocator
from kvlab.kv.table import BlockTables


@dataclass(frozen=True, slots=True)
class Finding:
    """A broken rule: which one, on which block or slot, and what was found."""

    rule: str
    subject: str
    detail: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.subject}: {self.detail}"


def audit(allocator: BlockAllocator, tables: BlockTables) -> list[Finding]:
    """Every way in which tables and allocator disagree; empty for a sound pool.

    Rules: each reference is a table entry and the other way round; free + allocated = total; no token
    beyond a sequence's blocks.
    """
    findings = []
    entries = Counter(block for slot in tables.live for block in tables.blocks(slot))
    allocated = allocator.allocated_block_ids()
    for block in sorted(allocated | set(entries)):
        held, referenced = allocator.ref_count(block), entries[block]
        if held > referenced:
            detail = f"{held} reference(s), {referenced} table entry(ies)"
            findings.append(Finding("leaked", f"block {block}", detail))
        elif held < referenced:
            detail = f"{held} reference(s), {referenced} table entry(ies)"
            findings.append(Finding("dangling", f"block {block}", detail))
    if allocator.num_free() + allocator.num_allocated() != allocator.num_blocks:
        detail = (
            f"{allocator.num_free()} free + {allocator.num_allocated()} allocated is not {allocator.num_blocks}"
        )
        findings.append(Finding("conservation", "pool", detail))
    for slot in sorted(tables.live):
        length, room = int(tables.lengths[slot]), int(tables.counts[slot]) * tables.block_size
        if length > room:
            findings.append(Finding("overrun", f"slot {slot}", f"{length} tokens in blocks for {room}"))
    return findings
