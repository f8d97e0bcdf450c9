"""The longest cached prefix that all groups of layers can go on from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TypeVar

from kvlab.kv.group_blocks import GroupBlocks
from kvlab.kv.prefix import PrefixIndex
from kvlab.kv.protocol import Salt
from kvlab.kv.tiers.base import Key
from kvlab.kv.tiers.offload import Offload


@dataclass(frozen=True, slots=True)
class PrefixHits:
    """What is cached of a prompt: its first `count` blocks, as far as the groups need them."""

    count: int
    blocks: list[list[int]]  # of each group, those up to `count` that it needs


@dataclass(frozen=True, slots=True)
class TierHits:
    """What pool and tiers together have of a prompt, where layers have windows: as PrefixHits, with a key in the
    place of a block whose content a tier has.
    """

    count: int
    entries: list[list[int | Key]]

    @property
    def keys(self) -> list[Key]:
        """The contents that tiers have, group by group."""
        return [each for part in self.entries for each in part if isinstance(each, bytes)]


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
    return PrefixHits(*_longest(groups, known, count, size))


def match_with_tiers(
    index: PrefixIndex, groups: Sequence[GroupBlocks], offload: Offload, token_ids: Sequence[int], salt: Salt
) -> TierHits:
    """The same over pool and tiers: what is not in the one may be in the other. A block that a prepared step is
    to fill yet counts as not there, as that step may fail.
    """
    size = index.block_size
    parts, known = list(index.parts(token_ids, 0)), list[list[int | Key | None]]()
    for number, group in enumerate(groups):
        found: list[int | Key | None] = [*index.find(token_ids, salt, number)]
        found += [None] * (len(parts) - len(found))
        for place, key in enumerate(offload.keys(index.root_tokens(salt, number), parts)):
            block = found[place]
            is_pending = group.sharing is not None and isinstance(block, int) and group.sharing.is_pending(block)
            if block is None or is_pending:
                found[place] = key if offload.has(key) else None
        known.append(found)
    longest: tuple[int, list[list[int | Key]]] = _longest(groups, known, len(parts), size)
    return TierHits(*longest)


Entry = TypeVar("Entry")


def _longest(
    groups: Sequence[GroupBlocks], known: Sequence[Sequence[Entry | None]], count: int, size: int
) -> tuple[int, list[list[Entry]]]:
    """Of `count` blocks the most that all groups can go on from, and what each of them needs of those."""
    in_a_row = [_in_a_row(found[:count]) for found in known]

    def first(group: GroupBlocks) -> int:
        return group.layers.first_block(count * size, size)

    while any(row[count] < count - first(group) for group, row in zip(groups, in_a_row, strict=True)):
        count -= 1
    parts = [found[first(group) : count] for group, found in zip(groups, known, strict=True)]
    return count, [[each for each in part if each is not None] for part in parts]


def _in_a_row(found: Sequence[object]) -> list[int]:
    """Before each entry, and behind the last: how many entries in a row there are."""
    counts = [0]
    for each in found:
        counts.append(0 if each is None else counts[-1] + 1)
    return counts
