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


class Place(NamedTuple):
    """Where a replica has a content, and how many of its tokens count: none of groups of layers but the first."""

    block: int
    tokens: int


class _Coming(NamedTuple):
    """A change to come: contents that a replica has in these places from then on. None: it has them no more."""

    when_s: float
    number: int  # which makes an order of equals
    replica: int
    places: dict[Key, Place | None]


@dataclass(slots=True)
class Duplicates:
    """Tokens that replicas hold, and how many of them are duplicates, over time. If three replicas hold a content,
    two of them hold duplicates.
    """

    held: int = 0  # now, as are the duplicates
    duplicate: int = 0
    peak: int = 0  # the most duplicates
    peak_held: int = 0  # tokens that were held at that moment
    at_s: float = 0.0
    # Tokens times seconds up to the last change: a sum that is added to no more often than that rounds alike.
    _held_s: float = 0.0
    _duplicate_s: float = 0.0
    _changed_s: float = 0.0

    @property
    def held_s(self) -> float:
        """Tokens times seconds, up to `at_s`."""
        return self._held_s + self.held * (self.at_s - self._changed_s)

    @property
    def duplicate_s(self) -> float:
        """The same of duplicates."""
        return self._duplicate_s + self.duplicate * (self.at_s - self._changed_s)

    def until(self, now: float) -> None:
        """Nothing changed until then."""
        self.at_s = max(now, self.at_s)

    def add(self, held: int, duplicate: int) -> None:
        """So many more now."""
        self._held_s, self._duplicate_s, self._changed_s = self.held_s, self.duplicate_s, self.at_s
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
    holders: dict[Key, dict[int, Place]] = field(default_factory=dict)  # by content and replica
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
            for key, place in coming.places.items():
                self._set(coming.replica, key, place)
        self.duplicates.until(now)

    def of(self, key: Key) -> Mapping[int, Place]:
        """The replicas that have a content, and where."""
        return self.holders.get(key, {})

    def _take(self, replica: int, events: Sequence[ContentEvent], begin_s: float, end_s: float) -> None:
        """Note what the events of one step change: contents go when it begins, others come when it ends."""
        gone, added = dict[Key, None](), dict[Key, Place | None]()  # in order: that of a set differs by process
        size = self.pools[replica].block_size
        for event in events:
            if isinstance(event, Cleared):
                gone |= dict.fromkeys(key for key, holders in self.holders.items() if replica in holders)
                own = (coming for coming in sorted(self._coming) if coming.replica == replica)
                gone |= dict.fromkeys(key for coming in own for key in coming.places)
                added = {}
            elif event.group and not self.follow_groups:
                continue
            elif isinstance(event, Stored):
                tokens = 0 if event.group else size
                added |= {key: Place(block, tokens) for key, block in zip(event.keys, event.blocks, strict=True)}
            else:
                gone |= dict.fromkeys(event.keys)
                added = {key: place for key, place in added.items() if key not in gone}
        if gone:
            for coming in self._coming:
                if coming.replica == replica and coming.when_s > begin_s:  # it was lost before it was there
                    for key in gone.keys() & coming.places.keys():
                        del coming.places[key]
            self._push(begin_s, replica, dict[Key, Place | None](gone))
        if added:
            self._push(end_s, replica, added)

    def _push(self, when_s: float, replica: int, places: dict[Key, Place | None]) -> None:
        heapq.heappush(self._coming, _Coming(when_s, next(self._numbers), replica, places))
        self.until(self.duplicates.at_s)

    def _set(self, replica: int, key: Key, place: Place | None) -> None:
        """A replica has a content in this place from now on; None: it has it no more."""
        holders, change = self.holders.setdefault(key, {}), 0
        if place is not None and replica not in holders:
            self.duplicates.add(place.tokens, place.tokens if holders else 0)
            holders[replica], change = place, 1
        elif place is None and (had := holders.pop(replica, None)) is not None:
            self.duplicates.add(-had.tokens, -had.tokens if holders else 0)
            change = -1
        if not holders:
            del self.holders[key]
        if change and (prefix := self._hot_of.get(key)) is not None:
            count = self._hot_blocks.get((prefix, replica), 0) + change
            self._hot_blocks[prefix, replica] = count
            now = Held(self.duplicates.at_s, prefix, replica, count)
            if self.history and self.history[-1][:3] == now[:3]:
                self.history.pop()
            self.history.append(now)
