"""The longest cached prefix that all groups of layers can go on from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from kvlab.kv.group_blocks import GroupBlocks
from kvlab.kv.prefix import PrefixIndex
from kvlab.kv.protocol import Salt


@dataclass(frozen=True, slots=True)
class PrefixHits:
    """What is cached of a prompt: its first `count` blocks, as far as the groups need them."""

    count: int
    blocks: list[list[int]]  # of each group, those up to `count` that it needs


def match(index: PrefixIndex, groups: Sequence[GroupBlocks], token_ids: Sequence[int], salt: Salt) -> PrefixHits:
    """The longest cached prefix that all groups can go on from: of full attention every block of it, of a sliding
    window those that a sequence of so many tokens holds.
    """
    if len(groups) == 1 and groups[0].layers.window is None:
        blocks = index.match(token_ids, salt)
        return PrefixHits(len(blocks), [blocks])
    size = index.block_size
    count, known = len(token_ids) // size, list[list[int | None]]()
    for number, group in enumerate(groups):
        found = index.find(token_ids[: count * size], salt, number)
        if group.layers.window is None:
            found = list(takewhile(lambda block: block is not None, found))
        known.append(found)
        count = min(count, len(found))
    in_a_row = [_in_a_row(found[:count]) for found in known]

    def first(group: GroupBlocks) -> int:
        return group.layers.first_block(count * size, size)

    while any(row[count] < count - first(group) for group, row in zip(groups, in_a_row, strict=True)):
        count -= 1
    parts = [found[first(group) : count] for group, found in zip(groups, known, strict=True)]
    return PrefixHits(count, [[block for block in part if block is not None] for part in parts])


def _in_a_row(found: Sequence[int | None]) -> list[int]:
    """Before each entry, and behind the last: how many entries in a row have a block."""
    counts = [0]
    for block in found:
        counts.append(0 if block is None else counts[-1] + 1)
    return counts
