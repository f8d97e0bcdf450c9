"""The fleet of a plan's replicas: which of them pull K and V from others, over which links, and its engines."""

from collections.abc import Callable, Sequence
from functools import partial

from kvlab.config import FleetConfig, RunConfig, parse_bytes
from kvlab.core import Request
from kvlab.engine.core import EngineCore
from kvlab.engine.executors.simulated import SimulatedExecutor
from kvlab.engine.front_end import FrontEnd
from kvlab.engine.plan import EnginePlan
from kvlab.errors import ConfigError
from kvlab.fleet.build import build_fleet, without_prefixes
from kvlab.fleet.fleet import Fleet
from kvlab.fleet.hot_prefixes import hot_prefixes
from kvlab.fleet.store import SharedStore
from kvlab.fleet.transfer import LinkRate, PrefillTime
from kvlab.kv.groups import LayerGroup, layers_per_block
from kvlab.kv.pools import POOLS
from kvlab.kv.tiers.tier import Tier
from kvlab.simulation.timings import StepTiming


def check_fleet(plan: EnginePlan, fleet: FleetConfig) -> None:
    """Raise ConfigError for replicas that cannot pull K and V from others, or have them in common, and for a router
    that sees prefixes where they keep none.
    """
    if fleet.replicas > 1 and fleet.fed_by("prefixes") != "none" and not _shares_prefixes(plan):
        raise without_prefixes(fleet)
    if not _pulling(fleet):
        return
    for is_wrong, text in (
        (plan.is_real, "K and V are not copied between replicas that compute here; use executor=simulated"),
        (not _shares_prefixes(plan), "needs a prefix cache; use kv=paged"),
        (fleet.store is not None and not _store_blocks(plan, fleet), "holds no block; give it more"),
    ):
        if is_wrong:
            raise ConfigError(*_pulling(fleet)[-1], text)


def check_blocks(replicas: Sequence[EnginePlan], fleet: FleetConfig) -> None:
    """Raise ConfigError for replicas that are to have blocks of another size than they have."""
    pulling = _pulling(fleet)
    sizes = {
        (replica.pool.block_size, replica.pool.bytes_per_slot): replica.config.kv_dtype for replica in replicas
    }
    if pulling and len({replica.pool.groups for replica in replicas}) > 1:
        text = "blocks are pulled as they are, and fleet.groups keep other windows; give all one model.max_seq_len"
        raise ConfigError(*pulling[0], f"{text}, kv.windows")
    if pulling and len(sizes) > 1:
        has = " and ".join(f"{size} tokens in {dtype}" for (size, _), dtype in sizes.items())
        text = f"blocks are pulled as they are, and fleet.groups have {has}; give all one kv.block_size, kv.dtype"
        if len(set(sizes.values())) == 1 < len({num_bytes for _, num_bytes in sizes}):
            heads = replicas[0].model.num_kv_heads
            text = f"blocks are pulled as they are, and devices beyond the model's {heads} KV heads hold copies of"
            text += f" them; give all groups one executor.tensor_parallel, or none above {heads}"
        raise ConfigError(*pulling[0], text)


def make_fleet(
    config: RunConfig,
    replicas: Sequence[EnginePlan],
    requests: Sequence[Request],
    makers: Sequence[Callable[[Sequence[Tier]], EngineCore | FrontEnd]],
) -> Fleet:
    """The fleet of these replicas, whose engines `makers` make, for these requests."""
    fleet, first = config.fleet, replicas[0]
    is_open = config.workload.concurrency is None and all(request.follows is None for request in requests)
    hot = hot_prefixes(requests, first.pool.block_size) if config.figures and _shares_prefixes(first) else None
    blocks = _store_blocks(first, fleet)
    store = SharedStore(blocks, first.pool.block_size * first.pool.bytes_per_slot) if blocks else None
    rates, times = _link_rates(replicas, fleet), _prefill_times(replicas)
    return build_fleet(fleet, makers, rates, store, prefill_s=times, hot=hot, seed=config.seed, is_open=is_open)


def _link_rates(replicas: Sequence[EnginePlan], fleet: FleetConfig) -> list[LinkRate]:
    """How long K and V take from one replica to another, for each that receives. Devices send side by side, as many
    as either end has.
    """
    link, first = fleet.link, replicas[0]
    groups = first.pool.groups or (LayerGroup(tuple(range(first.model.num_layers))),)
    pieces = 2 * layers_per_block(groups) if link.pieces == "layer" else 1
    senders = replicas if fleet.neighbours else replicas[: fleet.prefill]
    sending = [sender.config.executor.devices for sender in senders]
    rates = list[LinkRate]()
    for replica in replicas:
        devices, block = replica.config.executor.devices, replica.pool.block_size * replica.pool.bytes_per_slot
        rates.append(LinkRate(link, min([devices, *sending]), block, pieces, first.model.num_layers, groups))
    return rates


def _prefill_times(replicas: Sequence[EnginePlan]) -> list[PrefillTime]:
    """What each replica is predicted to take for tokens of a prompt: nothing known of recorded steps."""
    return [
        partial(
            SimulatedExecutor(replica.model, timing, replica.config.framework).prompt_s,
            most=replica.config.scheduler.prompt_tokens,
        )
        for replica in replicas
        if isinstance(timing := replica.timing, StepTiming)
    ]


def _pulling(fleet: FleetConfig) -> list[tuple[str, object]]:
    """The settings by which replicas pull K and V, and their values."""
    settings = {
        "prefill": fleet.prefill or None,
        "store": fleet.store,
        "neighbours": "true" if fleet.neighbours else None,
    }
    return [(f"fleet.{name}", value) for name, value in settings.items() if value is not None]


def _shares_prefixes(plan: EnginePlan) -> bool:
    """Whether its pool has a prefix cache."""
    return plan.config.kv.prefix_sharing and POOLS.get(plan.config.kv.backend).is_paged()


def _store_blocks(plan: EnginePlan, fleet: FleetConfig) -> int:
    """Blocks that `fleet.store` holds."""
    return parse_bytes(fleet.store or "0B", key="fleet.store") // (plan.pool.block_size * plan.pool.bytes_per_slot)
