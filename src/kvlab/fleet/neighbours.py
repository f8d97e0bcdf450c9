"""Prefixes that other replicas hold: pulled over the link where that takes less time than to compute them."""

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
    """What is on its way from another replica, which keeps it in a slot until then; None: no more."""

    source: int
    slot: int | None
    keys: set[Key]


class NeighbourTier(ElsewhereTier):
    """What a replica can pull from the others, those that take requests. It asks the one that has most of what is
    missing, of equals the one that is free first. The source keeps the blocks until they have been pulled.

    `prefill_s` predicts what it would take to compute them; None: they are always pulled. `ends` are the replicas'
    sides of the links as they send.
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
        """From now on it knows who has what."""
        self._holdings, self._pools, self._replicas = holdings, holdings.pools, replicas
        self._replica = replicas[self._index]

    def wanted(self, keys: Sequence[Key], before: int, *, again: bool = False) -> int:
        """See Tier."""
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
        """Whether the blocks that are pulled come sooner than those that they spare are computed."""
        core = self._replica.core
        return self._link.beats_prefill(core.clock.now(), core.pool.block_size, before, spared, pulled)

    def _sources(self, key: Key) -> Iterator[int]:
        holders = self._holdings.of(key)
        return (holder for holder in holders if holder != self._index and self._replicas[holder].takes_requests)

    def _begin(self, ready_s: float, start_s: float, end_s: float, num_bytes: int) -> None:
        """A transfer begins of what was held last."""
        keys, source = self._asked[::-1], self._source
        self._asked = []
        pool = self._pools[source]
        slot = lend(pool, [self._holdings.of(key)[source] for key in keys])
        self._replicas[source].core.lent.add(slot)
        pull = _Pull(source, slot, set(keys))
        self._under_way |= dict.fromkeys(keys, pull)
        tokens = sum(key in self._holdings.holders for key in keys) * pool.block_size
        sent = Transfer("", source, self._index, ready_s, start_s, end_s, num_bytes, tokens)
        self._unnamed.append((keys[0], sent))

    def stepped(self) -> None:
        """The replica has taken steps: whose pulls began in them."""
        for key, transfer in self._unnamed:
            load = self._replica.loading.get(key)
            running = self._replica.core.scheduler.running if load is not None else ()
            names = (each.request.request_id for each in running if load and each.slot == load.owner)
            self.pulls.append(replace(transfer, request_id=next(names, "")))
        self._unnamed = []

    def lose(self, source: int, now: float) -> None:
        """What is on its way from a replica comes to nothing, and what is on its way to it if it is this one."""
        break_off(self.pulls, source, now, lambda sent: (self._ends[sent.source], self._link.own))
        for key, pull in self._under_way.items():
            if pull.source == source:
                self._replica.lose_load(self._replica.loading[key], now)
                self._return(pull, now)

    def _return(self, pull: _Pull, now: float) -> None:
        """The source may reuse the blocks."""
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
        """See Tier."""
        for key, pull in self._under_way.items():
            if key not in pull.keys or (pull.slot is None) != self._replica.loading[key].is_lost:
                yield "what is on its way is not what its source keeps"
