"""A store of K and V that all replicas of a fleet have in common, as Mooncake's or LMCache's."""

import math
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from itertools import takewhile

from kvlab.engine.clock import Clock
from kvlab.fleet.transfer import LinkRate, PrefillTime, PullLink
from kvlab.kv.content_log import Stored
from kvlab.kv.eviction import EVICTION_POLICIES
from kvlab.kv.lending import follow
from kvlab.kv.pool import BlockPool
from kvlab.kv.tiers.base import Key
from kvlab.kv.tiers.remote import ElsewhereTier
from kvlab.kv.tiers.tier import Tier


class SharedStore:
    """The contents of up to `blocks` blocks, of which the least recently used go first, and when each is there."""

    def __init__(self, blocks: int, page_bytes: int) -> None:
        self.contents = Tier("store", blocks, page_bytes, EVICTION_POLICIES.get("lru")())
        self.there_s: dict[Key, float] = {}

    def has(self, key: Key, now: float) -> bool:
        """Whether a content is there."""
        return self.there_s.get(key, math.inf) <= now

    def leading(self, keys: Sequence[Key], now: float) -> int:
        """How many contents from the first on are there."""
        return sum(1 for _ in takewhile(lambda key: self.has(key, now), keys))


class StoreSide(ElsewhereTier):
    """One replica's side of the store. What a step has computed is written when the step ends, and all replicas
    find it once it is there. The replica has one link for writes and one for loads. What its pool evicts is not
    written again. Blocks of layers with a window are written like all others.
    """

    def __init__(self, store: SharedStore, rate: LinkRate, prefill_s: PrefillTime | None = None) -> None:
        """`prefill_s` predicts what it takes to compute what is found; None: it is always loaded."""
        self._write, self._load = PullLink(rate), PullLink(rate, prefill_s)
        super().__init__("store", store.contents.page_bytes, down=self._write, up=self._load)
        self._store, self._contents, self._own = store, store.contents, Counter[Key]()
        self._writing = deque[tuple[float, Key]]()  # and when it will be there
        self._dropped = deque[tuple[int, Key]]()  # by the pool, and in which of the steps that have begun
        self._ended_s = 0.0  # the step before: no replica dies before its last has begun

    def serve(self, pool: BlockPool, clock: Clock) -> None:
        """Follow what the replica's pool stores. Comes before the first request."""
        self._clock, self._log, self._size = clock, follow(pool), pool.block_size

    def stepped(self, ends_s: Sequence[float]) -> None:
        """The replica has taken steps that end then: write what they computed."""
        while self._writing and self._writing[0][0] <= self._ended_s:
            self._writing.popleft()
        for number, (end_s, events) in enumerate(zip(ends_s, self._log.take_by_step(), strict=True)):
            while self._dropped and self._dropped[0][0] <= number:
                _, dropped = self._dropped.popleft()
                if dropped in self._contents:
                    self._contents.refresh(dropped)
            for key in (key for event in events if isinstance(event, Stored) for key in event.keys):
                self._put(key, end_s)
        self._ended_s = ends_s[-1]

    def _put(self, key: Key, computed_s: float) -> None:
        """Write a content, unless it is there or all others are held."""
        if key in self._contents:
            self._contents.refresh(key)
            return
        added = self._contents.add(key)
        if added is not None:
            _, gone = added
            if gone is not None:
                self._store.there_s.pop(gone, None)
            there_s = self._store.there_s[key] = self._write.transfer(computed_s, self.page_bytes)
            self._writing.append((there_s, key))
            self.counts.stored += 1

    def lose(self, now: float) -> None:
        """The replica dies: what it has not written completely is lost, and its links are free."""
        for there_s, key in self._writing:
            if there_s > now and self._store.there_s.get(key) == there_s:
                del self._store.there_s[key]
                self._contents.drop(key)
                self.counts.stored -= 1
        self._writing.clear()
        self._dropped.clear()
        for link in (self._write, self._load):
            link.own.break_off(now)

    def wanted(self, keys: Sequence[Key], before: int, *, again: bool = False) -> int:
        return len(keys) if self.is_worth(keys, before, len(keys)) else 0

    def is_worth(self, keys: Sequence[Key], before: int, blocks: int) -> bool:
        return self._load.beats_prefill(self._clock.now(), self._size, before, blocks, len(keys))

    def __len__(self) -> int:
        return len(self._contents)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, bytes) and self._store.has(key, self._clock.now())

    def refresh(self, key: Key) -> None:
        """See Tier. The pool evicts a content, which counts as used until now in the order of the store."""
        self._dropped.append((self._log.steps, key))

    def add(self, key: Key) -> None:
        """See Tier. The same of a content that is not in the store yet: it is written when its step ends."""
        self.refresh(key)

    def hold(self, key: Key) -> int:
        self._own[key] += 1
        return self._contents.hold(key)

    def release(self, key: Key) -> None:
        self._own -= Counter([key])
        self._contents.release(key)

    def held(self) -> dict[Key, int]:
        """What this replica holds."""
        return dict(self._own)

    def broken(self) -> Iterator[str]:
        return self._contents.broken()
