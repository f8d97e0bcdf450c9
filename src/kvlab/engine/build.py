"""From settings to an engine: first what can be checked at no cost, then what takes memory."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kvlab.config import EngineConfig
from kvlab.engine.clock import Clock
from kvlab.engine.core import EngineCore
from kvlab.engine.executors import EXECUTORS
from kvlab.engine.per_sequence import PerSequenceExecutor
from kvlab.engine.plan import EnginePlan
from kvlab.engine.scheduler import StateKeeping, build_scheduler
from kvlab.engine.step import Executor
from kvlab.engine.text import Detokenizer
from kvlab.errors import CapacityError
from kvlab.kv.journal import BlockJournal
from kvlab.kv.pools import POOLS
from kvlab.kv.sizing import PoolSize
from kvlab.kv.tiers.offload import Offload
from kvlab.kv.tiers.settings import build_offload
from kvlab.kv.tiers.tier import Tier
from kvlab.planning.cache import kv_spec

if TYPE_CHECKING:
    from kvlab.engine.sampler import Sampler


def plan_engine(config: EngineConfig, *, random_sampling: bool = True) -> EnginePlan:
    """Check an engine's configuration, and compute what memory it needs. `random_sampling`: whether any request is
    not greedy, which needs more working memory.

    Raises CapacityError, ConfigError, BackendError or DeviceError for what cannot work.
    """
    return EXECUTORS.get(config.executor.kind).plan(config, random_sampling=random_sampling)


def build_engine(
    plan: EnginePlan,
    *,
    detokenize: Detokenizer | None = None,
    detokenize_all: Detokenizer | None = None,
    journal: BlockJournal | None = None,
    sampler: Sampler | None = None,
    wrap: Callable[[Executor], Executor] | None = None,
    clock: Clock | None = None,
    remote: Sequence[Tier] = (),
) -> EngineCore:
    """Load the weights, allocate the pool, put the engine together. Raises WeightsError or CapacityError.

    Block events go to the `journal`. `sampler` replaces the executor's own; `wrap` puts another executor around it,
    as one that injects faults; `clock` replaces the executor's. Content of other pools comes from the
    tiers `remote`, which are asked last.
    """
    config = plan.config
    execution = EXECUTORS.get(config.executor.kind).build(plan, sampler=sampler)
    size, identity = plan.pool, block_identity(plan, execution.weights)
    offload = build_offload(config.kv, size, execution.storage, links=execution.links, identity=identity)
    if remote:
        offload = Offload([*(offload.tiers if offload is not None else ()), *remote])
    options: dict[str, Any] = {} if offload is None else {"offload": offload}  # a plugin's pool need not know them
    if size.groups:
        options |= {"groups": size.groups, "step_tokens": size.step_tokens, "ahead": size.ahead}
    try:
        pool = POOLS.get(config.kv.backend).from_config(
            config.kv, size.num_blocks, config.model.max_seq_len, execution.storage, journal=journal, **options
        )
    except MemoryError as error:  # of a simulated device, whose memory may be any
        raise CapacityError(
            f"the ledger of {size.num_blocks:,} blocks takes more memory than this machine has; give the pool less "
            "with kv.num_blocks or kv.memory, or larger blocks (kv.block_size)"
        ) from error
    executor = execution.executor
    if config.executor.batching == "per_sequence":
        executor = PerSequenceExecutor(executor)
    return EngineCore(
        pool,
        build_scheduler(config.scheduler, shares_prefixes=config.kv.prefix_sharing, keeping=_keeping(size)),
        wrap(executor) if wrap is not None else executor,
        clock or execution.clock,
        eos_token_ids=plan.model.eos_token_ids,
        vocab_size=plan.model.vocab_size,
        detokenize=detokenize,
        detokenize_all=detokenize_all,
        journal=journal,
        on_close=execution.close,
    )


def _keeping(size: PoolSize) -> StateKeeping | None:
    """Where states are kept; None: no layer has any."""
    states = max((group.states for group in size.groups), default=0)
    return StateKeeping(size.block_size, within_steps=states > 2) if states else None


def block_identity(plan: EnginePlan, weights: str) -> dict[str, str]:
    """What decides the numbers and the layout of a block of given tokens, by names that users know. `weights`: a
    digest of the model's.
    """
    config, kernels = plan.config, plan.kernels
    layout = "" if kernels is None else kernels.attention.layout
    shapes = f"{plan.model} {kv_spec(config, plan.model)} {layout}"
    return {
        "model": config.model.name,
        "executor.dtype": config.executor.dtype,
        "executor.weights": config.executor.weights,
        "kv.dtype": config.kv_dtype,
        "kv.block_size": str(plan.pool.block_size),
        "weights": weights,
        "shapes": hashlib.sha256(shapes.encode()).hexdigest()[:16],
    }
