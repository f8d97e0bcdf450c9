"""From settings to an engine: first what can be checked for nothing, then what takes memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvlab.attention.base import AttentionBackend, AttentionSpec
from kvlab.attention.registry import default_registry
from kvlab.config import RunConfig
from kvlab.engine.clock import WallClock
from kvlab.engine.engine import Engine
from kvlab.engine.executor import SamplerProtocol, TorchExecutor
from kvlab.engine.faults import FaultyExecutor
from kvlab.engine.memory import EngineSettings, WeightBytes, WorkingMemory, weight_bytes, working_memory
from kvlab.engine.sampler import Sampler
from kvlab.engine.scheduler import build_scheduler
from kvlab.engine.step import Executor
from kvlab.engine.text import Detokenizer
from kvlab.engine.threads import resolve_threads
from kvlab.errors import ConfigError, DeviceError
from kvlab.kv.eviction import EVICTION_POLICIES
from kvlab.kv.journal import BlockJournal
from kvlab.kv.pools.contiguous import ContiguousKVCachePool
from kvlab.kv.pools.paged import PagedKVCachePool
from kvlab.kv.sizing import PoolSize, size_pool
from kvlab.kv.spec import KVSpec
from kvlab.kv.storage import KVStorage
from kvlab.models.config import DecoderConfig
from kvlab.models.decoder import Decoder, attention_specs
from kvlab.models.families import decoder_config
from kvlab.models.ops import select_ops
from kvlab.models.ops.base import Ops
from kvlab.models.ops.cpu_ops import CpuOps
from kvlab.models.weights import open_weights


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """A checked engine: everything that is known before a byte of it is allocated."""

    config: RunConfig
    device: str
    model: DecoderConfig
    weights: WeightBytes
    working: WorkingMemory
    pool: PoolSize
    attention: AttentionBackend
    specs: tuple[AttentionSpec, ...]  # of each layer
    ops: Ops
    threads: int  # of the CPU

    @property
    def weight_bytes(self) -> int:
        """Bytes of the model's weights as they are loaded."""
        return self.weights.parameters


def plan_engine(config: RunConfig) -> EnginePlan:
    """Check the parts of a configuration that make an engine; its workload and tracking are not looked at.

    Raises CapacityError, ConfigError, BackendError or DeviceError for what cannot work.
    """
    device = resolve_device(config.executor.device)
    threads = resolve_threads(config.executor.threads)
    model = decoder_config(config.model)
    pool = size_pool(
        config.kv,
        kv_spec(config, model),
        max_batch_size=config.scheduler.max_batch_size,
        max_seq_len=config.model.max_seq_len,
    )
    kernels, int8 = config.executor.kernels, config.executor.weights == "int8"
    specs = attention_specs(model, config.executor.dtype, device, config.kv_dtype)
    registry, backend = default_registry(kernels=kernels), config.attention.backend
    if backend not in registry.names() and backend in default_registry().names():
        raise ConfigError("attention.backend", backend, "is a kernel, and executor.kernels=false allows none")
    attention = registry.select(specs, backend)
    ops = select_ops(getattr(torch, config.executor.dtype), device, kernels=kernels, int8_weights=int8)
    settings = memory_settings(config, device, attention.name, native=isinstance(ops, CpuOps))
    weights, working = weight_bytes(model, settings), working_memory(model, kv_spec(config, model), settings)
    return EnginePlan(config, device, model, weights, working, pool, attention, specs, ops, threads)


def memory_settings(config: RunConfig, device: str, attention: str, *, native: bool) -> EngineSettings:
    """What of a configuration decides the memory of an engine."""
    max_seq_len = config.model.max_seq_len
    return EngineSettings(
        dtype=config.executor.dtype,
        device=device,
        attention=attention,
        native=native,
        int8_weights=config.executor.weights == "int8",
        max_batched_tokens=config.scheduler.max_batched_tokens,
        max_batch_size=config.scheduler.max_batch_size,
        max_seq_len=max_seq_len,
        block_size=config.kv.block_size if config.kv.backend == "paged" else max_seq_len,
        by_chance=config.workload.temperature > 0 or config.workload.source == "jsonl",
    )


def build_engine(
    plan: EnginePlan,
    detokenize: Detokenizer | None = None,
    *,
    sampler: SamplerProtocol | None = None,
    journal: BlockJournal | None = None,
) -> Engine:
    """Load the weights, reserve the pool, put the engine together. Raises WeightsError or CapacityError.

    What happens to blocks is written in the `journal`, where one is given.
    The plan's `threads` are set for the whole process: PyTorch has one setting.
    """
    config = plan.config
    torch.set_num_threads(plan.threads)
    model = build_decoder(plan)
    storage = KVStorage(
        plan.model.kv_spec(config.kv_dtype), plan.pool.num_blocks, plan.pool.block_size, plan.device
    )
    max_seq_len = config.model.max_seq_len
    pool: ContiguousKVCachePool | PagedKVCachePool
    if config.kv.backend == "paged":
        pool = PagedKVCachePool(
            plan.pool.num_blocks,
            plan.pool.block_size,
            max_seq_len,
            storage,
            prefix_sharing=config.kv.prefix_sharing,
            eviction=EVICTION_POLICIES.get(config.kv.eviction)(),
            journal=journal,
        )
    else:
        pool = ContiguousKVCachePool(plan.pool.num_blocks, max_seq_len, storage, journal=journal)
    executor: Executor = TorchExecutor(model, sampler or Sampler(plan.ops), plan.device)
    if config.debug.faults.rate > 0:
        executor = FaultyExecutor(executor, config.debug.faults)
    return Engine(
        pool,
        build_scheduler(config.scheduler),
        executor,
        WallClock(),
        eos_token_ids=plan.model.eos_token_ids,
        vocab_size=plan.model.vocab_size,
        detokenize=detokenize,
        journal=journal,
    )


def build_decoder(plan: EnginePlan) -> Decoder:
    """The model with its weights. Raises WeightsError."""
    config = plan.config
    weights = open_weights(
        config.model.weights or "dummy",
        getattr(torch, config.executor.dtype),
        plan.device,
        seed=config.seed,
        norm_weight=plan.model.initial_norm_weight,
    )
    return Decoder(plan.model, weights, plan.attention, plan.specs, config.model.max_seq_len, plan.ops)


def kv_spec(config: RunConfig, model: DecoderConfig) -> KVSpec:
    """What a token stores. Raises ConfigError where int8 saves nothing."""
    spec, plain = model.kv_spec(config.kv_dtype), model.kv_spec(config.executor.dtype)
    if spec.is_scaled and spec.bytes_per_token >= plain.bytes_per_token:
        raise ConfigError(
            "kv.dtype",
            config.kv_dtype,
            f"with their scales, heads of {model.head_dim} numbers take {spec.bytes_per_token} bytes per token and "
            f"in {plain.dtype} {plain.bytes_per_token}; use kv.dtype=auto",
        )
    return spec


def resolve_device(setting: str) -> str:
    """`cpu` or `cuda` for `auto`, `cpu` or `cuda`. Raises DeviceError where CUDA is asked for and absent."""
    available = torch.cuda.is_available()
    if setting == "cuda" and not available:
        raise DeviceError("executor.device=cuda: PyTorch finds no CUDA device here; use executor.device=cpu")
    return "cuda" if setting != "cpu" and available else "cpu"
