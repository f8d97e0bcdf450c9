"""From settings to a fleet: its replicas, what they pull from where, and what feeds the routers' views."""

from collections.abc import Callable, Mapping, Sequence

from kvlab.config.fleet import FleetConfig
from kvlab.engine.core import EngineCore
from kvlab.engine.front_end import FrontEnd
from kvlab.errors import ConfigError
from kvlab.fleet.base import Router
from kvlab.fleet.decode_first import DecodeFirst
from kvlab.fleet.fleet import Fleet
from kvlab.fleet.holdings import Holdings
from kvlab.fleet.hot_prefixes import HotPrefix
from kvlab.fleet.neighbours import NeighbourTier
from kvlab.fleet.prefixes import HeldPrefixes, PrefixView, SentPrefixes
from kvlab.fleet.replica import Replica, SimulatedView
from kvlab.fleet.routers import ROUTERS
from kvlab.fleet.split import Split
from kvlab.fleet.store import SharedStore, StoreSide
from kvlab.fleet.transfer import LinkEnd, LinkRate, PrefillTime
from kvlab.kv.lending import follow
from kvlab.kv.pool import BlockPool
from kvlab.kv.tiers.tier import Tier


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
    """A fleet whose engines `makers` make, one each, given the tiers that it pulls others' K and V from.

    `rates` are those of the links to each replica, `store` is what they have in common, and `prefill_s` predicts
    for each what a pull spares. Unless `hot` is None the fleet notes which replica holds what, and where these
    prefixes are. Raises ConfigError for a router that sees prefixes where the pools keep none.
    """
    split, sides, neighbours = None, dict[int, StoreSide](), list[NeighbourTier]()
    times: Sequence[PrefillTime | None] = prefill_s or [None] * len(makers)
    if config.prefill:
        kind = DecodeFirst if config.handshake == "decode_first" else Split
        split = kind(rates, config.prefill, config.split_tokens)
    if store is not None:
        weighed = times if config.pull == "cheaper" else [None] * len(makers)
        reading = range(config.prefill or len(makers))
        sides = {index: StoreSide(store, rates[index], weighed[index]) for index in reading}
    if config.neighbours:
        weighed = times if config.pull != "always" else [None] * len(makers)
        senders = [LinkEnd() for _ in makers]
        neighbours = [NeighbourTier(index, rate, senders, weighed[index]) for index, rate in enumerate(rates)]
    sources: list[Mapping[int, Tier]] = [{} if split is None else split.tiers, sides, dict(enumerate(neighbours))]
    replicas = [
        Replica(index, make([tiers[index] for tiers in sources if index in tiers]))
        for index, make in enumerate(makers)
    ]
    router, prefill_router = (ROUTERS.get(config.router)(config, each) for each in (seed, seed + 1))
    views = [_view(replica, router, store if replica.index in sides else None, seed) for replica in replicas]
    fleet = Fleet(replicas, views, router, prefill_router, is_open=is_open)
    fleet.split, fleet.sides, fleet.neighbours = split, sides, neighbours
    pools = [pool for replica in replicas if isinstance(pool := replica.core.pool, BlockPool)]
    for index, side in sides.items():
        side.serve(pools[index], replicas[index].core.clock)
    if neighbours or hot is not None:
        fleet.holdings = Holdings(pools, hot or (), follow_groups=bool(neighbours))
        for neighbour in neighbours:
            neighbour.serve(fleet.holdings, replicas)
    if split is not None:
        split.serve(fleet)
    return fleet


def without_prefixes(config: FleetConfig) -> ConfigError:
    """The error of replicas without a prefix cache behind a router that sees prefixes."""
    by = ("fleet.router", config.router) if config.prefixes == "auto" else ("fleet.prefixes", config.prefixes)
    text = "needs a prefix cache, and the replicas have none; use kv=paged with kv.prefix_sharing=true, or "
    return ConfigError(*by, text + "a router that knows no prefixes, as fleet.router=least_requests")


def _view(replica: Replica, router: Router, store: SharedStore | None, seed: int) -> SimulatedView:
    """A replica as the router sees it, and behind it the store, if it reads one."""
    config = router.config
    sees_store = config.fed_by("prefixes") != "none" and config.store_weight
    return SimulatedView(
        replica,
        config.load_s if config.fed_by("load") == "polled" else 0.0,
        _prefixes(replica, router, seed),
        store=store if sees_store else None,
        store_weight=config.store_weight,
    )


def _prefixes(replica: Replica, router: Router, seed: int) -> PrefixView:
    """What the router knows of a replica's prefix cache."""
    config, pool = router.config, replica.core.pool
    source = config.fed_by("prefixes")
    if source == "none":
        return PrefixView()
    if not isinstance(pool, BlockPool) or not pool.shares_prefixes:
        raise without_prefixes(config)
    if source == "memory":
        return SentPrefixes.of(router)
    delay_s = config.events_ms * 1e-3 if source == "events" else 0.0
    seed += replica.index
    return HeldPrefixes(follow(pool), pool.block_size, delay_s=delay_s, lost=config.events_lost, seed=seed)
