"""The longest cached prefix that all groups of layers can go on from."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, TypeVar

from kvlab.core import Salt
from kvlab.kv.group_blocks import GroupBlocks
from kvlab.kv.prefix import PrefixIndex
from kvlab.kv.tiers.base import Key, keys_behind
from kvlab.kv.tiers.offload import Offload
from kvlab.kv.tiers.tier import Tier


@dataclass(frozen=True, slots=True)
class PrefixHits:
    """What pool and tiers have of a prompt: its first blocks, as far as the groups of layers need them."""

    count: int  # blocks that a slot has once all is loaded
    entries: list[list[Any]]  # of each group its last ones of those: blocks (int), or keys (bytes) to load
    ready: int  # blocks that it has at once
    stored: int  # blocks that its tables count as stored meanwhile
    keys: Sequence[Key] = ()  # the contents to load, group by group
    tail: int = 0  # tokens of the last of them, if that block is not full
    without: Collection[Tier] = ()  # what they are not loaded from
    common: int = 0  # blocks that the groups with full attention have, at least `count`


def match(index: PrefixIndex, groups: Sequence[GroupBlocks], token_ids: Sequence[int], salt: Salt) -> PrefixHits:
    """The longest cached prefix that all groups can go on from: of full attention every block of it, of a sliding
    window those that a sequence of so many tokens holds.
    """
    if len(groups) == 1 and groups[0].layers.window is None:
        blocks = index.match(token_ids, salt)
        return PrefixHits(len(blocks), [blocks], len(blocks), len(blocks), common=len(blocks))
    size = index.block_size
    count = common = _most_blocks(groups, token_ids, size)
    known = list[list[int | None]]()
    for number, group in enumerate(groups):
        cached = index.find(token_ids[: count * size], salt, number)
        if group.layers.window is None:
            cached = list(takewhile(lambda block: block is not None, cached))
            common = min(common, len(cached))
        known.append(cached)
        count = min(count, len(cached))
    count, entries = _longest(groups, known, count, size)
    return PrefixHits(count, entries, count, count, common=common)


def _most_blocks(groups: Sequence[GroupBlocks], token_ids: Sequence[int], size: int) -> int:
    """Whole blocks of a prompt. Its last token is computed in any case, behind a state that does not include it."""
    has_states = any(group.layers.has_state for group in groups)
    return max(len(token_ids) - has_states, 0) // size


def match_with_tiers(
    index: PrefixIndex,
    groups: Sequence[GroupBlocks],
    offload: Offload,
    token_ids: Sequence[int],
    salt: Salt,
    without: Collection[Tier] = (),
) -> PrefixHits:
    """The same over pool and tiers, `without` some of these: what is not in the one may be in the other. A block
    that a prepared step is to fill yet counts as not there, as that step may fail.
    """
    size = index.block_size
    most = _most_blocks(groups, token_ids, size)
    parts, known = list(index.parts(token_ids[: most * size], 0)), list[list[int | Key | None]]()
    for number, group in enumerate(groups):
        blocks = index.find(token_ids[: most * size], salt, number)
        blocks += [None] * (len(parts) - len(blocks))
        held: list[int | Key | None] = [*blocks]
        for place, key in enumerate(keys_behind(index.root_tokens(salt, number), parts)):
            block = blocks[place]
            is_pending = block is not None and group.sharing.is_pending(block)
            if block is None or is_pending:
                held[place] = key if offload.has(key, without) else None
        known.append(held)
    count, entries = _longest(groups, known, len(parts), size)
    keys = [entry for part in entries for entry in part if isinstance(entry, bytes)]
    return PrefixHits(count, entries, 0, count, keys, without=without, common=count)


Entry = TypeVar("Entry")


def _longest(
    groups: Sequence[GroupBlocks], known: Sequence[Sequence[Entry | None]], count: int, size: int
) -> tuple[int, list[list[Entry]]]:
    """Of `count` blocks the most that all groups can go on from, and what each of them needs of those."""
    in_a_row = [_in_a_row(entries[:count]) for entries in known]

    def first(group: GroupBlocks) -> int:
        return group.layers.first_block(count * size, size)

    while any(row[count] < count - first(group) for group, row in zip(groups, in_a_row, strict=True)):
        count -= 1
    parts = [entries[first(group) : count] for group, entries in zip(groups, known, strict=True)]
    return count, [[entry for entry in part if entry is not None] for part in parts]


def _in_a_row(entries: Sequence[object]) -> list[int]:
    """Before each entry, and behind the last: how many entries in a row there are."""
    counts = [0]
    for entry in entries:
        counts.append(0 if entry is None else counts[-1] + 1)
    return counts
