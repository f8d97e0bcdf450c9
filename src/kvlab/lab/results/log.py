"""What happened in a run, as its engine told it: the input of its metrics and tables."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import itemgetter

from kvlab.core import RequestRecord
from kvlab.core.step_log import StepLog
from kvlab.engine.protocol import EngineReport
from kvlab.fleet.dispatcher import Routed
from kvlab.fleet.fleet import Fleet
from kvlab.fleet.holdings import Holdings
from kvlab.fleet.scale import Scaled
from kvlab.fleet.transfer import Transfer
from kvlab.kv.journal import BlockEvents
from kvlab.kv.tiers.tier import TierCounts


@dataclass(frozen=True, slots=True)
class FleetLog:
    """What a fleet did beside the records and steps of its replicas. None: it has no such thing."""

    names: list[str]  # of each replica, its group's; none where all are of one
    routed: list[Routed]  # in that order
    retried: int | None  # requests that were lost with a replica and sent again, where any dies
    lost_tokens: int  # that replicas which died had computed
    deaths: list[tuple[float, int]]  # when which replica died, by time
    transfers: list[Transfer]  # of prompts, to replicas that decode
    pulled_tokens: dict[int, int]  # of prompts, by these replicas
    scaled: list[Scaled]  # replicas that started and stopped by a rule
    replica_s: float | None  # seconds of all replicas together, where a rule decides that
    store: TierCounts | None  # of a store that the replicas have in common
    pulls: list[Transfer] | None  # of prefixes that another replica had
    pulled_hits: int  # blocks of prompts that came by them
    holdings: Holdings | None  # who has what, where that was followed

    @property
    def gone(self) -> list[tuple[float, int]]:
        """When which replica lost all that it had, as it died or a rule stopped it."""
        return [*self.deaths, *((event.at_s, event.replica) for event in self.scaled if event.event == "stop")]

    @classmethod
    def of(cls, fleet: Fleet, duration_s: float) -> FleetLog:
        """That of a fleet whose run has taken so long."""
        config, split, scalers, neighbours = fleet.router.config, fleet.split, fleet.scalers, fleet.neighbours
        always = len(fleet.replicas) - sum(len(replicas) for _, replicas in config.rules)
        sides = [side.counts for side in fleet.sides.values()]
        store = {name: sum(getattr(side, name) for side in sides) for name in ("stored", "loaded", "hits")}
        pulled = {} if split is None else {index: tier.counts.hits for index, tier in split.tiers.items()}
        replica_s = always * duration_s + sum(scaler.finish(duration_s) for scaler in scalers)
        if fleet.holdings is not None:
            fleet.holdings.until(duration_s)
        return cls(
            names=config.names,
            routed=fleet.routed,
            retried=fleet.retried if config.life else None,
            lost_tokens=fleet.lost_tokens,
            deaths=[(event.at_s, event.replica) for event in config.events if event.event == "die"],
            transfers=[] if split is None else split.transfers,
            pulled_tokens={index: hits * fleet.views[0].block_size for index, hits in pulled.items()},
            scaled=sorted((event for scaler in scalers for event in scaler.events), key=itemgetter(0)),
            replica_s=replica_s if scalers else None,
            store=TierCounts(**store) if sides else None,
            pulls=[pull for neighbour in neighbours for pull in neighbour.pulls] if neighbours else None,
            pulled_hits=sum(neighbour.counts.hits for neighbour in neighbours),
            holdings=fleet.holdings,
        )


@dataclass(slots=True)
class RunLog:
    """What happened. While the engine is driven, `records` has the requests that have ended, in that order;
    afterwards all in the order of their submission, samples in order.
    """

    records: list[RequestRecord] = field(default_factory=list)
    steps: StepLog = field(default_factory=StepLog)
    refused: list[str] = field(default_factory=list)  # why, of each request that the engine did not take
    refused_s: list[float] = field(default_factory=list)  # when those came that were sent
    unsent: int = 0  # how many of them were not: turns behind one that failed or was refused
    duration_s: float = 0.0  # from the first possible arrival to the last end
    interrupted: bool = False
    next_arrival_s: float | None = None  # while the engine is driven: of the requests that have not arrived
    engine_report: EngineReport | None = None  # of an engine that is not kvlab's, beside the records
    fleet: FleetLog | None = None  # of several replicas: what they did beside that
    blocks: BlockEvents | None = None  # what happened to each block, `sequence` as index of `records`

    @property
    def completed(self) -> int:
        """How many samples ended as their requests asked."""
        return sum(record.completed for record in self.records)
