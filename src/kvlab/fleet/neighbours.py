"""Prefixes that other replicas hold: they are pulled where that takes less time than to compute them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from kvlab.fleet.holdings import Holdings
from kvlab.fleet.replica import Replica
from kvlab.fleet.transfer import LinkEnd, LinkRate, PrefillTime, PullLink, Transfer, break_off
from kvlab.kv.lending import lend
from kvlab.kv.tiers.base import Key
from kvlab.kv.tiers.remote import ElsewhereTier


@dataclass(slots=True)
class _Pull:
    """Contents on their way from another replica."""

    source: int
    slot: int | None  # of the source, which keeps them there until they have come; None: it does not any more
    keys: set[Key]  # those that have not come


class NeighbourTier(ElsewhereTier):
    """What a replica can pull from the others that take requests. It pulls from the one that has most of what is
    missing, of equals from the one that is free first. The source keeps the blocks until they have been pulled.

    `prefill_s` predicts what it takes to compute them; None: they are always pulled. `ends` are those at which the
    replicas send.
    """

    def __init__(self, index: int, rate: LinkRate, ends: Sequence[LinkEnd], prefill_s: PrefillTime | None) -> None:
        self._link = PullLink(rate, prefill_s, source=lambda: ends[self._source], note=self._begin)
        super().__init__("neighbours", rate.block_bytes, up=self._link)
        self.pulls: list[Transfer] = []
        self._index, self._ends = index, ends
        self._source, self._asked = 0, list[Key]()
        self._under_way: dict[Key, _Pull] = {}
        self._unnamed: list[tuple[Key, Transfer]] = []

    def serve(self, holdings: Holdings, replicas: Sequence[Replica]) -> None:
        """Find out from `holdings` who has what. Comes before the first request."""
        self._holdings, self._pools, self._replicas = holdings, holdings.pools, replicas
        self._replica = replicas[self._index]

    def wanted(self, keys: Sequence[Key], before: int, *, again: bool = False) -> int:
        counts = {
            source: sum(1 for _ in takewhile(lambda key: source in self._holdings.of(key), keys))  # noqa: B023
            for source in self._sources(keys[0])
            if source == self._source or not again
        }
        if not counts:
            return 0
        self._source = min(counts, key=lambda source: (-counts[source], self._ends[source].free_s, source))
        count = counts[self._source]
        return count if self._beats(before, count, count) else 0

    def is_worth(self, keys: Sequence[Key], before: int, blocks: int) -> bool:
        """See Tier. One replica has to have them all."""
        sources = set(self._sources(keys[0])).intersection(*map(self._holdings.of, keys))
        if not sources:
            return False
        self._source = min(sources, key=lambda source: (self._ends[source].free_s, source))
        return self._beats(before, blocks, len(keys))

    def _beats(self, before: int, spared: int, pulled: int) -> bool:
        """Whether so many `pulled` blocks come sooner than the `spared` ones are computed."""
        core = self._replica.core
        return self._link.beats_prefill(core.clock.now(), core.pool.block_size, before, spared, pulled)

    def _sources(self, key: Key) -> Iterator[int]:
        holders = self._holdings.of(key)
        return (holder for holder in holders if holder != self._index and self._replicas[holder].takes_requests)

    def _begin(self, ready_s: float, start_s: float, end_s: float, num_bytes: int) -> None:
        """What was held last is transferred then: the source keeps the blocks."""
        keys, source = self._asked[::-1], self._source
        self._asked = []
        pool = self._pools[source]
        places = [self._holdings.of(key)[source] for key in keys]
        slot = lend(pool, [place.block for place in places])
        self._replicas[source].core.lent.add(slot)
        pull = _Pull(source, slot, set(keys))
        self._under_way |= dict.fromkeys(keys, pull)
        tokens = sum(place.tokens for place in places)
        sent = Transfer("", source, self._index, ready_s, start_s, end_s, num_bytes, tokens)
        self._unnamed.append((keys[0], sent))

    def stepped(self) -> None:
        """The replica has taken steps: find out for which requests pulls began in them."""
        for key, transfer in self._unnamed:
            load = self._replica.loading.get(key)
            running = self._replica.core.scheduler.running
            names = (each.request.request_id for each in running if load and each.slot == load.owner)
            self.pulls.append(replace(transfer, request_id=next(names, "")))
        self._unnamed = []

    def lose(self, source: int, now: float) -> None:
        """A replica dies: pulls from it come to nothing, and those to it if it is this one."""
        break_off(self.pulls, source, now)
        (self._link.own if source == self._index else self._ends[source]).break_off(now)
        for key, pull in self._under_way.items():
            if pull.source == source:
                self._replica.lose_load(self._replica.loading[key], now)
                self._return(pull, now)

    def _return(self, pull: _Pull, now: float) -> None:
        """Let the source reuse the blocks."""
        slot, pull.slot = pull.slot, None
        if slot is not None:
            self._pools[pull.source].free_slot(slot)
            self._replicas[pull.source].core.lent.discard(slot)
            self._replicas[pull.source].wake(now)

    def __len__(self) -> int:
        return len(self._holdings.holders)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, bytes) and next(self._sources(key), None) is not None

    def hold(self, key: Key) -> int:
        """A content is about to be pulled."""
        self._asked.append(key)
        return 0

    def release(self, key: Key) -> None:
        """A content has come, or nobody waits for it any more."""
        pull = self._under_way.pop(key)
        pull.keys.discard(key)
        if not pull.keys:
            self._return(pull, self._replica.core.clock.now())

    def held(self) -> dict[Key, int]:
        """The contents that are being pulled."""
        return dict.fromkeys(self._under_way, 1)

    def broken(self) -> Iterator[str]:
        for key, pull in self._under_way.items():
            if key not in pull.keys or (pull.slot is None) != self._replica.loading[key].is_lost:
                yield "what is on its way is not what its source keeps"
