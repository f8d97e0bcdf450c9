"""The points that a search may try, and whether one fits: computed from a configuration, before anything runs."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import optuna

from kvlab.config import RunConfig
from kvlab.errors import CapacityError, ConfigError
from kvlab.kv.pools import POOLS
from kvlab.lab.capacity import CapacityPlan, plan_capacity
from kvlab.lab.run.plan import plan_run
from kvlab.lab.run.requests import requests_of
from kvlab.peers.engines import is_peer
from kvlab.planning.cache import planned_pool
from kvlab.planning.settings import resolve_device
from kvlab.workloads.prompts import grown_lengths

BATCH, BLOCKS = "scheduler.max_batch_size", "kv.num_blocks"
BLOCK, TOKENS = "kv.block_size", "scheduler.max_batched_tokens"
SEARCHED = (BATCH, BLOCKS, BLOCK, TOKENS)

_BLOCK_SIZES = (8, 16, 32, 64, 128)
_LEAST_TOKENS, _MOST_TOKENS, _MOST_BATCH = 32, 4096, 256
_CACHE_SHARE = 1.25  # of all tokens of the workload: more memory than that is never used


@dataclass(frozen=True, slots=True)
class Range:
    """Whole numbers from `low` to `high`, tried evenly on a logarithmic scale."""

    low: int
    high: int

    def clip(self, value: int) -> int:
        """The nearest number within."""
        return min(max(value, self.low), self.high)


@dataclass(frozen=True, slots=True)
class Space:
    """The settings that are searched, and where the search begins: at the configuration itself."""

    ranges: Mapping[str, Range]
    block_sizes: tuple[int, ...]  # empty where it is not searched
    start: Mapping[str, int]

    def ask(self, trial: optuna.Trial) -> dict[str, int]:
        """A value for each setting."""
        values = {key: trial.suggest_int(key, r.low, r.high, log=True) for key, r in self.ranges.items()}
        if self.block_sizes:
            values[BLOCK] = int(trial.suggest_categorical(BLOCK, self.block_sizes))
        return {key: values[key] for key in SEARCHED if key in values}


def build_space(config: RunConfig, memory: int, fixed: frozenset[str]) -> Space:
    """The space of a configuration in `memory` bytes; the keys in `fixed` stay as they are. Where its working
    memory does not fit, the search begins with fewer tokens to a step.

    Raises CapacityError where the weights leave no room for a block, ConfigError where nothing is left to search.
    """
    if is_peer(config.engine.kind):
        text = "batch and pool are searched for kvlab's own engine; find=rate searches a rate for any"
        raise ConfigError("engine", config.engine.kind, text)
    config, plan = _first_that_fits(config, memory, fixed)
    sizes = () if BLOCK in fixed else _block_sizes(config)
    ranges = {key: bounds for key, bounds in _ranges(config, plan, sizes).items() if key not in fixed}
    if not ranges and not sizes:
        raise ConfigError("overrides", " ".join(sorted(fixed)), "fix all that is searched; leave one of them free")
    pool = planned_pool(config, plan.spec)
    first = {
        BATCH: config.scheduler.max_batch_size,
        BLOCKS: min(pool.whole_tokens, plan.paged.whole_tokens) // config.kv.block_size,
        TOKENS: config.scheduler.max_batched_tokens,
    }
    start = {key: bounds.clip(first[key]) for key, bounds in ranges.items()}
    if sizes:
        start[BLOCK] = config.kv.block_size
    return Space(ranges, sizes, start)


def _block_sizes(config: RunConfig) -> tuple[int, ...]:
    """The sizes that are tried, the configuration's own among them; none where the pool is not paged."""
    if not POOLS.get(config.kv.backend).is_paged():
        return ()
    sizes = (size for size in _BLOCK_SIZES if size <= config.model.max_seq_len)
    return tuple(sorted({*sizes, config.kv.block_size}))


def _ranges(config: RunConfig, plan: CapacityPlan, sizes: tuple[int, ...]) -> dict[str, Range]:
    """The numbers that make a difference: to what the workload can use, and the memory can hold."""
    requests = requests_of(config)
    lengths = grown_lengths(requests)
    sequences = sum(request.sampling.n for request in requests)
    prompts = sum(len(request.prompt_token_ids) for request in requests)
    longest, tokens = config.model.max_seq_len, plan.paged.whole_tokens
    if POOLS.get(config.kv.backend).is_paged():
        stored = sum(lengths[request.request_id] * request.sampling.n for request in requests)
        longest, tokens = max(lengths.values()), min(tokens, round(stored * _CACHE_SHARE))
    sizes = sizes or (config.kv.block_size,)
    # A server on a large device has more than that: what it has today is within, and where the search begins.
    most_batch = max(_MOST_BATCH, config.scheduler.max_batch_size)
    most_tokens = max(_MOST_TOKENS, config.scheduler.max_batched_tokens)
    return {
        BATCH: Range(1, max(2, min(sequences, most_batch))),
        BLOCKS: Range(max(1, longest // max(sizes)), max(2, tokens // min(sizes))),
        TOKENS: Range(_LEAST_TOKENS, min(max(prompts, 2 * _LEAST_TOKENS), most_tokens)),
    }


def _first_that_fits(config: RunConfig, memory: int, fixed: frozenset[str]) -> tuple[RunConfig, CapacityPlan]:
    """The configuration and its plan, the token budget halved until it fits. Raises CapacityError if none does."""
    device = resolve_device(config.executor.device)
    while True:
        try:
            return config, plan_capacity(config, device=device, memory=memory)
        except CapacityError:
            scheduler = config.scheduler
            least = max(
                _LEAST_TOKENS, scheduler.max_batch_size, config.kv.block_size, scheduler.long_prefill_threshold or 0
            )
            fewer = max(least, scheduler.max_batched_tokens // 2)
            if TOKENS in fixed or fewer >= scheduler.max_batched_tokens:
                raise
            config = replace(config, scheduler=replace(scheduler, max_batched_tokens=fewer))


def check_fits(config: RunConfig, memory: int) -> None:
    """Raise the KvlabError that says why a configuration cannot run, or not within `memory` bytes."""
    plan_capacity(config, device=resolve_device(config.executor.device), memory=memory)
    plan_run(config)
