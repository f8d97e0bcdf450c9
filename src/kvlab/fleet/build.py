"""From settings to a fleet: what feeds the router's views."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter

from kvlab.config.fleet import FleetConfig
from kvlab.engine.core import EngineCore
from kvlab.engine.front_end import FrontEnd
from kvlab.engine.step import Executor, StepInput, StepResult
from kvlab.errors import ConfigError
from kvlab.fleet.decode_first import DecodeFirst
from kvlab.fleet.fleet import Fleet
from kvlab.fleet.holdings import Holdings
from kvlab.fleet.hot_prefixes import HotPrefix
from kvlab.fleet.neighbours import NeighbourTier
from kvlab.fleet.prefixes import HeldPrefixes, PrefixView, SentPrefixes, WithStore
from kvlab.fleet.replica import Replica, SimulatedView
from kvlab.fleet.routers import ROUTERS
from kvlab.fleet.scale import Scaler
from kvlab.fleet.split import Split
from kvlab.fleet.store import SharedStore, StoreSide
from kvlab.fleet.transfer import LinkEnd, LinkRate, PrefillTime
from kvlab.kv.lending import follow
from kvlab.kv.pool import BlockPool
from kvlab.kv.tiers.tier import Tier
from kvlab.kv.view import CacheView


def build_fleet(
    config: FleetConfig,
    makers: Sequence[Callable[[Sequence[Tier]], EngineCore | FrontEnd]],
    rates: Sequence[LinkRate],
    store: SharedStore | None = None,
    *,
    prefill_s: Sequence[PrefillTime] = (),
    hot: Sequence[HotPrefix] | None = None,
    seed: int = 0,
    is_open: bool = False,
) -> Fleet:
    """A fleet of the engines that `makers` make, one each, given the tiers from which it pulls what others
    computed. `rates`: of the links to each of them; `store`: one that they have in common; `prefill_s`: of each,
    where pulls are weighed against it. Unless `hot` is None it is followed who has what, and where these prefixes
    are. Raises ConfigError for a view of prefixes that their pools do not have.
    """
    every, split, tiers = range(len(makers)), None, dict[int, list[Tier]]()
    if config.prefill:
        kind = DecodeFirst if config.handshake == "decode_first" else Split
        split = kind(rates, config.prefill, config.split_tokens)
        tiers = {index: [tier] for index, tier in split.tiers.items()}
    sides, neighbours, ends = dict[int, StoreSide](), list[NeighbourTier](), [LinkEnd() for _ in every]
    for index, rate in enumerate(rates):
        own, predicted = tiers.setdefault(index, []), prefill_s[index] if prefill_s else None
        if store is not None and (split is None or index in split.prefilling):
            sides[index] = StoreSide(store, rate, predicted if config.pull == "cheaper" else None)
            own.append(sides[index])
        if config.neighbours:
            neighbours.append(NeighbourTier(index, rate, ends, predicted if config.pull != "always" else None))
            own.append(neighbours[-1])
    router = ROUTERS.get(config.router)(config, seed)
    fleet = Fleet([make(tiers.get(index, ())) for index, make in enumerate(makers)], router, is_open=is_open)
    load = router.load if config.load == "auto" else config.load
    prefixes = view_of_prefixes(config)
    period_s = config.load_s if load == "polled" else 0.0
    fleet.views = [
        SimulatedView(replica, period_s, _prefixes(prefixes, config, router.memory, replica, seed))
        for replica in fleet.replicas
    ]
    if store is not None and prefixes != "none" and config.store_weight:
        for index in sides:
            view = fleet.views[index]
            view.prefixes = WithStore(view.prefixes, store.has, view.block_size, config.store_weight)
    pools = [pool for replica in fleet.replicas if isinstance(pool := replica.core.pool, BlockPool)]
    for index, side in sides.items():
        side.serve(pools[index], fleet.replicas[index].core.clock)
    fleet.sides, fleet.neighbours = sides, neighbours
    if neighbours or hot is not None:
        holdings = fleet.holdings = Holdings(pools, hot or (), follow_groups=bool(neighbours))
        for neighbour in neighbours:
            neighbour.serve(holdings, fleet.replicas)
    fleet.live(config.events)
    fleet.scalers = [Scaler(rule, [fleet.replicas[index] for index in indices]) for rule, indices in config.rules]
    if split is not None:
        split.serve(fleet, ROUTERS.get(config.router)(config, seed + 1))
    return fleet


def view_of_prefixes(config: FleetConfig) -> str:
    """What the router knows of prefixes: as set, or as it does by default."""
    return ROUTERS.get(config.router).prefixes if config.prefixes == "auto" else config.prefixes


def without_prefixes(config: FleetConfig) -> ConfigError:
    """Of replicas that have no prefix cache, behind a router that sees prefixes."""
    by = ("fleet.router", config.router) if config.prefixes == "auto" else ("fleet.prefixes", config.prefixes)
    text = "needs a prefix cache, and the replicas have none; use kv=paged with kv.prefix_sharing=true, or "
    return ConfigError(*by, text + "a router that knows no prefixes, as fleet.router=least_requests")


def _prefixes(
    kind: str, config: FleetConfig, memory: tuple[int, int, int], replica: Replica, seed: int
) -> PrefixView:
    if kind == "none":
        return PrefixView()
    pool = replica.core.pool
    if not isinstance(pool, BlockPool) or not pool.shares_prefixes:
        raise without_prefixes(config)
    if kind == "memory":
        size, capacity, most = memory
        return SentPrefixes(size, config.memory_blocks or capacity, most)
    log = follow(pool)
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
