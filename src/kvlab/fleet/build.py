"""From settings to a fleet: what feeds the router's views."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from time import perf_counter

from kvlab.config.fleet import FleetConfig
from kvlab.engine.core import EngineCore
from kvlab.engine.front_end import FrontEnd
from kvlab.engine.step import Executor, StepInput, StepResult
from kvlab.errors import ConfigError
from kvlab.fleet.fleet import Fleet
from kvlab.fleet.prefixes import HeldPrefixes, PrefixView, SentPrefixes
from kvlab.fleet.replica import Replica, SimulatedView
from kvlab.fleet.routers import ROUTERS
from kvlab.fleet.scale import Scaler
from kvlab.fleet.split import Split
from kvlab.fleet.store import SharedStore, StoreSide
from kvlab.fleet.transfer import LinkRate
from kvlab.kv.content_log import ContentLog
from kvlab.kv.pool import BlockPool
from kvlab.kv.tiers.tier import Tier
from kvlab.kv.view import CacheView


def build_fleet(
    config: FleetConfig,
    makers: Sequence[Callable[[Tier | None], EngineCore | FrontEnd]],
    rates: Sequence[LinkRate],
    store: SharedStore | None = None,
    *,
    seed: int = 0,
    is_open: bool = False,
) -> Fleet:
    """A fleet of the engines that `makers` make, one each, given the tier from which it pulls what others computed.
    `rates`: of the links to each of them; `store`: one that they have in common. Raises ConfigError for a view of
    prefixes that their pools do not have.
    """
    split = Split(rates, config.prefill, config.split_tokens) if config.prefill else None
    sides = [] if store is None else [StoreSide(store, rate) for rate in rates]
    tiers: Mapping[int, Tier] = dict(enumerate(sides)) if split is None else split.tiers
    router = ROUTERS.get(config.router)(config, seed)
    fleet = Fleet([make(tiers.get(index)) for index, make in enumerate(makers)], router, is_open=is_open)
    load = router.load if config.load == "auto" else config.load
    prefixes = router.prefixes if config.prefixes == "auto" else config.prefixes
    period_s = config.load_s if load == "polled" else 0.0
    fleet.views = [
        SimulatedView(replica, period_s, _prefixes(prefixes, config, router.memory, replica, seed))
        for replica in fleet.replicas
    ]
    for side, replica in zip(sides, fleet.replicas, strict=False):
        if isinstance(replica.core.pool, BlockPool):
            side.serve(replica.core.pool, replica.core.clock)
    fleet.sides = sides
    fleet.live(config.events)
    if config.scale.on is not None:
        fleet.scaler = Scaler(config.scale, fleet.replicas)
    if split is not None:
        split.serve(fleet, ROUTERS.get(config.router)(config, seed + 1))
    return fleet


def _prefixes(
    kind: str, config: FleetConfig, memory: tuple[int, int, int], replica: Replica, seed: int
) -> PrefixView:
    if kind == "none":
        return PrefixView()
    if kind == "memory":
        size, capacity, most = memory
        return SentPrefixes(size, config.memory_blocks or capacity, most)
    pool = replica.core.pool
    if not isinstance(pool, BlockPool) or not pool.shares_prefixes:
        text = "needs a prefix cache, and the replicas have none; use kv=paged, or fleet.prefixes=none"
        raise ConfigError("fleet.prefixes", kind, text)
    log = pool.allocator.content_log = ContentLog(has_groups=len(pool.groups) > 1)
    if kind == "exact":
        return HeldPrefixes(log, pool.block_size)
    delay_s = config.events_ms * 1e-3
    return HeldPrefixes(log, pool.block_size, delay_s=delay_s, lost=config.events_lost, seed=seed + replica.index)


class TimedExecutor(Executor):
    """An executor that says how long each pass took here, so that replicas which share a machine have clocks of
    their own, as if each had the machine to itself. What scheduling takes beside the pass is not counted.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def execute(self, step: StepInput, view: CacheView) -> StepResult:
        start = perf_counter()
        result = self._executor.execute(step, view)
        return replace(result, elapsed_s=perf_counter() - start)
