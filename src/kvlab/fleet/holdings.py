"""Which replica holds which contents: what neighbours can pull, and how much is held more than once."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvlab.fleet.hot_prefixes import HotPrefix
from kvlab.kv.content_log import Cleared, ContentEvent, ContentLog, Stored
from kvlab.kv.lending import follow
from kvlab.kv.pool import BlockPool
from kvlab.kv.tiers.base import Key


class Held(NamedTuple):
    """From `at_s` on a replica holds so many blocks of a hot prefix."""

    at_s: float
    prefix: int
    replica: int
    blocks: int


class _Coming(NamedTuple):
    """A change to come: contents that a replica has in these blocks from then on. None: it has them no more."""

    when_s: float
    number: int  # which makes an order of equals
    replica: int
    is_other: bool  # of other groups of layers than the first
    blocks: dict[Key, int | None]


@dataclass(slots=True)
class Duplicates:
    """Tokens that replicas hold, and how many of them are duplicates, over time. If three replicas hold a content,
    two of them hold duplicates.
    """

    held: int = 0  # now, as are the duplicates
    duplicate: int = 0
    held_s: float = 0.0  # tokens times seconds, up to `at_s`
    duplicate_s: float = 0.0
    peak: int = 0  # the most duplicates
    peak_held: int = 0  # tokens that were held at that moment
    at_s: float = 0.0

    def until(self, now: float) -> None:
        """Nothing changed until then."""
        seconds = max(now - self.at_s, 0.0)
        self.held_s += self.held * seconds
        self.duplicate_s += self.duplicate * seconds
        self.at_s = max(now, self.at_s)

    def add(self, held: int, duplicate: int) -> None:
        """So many more now."""
        self.held, self.duplicate = self.held + held, self.duplicate + duplicate
        if self.duplicate > self.peak:
            self.peak, self.peak_held = self.duplicate, self.held


@dataclass(slots=True)
class Holdings:
    """Follows the contents of the replicas' `pools`. What a step computes is there when the step ends; what it
    evicts is gone when it begins. `history` says where the `hot` prefixes are over time. Contents of groups of
    layers other than the first are followed if `follow_groups`, and not counted.
    """

    pools: Sequence[BlockPool]
    hot: Sequence[HotPrefix] = ()
    follow_groups: bool = False
    holders: dict[Key, dict[int, int]] = field(default_factory=dict)  # by content: replicas, each with its block
    others: dict[Key, dict[int, int]] = field(default_factory=dict)  # the same for other groups' contents
    duplicates: Duplicates = field(default_factory=Duplicates)
    history: list[Held] = field(default_factory=list)
    _logs: list[ContentLog] = field(default_factory=list)
    _coming: list[_Coming] = field(default_factory=list)  # a heap
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    _hot_of: dict[Key, int] = field(default_factory=dict)  # the hot prefix that a content is of
    _hot_blocks: dict[tuple[int, int], int] = field(default_factory=dict)  # by hot prefix and replica

    def __post_init__(self) -> None:
        self._logs = [follow(pool) for pool in self.pools]
        self._hot_of = {key: number for number, prefix in enumerate(self.hot) for key in prefix.keys}

    def stepped(self, replica: int, ends_s: Sequence[float]) -> None:
        """A replica has taken steps that end then. The first begins now."""
        begin_s = self.duplicates.at_s
        for end_s, events in zip(ends_s, self._logs[replica].take_by_step(), strict=True):
            self._take(replica, events, begin_s, end_s)
            begin_s = end_s

    def changed(self, replica: int, now: float) -> None:
        """A replica's contents have changed now, without a step."""
        self._take(replica, self._logs[replica].take(), now, now)

    def until(self, now: float) -> None:
        """Make the changes up to now."""
        while self._coming and self._coming[0][0] <= now:
            coming = heapq.heappop(self._coming)
            self.duplicates.until(coming.when_s)
            for key, block in coming.blocks.items():
                self._set(coming, key, block)
        self.duplicates.until(now)

    def of(self, key: Key) -> Mapping[int, int]:
        """The replicas that have a content, each with its block."""
        return self.holders.get(key) or self.others.get(key, {})

    def _take(self, replica: int, events: Sequence[ContentEvent], begin_s: float, end_s: float) -> None:
        """Note what the events of one step change: contents go when it begins, others come when it ends."""
        for is_other in (False, True)[: 1 + self.follow_groups]:
            self._take_of(replica, events, begin_s, end_s, is_other=is_other)

    def _take_of(
        self, replica: int, events: Sequence[ContentEvent], begin_s: float, end_s: float, *, is_other: bool
    ) -> None:
        """The same of the contents of the first group, or of others."""
        gone, added = dict[Key, None](), dict[Key, int | None]()  # in order: that of a set differs by process
        for event in events:
            if isinstance(event, Cleared):
                known = self.others if is_other else self.holders
                gone |= dict.fromkeys(key for key, holders in known.items() if replica in holders)
                own = (coming for coming in sorted(self._coming) if coming[2:4] == (replica, is_other))
                gone |= dict.fromkeys(key for coming in own for key in coming.blocks)
                added = {}
            elif bool(event.group) != is_other:
                continue
            elif isinstance(event, Stored):
                added |= zip(event.keys, event.blocks, strict=True)
            else:
                gone |= dict.fromkeys(event.keys)
                added = {key: block for key, block in added.items() if key not in gone}
        if gone:
            for coming in self._coming:
                if coming.replica == replica and coming.when_s > begin_s:  # it was lost before it was there
                    for key in gone.keys() & coming.blocks.keys():
                        del coming.blocks[key]
            self._push(begin_s, replica, is_other, dict[Key, int | None](gone))
        if added:
            self._push(end_s, replica, is_other, added)

    def _push(self, when_s: float, replica: int, is_other: bool, blocks: dict[Key, int | None]) -> None:
        heapq.heappush(self._coming, _Coming(when_s, next(self._numbers), replica, is_other, blocks))
        self.until(self.duplicates.at_s)

    def _set(self, coming: _Coming, key: Key, block: int | None) -> None:
        """A replica has a content in this block from now on; None: it has it no more."""
        known, replica = self.others if coming.is_other else self.holders, coming.replica
        holders = known.setdefault(key, {})
        if (block is None) == (replica not in holders):
            if not holders:
                del known[key]
            return
        size = 0 if coming.is_other else self.pools[replica].block_size
        if block is None:
            del holders[replica]
            self.duplicates.add(-size, -size if holders else 0)
            if not holders:
                del known[key]
        else:
            self.duplicates.add(size, size if holders else 0)
            holders[replica] = block
        if (prefix := self._hot_of.get(key)) is not None:
            count = self._hot_blocks.get((prefix, replica), 0) + (1 if block is not None else -1)
            self._hot_blocks[prefix, replica] = count
            now = Held(self.duplicates.at_s, prefix, replica, count)
            if self.history and self.history[-1][:3] == now[:3]:
                self.history.pop()
            self.history.append(now)
