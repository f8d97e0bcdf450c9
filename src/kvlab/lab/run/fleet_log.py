"""What a fleet did in a run, beside the records and steps of its replicas."""

from __future__ import annotations

from dataclasses import dataclass
from operator import itemgetter

from kvlab.fleet.fleet import Fleet, Routed
from kvlab.fleet.holdings import Holdings
from kvlab.fleet.scale import Scaled
from kvlab.fleet.transfer import Transfer
from kvlab.kv.tiers.tier import TierCounts


@dataclass(frozen=True, slots=True)
class FleetLog:
    """What its router chose, what its replicas sent each other, and how many there were. None: it has no such
    thing.
    """

    names: list[str]  # of each replica, its group's; none where all are of one
    routed: list[Routed]  # in that order
    retried: int  # requests that were lost with a replica and sent again
    lost_tokens: int  # that replicas which died had computed
    transfers: list[Transfer]  # of prompts, to replicas that decode
    pulled_tokens: dict[int, int]  # of prompts, by these replicas
    scaled: list[Scaled]  # replicas that started and stopped by a rule
    replica_s: float | None  # seconds of all replicas together, where a rule decides that
    store: TierCounts | None  # of a store that the replicas have in common
    pulls: list[Transfer] | None  # of prefixes that another replica had
    pulled_hits: int  # blocks of prompts that came by them
    holdings: Holdings | None  # who has what, where that was followed

    @classmethod
    def of(cls, fleet: Fleet, duration_s: float) -> FleetLog:
        """That of a fleet whose run has taken so long."""
        split, scalers, neighbours = fleet.split, fleet.scalers, fleet.neighbours
        always = len(fleet.replicas) - sum(len(replicas) for _, replicas in fleet.router.config.rules)
        sides = [side.counts for side in fleet.sides.values()]
        store = {name: sum(getattr(side, name) for side in sides) for name in ("stored", "loaded", "hits")}
        pulled = {} if split is None else {index: tier.counts.hits for index, tier in split.tiers.items()}
        replica_s = always * duration_s + sum(scaler.finish(duration_s) for scaler in scalers)
        if fleet.holdings is not None:
            fleet.holdings.until(duration_s)
        return cls(
            names=fleet.router.config.names,
            routed=fleet.routed,
            retried=fleet.retried,
            lost_tokens=fleet.lost_tokens,
            transfers=[] if split is None else split.transfers,
            pulled_tokens={index: hits * fleet.views[0].block_size for index, hits in pulled.items()},
            scaled=sorted((event for scaler in scalers for event in scaler.events), key=itemgetter(0)),
            replica_s=replica_s if scalers else None,
            store=TierCounts(**store) if sides else None,
            pulls=[pull for neighbour in neighbours for pull in neighbour.pulls] if neighbours else None,
            pulled_hits=sum(neighbour.counts.hits for neighbour in neighbours),
            holdings=fleet.holdings,
        )
