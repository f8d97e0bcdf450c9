"""How many sequences fit: computed from a configuration, with nothing built and nothing allocated.

    bytes per token = 2 (K and V) x layers x KV heads x (head_dim x bytes of a number, + scales)
    cache           = memory - weights - rotary tables - working memory of the largest step
    contiguous      = whole slots of max_seq_len tokens in the cache, whatever a sequence's length
    paged           = whole blocks in the cache // ceil(length / block_size); of groups of layers with a sliding
                      window, those that hold its last tokens

The figures are those of the run that the configuration describes, from the functions that size it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import count, takewhile
from typing import Any, NamedTuple, cast

from kvlab.config import EngineConfig, HardwareConfig, KVConfig, RunConfig, format_bytes
from kvlab.errors import CapacityError, ConfigError
from kvlab.kv.groups import LayerGroup
from kvlab.kv.pools import POOLS
from kvlab.kv.sizing import PoolSize
from kvlab.models.families import decoder_config
from kvlab.planning.cache import kv_spec, planned_pool
from kvlab.planning.devices import (
    check_devices,
    lacking_for_longest,
    lacking_for_steps,
    name_of_devices,
    plan_on_devices,
    share_in_words,
)
from kvlab.planning.plan import MemoryPlan, plan_memory
from kvlab.planning.settings import settings_elsewhere
from kvlab.simulation.accuracy import planned_pools
from kvlab.workloads import may_sample

FIRST_LENGTH = 256


class CapacityCurve(NamedTuple):
    """Sequences of a backend that fit at once, at each mean length in tokens."""

    backend: str
    lengths: tuple[int, ...]
    sequences: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AtLength:
    """How many sequences of a mean length fit in the same bytes, by backend."""

    length: int
    sequences: Mapping[str, int]
    unused: Mapping[str, float]  # expected share of what sequences hold that has no token, 0 to 1

    @property
    def advantage(self) -> float | None:
        """How many times the sequences of whole slots a pool of small blocks holds; None where no slot fits, or
        slots have no room for a model's states.
        """
        small, whole = (self.sequences.get(backend, 0) for backend in compared_backends())
        return small / whole if whole else None

    def as_dict(self) -> dict[str, Any]:
        """Flat, fit for JSON."""
        unused = {f"{backend}_unused": share for backend, share in self.unused.items()}
        return {"length": self.length, **self.sequences, **unused, "advantage": self.advantage}


@dataclass(frozen=True, slots=True)
class CapacityPlan(MemoryPlan):
    """What there is, what takes it, and how many sequences that leaves room for."""

    name: str
    device: str  # in words
    pools: Mapping[str, PoolSize | None]  # by backend that the model can have; None: not one slot fits
    lengths: tuple[AtLength, ...]
    of_devices: str = ""  # how `memory` follows from that of simulated devices
    sure: str | None = None  # of a pool that is planned for hardware: how far such pools were off
    lacking: tuple[str, ...] = ()  # what a server would not start with, or run out of memory with
    max_batch_size: int = 0  # sequences of a step, of all groups of devices together

    @property
    def paged(self) -> PoolSize:
        """The pool of small blocks, which is never empty."""
        return cast(PoolSize, self.pools[compared_backends()[0]])

    def as_dict(self) -> dict[str, Any]:
        """Every figure and what it was computed from, fit for JSON."""
        model, spec = self.model, self.spec
        return {
            "model": self.name,
            "device": self.device,
            "memory_bytes": self.memory,
            "memory_of_devices": self.of_devices or None,
            "sure": self.sure,
            "lacking": list(self.lacking),
            "inputs": {
                "layers": model.num_layers,
                "state_layers": sum(layer.has_state for layer in model.layers),
                "sliding_layers": sum(layer.sliding_window is not None for layer in model.layers),
                "query_heads": model.num_heads,
                "kv_heads": spec.num_kv_heads,
                "head_dim": spec.head_dim,
                "kv_dtype": spec.dtype,
                "value_dtype": spec.dtypes[1],
                "parameters": model.num_parameters,
                "max_position_embeddings": model.max_position_embeddings,
                **asdict(self.settings),
                "int8_weights": self.settings.matrix_dtype == "int8",
            },
            "bytes_per_token": spec.bytes_per_token,
            "bytes_per_block": self.paged.block_size * self.paged.bytes_per_slot,
            "weights": {**asdict(self.weights), "total": self.weights.total},
            "working": {**asdict(self.working), "peak": self.working.peak},
            "pools": {backend: pool and _pool_figures(pool) for backend, pool in self.pools.items()},
            "sequences": [row.as_dict() for row in self.lengths],
        }


def compared_backends() -> tuple[str, str]:
    """The first backend whose sequences span several blocks, and the first whose sequences have one block each."""
    paged = {name: POOLS.get(name).is_paged() for name in POOLS.names()}
    return next(name for name in paged if paged[name]), next(name for name in paged if not paged[name])


def _backends(*, has_states: bool) -> list[str]:
    """Those that a model can have."""
    return [name for name in POOLS.names() if POOLS.get(name).frees_windows or not has_states]


def plan_capacity(
    config: RunConfig, *, device: str, memory: int | None = None, lengths: Sequence[int] | None = None
) -> CapacityPlan:
    """How many sequences a configuration holds, in `memory` bytes of a "cpu" or "cuda" device, with any backend; or
    on the hardware that it simulates, which is a "cuda" device with memory of its own.

    A cache whose size the configuration gives is taken as it is. Raises CapacityError where the weights do not fit,
    or no block beside them; ConfigError for a length that is not served, and where a run would.
    """
    # With whole slots as blocks PyTorch's attention needs more working memory. What small blocks need is shown.
    backend, _ = compared_backends()
    asked, config = config, replace(config, kv=replace(config.kv, backend=backend))
    hardware, kv = config.hardware, config.kv
    if hardware is not None:
        planned, device = plan_on_devices(config, hardware), name_of_devices(hardware, config.executor.devices)
    else:
        model, sampled = decoder_config(config.model), may_sample(config.workload)
        spec = kv_spec(config, model)
        planned = plan_memory(
            model, spec, settings_elsewhere(config, model, device, random_sampling=sampled), memory
        )
    has_states = planned.model.has_states
    if has_states:
        kv_spec(asked, planned.model)  # which refuses what has no room for them
    parts = {field.name: getattr(planned, field.name) for field in fields(planned)}
    plan = CapacityPlan(
        **parts,
        name=config.model.name,
        device=device,
        pools={},
        lengths=(),
        of_devices="" if hardware is None else _of_devices(config, hardware, planned),
        max_batch_size=config.scheduler.max_batch_size,
    )
    memory = plan.memory
    if memory is not None and kv.memory is None and kv.num_blocks is None:
        block = kv.block_size * plan.spec.bytes_per_token
        if hardware is not None:
            check_devices(config, hardware, plan)
            framework = config.framework
            sure = planned_pools(framework.tables, hardware.name, graphs=framework.cuda_graphs)
            plan = replace(plan, sure=sure)
        elif memory < plan.needed(block):
            raise _too_small(config, plan, memory, block)
        kv = replace(kv, memory=f"{plan.left(memory)}B")
    pools: dict[str, PoolSize | None] = dict.fromkeys(_backends(has_states=has_states))
    for name in pools:
        try:
            pools[name] = planned_pool(replace(config, kv=replace(kv, backend=name)), plan.spec)
        except CapacityError:
            if name == backend:
                raise
    plan = replace(plan, pools=pools)
    if hardware is not None:
        lacking = lacking_for_steps(config, hardware, plan.working), lacking_for_longest(config, plan.paged)
        plan = replace(plan, lacking=tuple(filter(None, lacking)))
    needed = plan.weights.total + plan.taken + plan.paged.num_bytes
    if memory is not None and needed > memory:
        raise CapacityError(
            f"memory={format_bytes(memory)}: a KV cache of {format_bytes(plan.paged.num_bytes)} needs "
            f"{format_bytes(needed)} with {plan.name}'s weights and working memory, "
            f"{format_bytes(needed - memory)} more; leave kv.memory and kv.num_blocks out to be told what fits"
        )
    longest = plan.settings.max_seq_len
    for length in lengths or ():
        if not 1 <= length <= longest:
            raise ConfigError("lengths", length, f"a mean length is from 1 to model.max_seq_len={longest} tokens")
    return replace(plan, lengths=tuple(_at_length(plan, mean) for mean in lengths or default_lengths(longest)))


def _of_devices(config: RunConfig, hardware: HardwareConfig, plan: MemoryPlan) -> str:
    """How the memory of simulated devices was counted, in words."""
    devices, text = config.executor.devices, share_in_words(config, hardware)
    if devices > 1 and plan.taken:
        text += f", less the working memory of {devices - 1} others, {format_bytes(plan.taken)} each"
    return text


def default_lengths(max_seq_len: int) -> tuple[int, ...]:
    """256 tokens, doubled until `max_seq_len`; for short sequences, an eighth of it to begin with."""
    first = FIRST_LENGTH if max_seq_len > FIRST_LENGTH else max(1, max_seq_len // 8)
    doubled = takewhile(lambda length: length < max_seq_len, (first << times for times in count()))
    return (*doubled, max_seq_len)


def sequences_that_fit(pool: PoolSize, lengths: Sequence[int]) -> int:
    """Sequences that a pool holds at once, where each is as long as one of `lengths` drawn at random: blocks / mean
    of the blocks that each holds, rounded down; of several parts in each.
    """
    blocks = [pool.blocks_of(length) for length in lengths]
    return pool.parts * (pool.blocks_of_a_part * len(blocks) // sum(blocks))


def capacity_curve(
    kv_bytes: int,
    bytes_per_token: int,
    *,
    max_seq_len: int,
    block_size: int = 16,
    lengths: Sequence[int] = (),
    groups: tuple[LayerGroup, ...] = (),
) -> list[CapacityCurve]:
    """The planner's curve of every backend for a cache of `kv_bytes`, over mean lengths (those of `default_lengths`
    unless given); of layers with states, of those that hold these. `groups` of layers are those of pools that
    give back what leaves a window.
    """
    at = tuple(lengths or default_lengths(max_seq_len))
    curves = []
    for backend in _backends(has_states=any(group.has_state for group in groups)):
        size = POOLS.get(backend).block_size_for(KVConfig(block_size=block_size), max_seq_len)
        pool = PoolSize(0, size, bytes_per_token, groups if POOLS.get(backend).frees_windows else ())
        pool = replace(pool, num_blocks=kv_bytes // (size * pool.bytes_per_slot))
        curves.append(CapacityCurve(backend, at, tuple(sequences_that_fit(pool, [length]) for length in at)))
    return curves


def _at_length(plan: CapacityPlan, length: int) -> AtLength:
    # Lengths that vary end anywhere in a small block: on average half of it, less half a token, is not used. A
    # window begins anywhere in one, too, and the last group of a kind may have fewer layers than a block has.
    pool, half = plan.paged, (plan.paged.block_size - 1) / 2
    used = held = 0.0
    for group in pool.groups or (LayerGroup(tuple(range(plan.spec.num_layers))),):
        if group.has_state:  # which fills its block, however long the sequence is
            used += plan.paged.block_size * len(group.layers)
            held += plan.paged.block_size * plan.spec.layers_per_block
            continue
        behind = group.window is not None and length > group.window
        tokens = group.window if group.window is not None and behind else length
        used += tokens * len(group.layers)
        held += (tokens + half + half * behind) * plan.spec.layers_per_block
    unused = {True: (held - used) / held, False: 1 - length / plan.settings.max_seq_len}
    return AtLength(
        length,
        {backend: sequences_that_fit(pool, [length]) if pool else 0 for backend, pool in plan.pools.items()},
        {backend: unused[POOLS.get(backend).is_paged()] for backend in plan.pools},
    )


def _pool_figures(pool: PoolSize) -> dict[str, Any]:
    figures = {"num_blocks": pool.num_blocks, "block_size": pool.block_size}
    figures |= {"token_slots": pool.token_slots, "bytes": pool.num_bytes}
    if not pool.groups:
        return figures
    return figures | {"groups": [{"layers": len(group.layers), "window": group.window} for group in pool.groups]}


def _too_small(config: EngineConfig, plan: CapacityPlan, memory: int, block: int) -> CapacityError:
    """What is missing, and what would do."""
    model, settings, weights, working = plan.model, plan.settings, plan.weights, plan.working
    needed = plan.needed(block)
    advice = [f"memory={-(-needed // 2**20)}MiB would do"]
    override, narrower = "", settings
    if settings.dtype == "float32":
        override, narrower = "executor.dtype=bfloat16", replace(settings, dtype="bfloat16")
    elif settings.native and settings.matrix_dtype != "int8":
        override, narrower = "executor.weights=int8", replace(settings, weights="int8")
    spec = kv_spec(replace(config, executor=replace(config.executor, dtype=narrower.dtype)), model)
    less = plan_memory(model, spec, narrower)
    if override and less.needed(block) <= memory:
        advice.append(f"{override} takes {format_bytes(less.weights.total)} and would fit")
    if weights.total + working.loading < memory:
        advice.append("fewer scheduler.max_batched_tokens or scheduler.max_batch_size need less working memory")
    beside = f"{format_bytes(working.peak)} of working memory and {format_bytes(block)} for one block"
    if working.loading > working.peak + block:
        beside = f"{format_bytes(working.loading)} for a moment to load them"
    return CapacityError(
        f"memory={format_bytes(memory)}: {plan.name} needs {format_bytes(weights.total)} for weights in "
        f"{settings.matrix_dtype}, and {beside}: {format_bytes(needed - memory)} more than that; "
        f"{'; '.join(advice)}; or take a smaller model"
    )
