"""From a configuration to an engine: first what can be checked for nothing, then what takes memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvlab.attention.base import AttentionBackend, AttentionSpec
from kvlab.attention.registry import default_registry
from kvlab.config import RunConfig, format_bytes
from kvlab.core import Request
from kvlab.engine.clock import WallClock
from kvlab.engine.engine import Engine
from kvlab.engine.executor import TorchExecutor
from kvlab.engine.sampler import Sampler
from kvlab.engine.scheduler import build_scheduler
from kvlab.errors import CapacityError, WorkloadError
from kvlab.kv.contiguous import SlottedKVCachePool
from kvlab.kv.eviction import POLICIES as EVICTION
from kvlab.kv.paged import PagedKVCachePool
from kvlab.kv.sizing import PoolSize, check_longest_sequence, size_pool
from kvlab.kv.storage import KVStorage
from kvlab.lab.machine import available_memory, resolve_device
from kvlab.models.config import DecoderConfig
from kvlab.models.decoder import Decoder, attention_specs
from kvlab.models.families import decoder_config
from kvlab.models.ops import select_ops
from kvlab.models.weights import open_weights
from kvlab.workloads import build_requests
from kvlab.workloads.prompts import grown_lengths

_WORKING_MEMORY = 512 * 2**20  # activations, logits, gather buffers, the weights' random tile


@dataclass(frozen=True, slots=True)
class RunPlan:
    """A checked run: everything that is known before a byte of it is allocated."""

    config: RunConfig
    device: str
    model: DecoderConfig
    weight_bytes: int
    requests: list[Request]
    pool: PoolSize
    attention: AttentionBackend
    specs: tuple[AttentionSpec, ...]  # of each layer


def plan_run(config: RunConfig) -> RunPlan:
    """Check a configuration as a whole.

    Raises a KvlabError for what cannot work: CapacityError for what does not fit in the pool or the machine,
    WorkloadError for a request that is too long, ConfigError, BackendError, DeviceError.
    """
    device = resolve_device(config.executor.device)
    model = decoder_config(config.model)
    requests = build_requests(config.workload, vocab_size=model.vocab_size, seed=config.seed)
    longest = _check_lengths(requests, config)
    pool = size_pool(
        config.kv,
        model.kv_spec(config.executor.dtype),
        max_batch_size=config.scheduler.max_batch_size,
        max_seq_len=config.model.max_seq_len,
    )
    check_longest_sequence(pool, longest)
    specs = attention_specs(model, config.executor.dtype, device)
    attention = default_registry().select(specs, config.attention.backend)
    weight_bytes = model.weight_bytes(config.executor.dtype)
    _check_memory(config, weight_bytes, pool, device)
    return RunPlan(config, device, model, weight_bytes, requests, pool, attention, specs)


def build_engine(plan: RunPlan) -> Engine:
    """Load the weights, reserve the pool, put the engine together. Raises WeightsError or CapacityError."""
    config = plan.config
    if config.executor.threads is not None:
        torch.set_num_threads(config.executor.threads)
    dtype: torch.dtype = getattr(torch, config.executor.dtype)
    weights = open_weights(
        config.model.weights or "dummy",
        dtype,
        plan.device,
        seed=config.seed,
        norm_weight=plan.model.initial_norm_weight,
    )
    ops = select_ops(dtype, plan.device, kernels=config.executor.kernels)
    model = Decoder(plan.model, weights, plan.attention, plan.specs, config.model.max_seq_len, ops)
    storage = KVStorage(
        plan.model.kv_spec(config.executor.dtype), plan.pool.num_blocks, plan.pool.block_size, plan.device
    )
    max_seq_len = config.model.max_seq_len
    pool: SlottedKVCachePool | PagedKVCachePool
    if config.kv.backend == "paged":
        pool = PagedKVCachePool(
            plan.pool.num_blocks,
            plan.pool.block_size,
            max_seq_len,
            storage,
            prefix_sharing=config.kv.prefix_sharing,
            eviction=EVICTION[config.kv.eviction](),
        )
    else:
        pool = SlottedKVCachePool(plan.pool.num_blocks, max_seq_len, storage)
    return Engine(
        pool,
        build_scheduler(config.scheduler),
        TorchExecutor(model, Sampler(), plan.device),
        WallClock(),
        eos_token_ids=plan.model.eos_token_ids,
        vocab_size=plan.model.vocab_size,
    )


def _check_lengths(requests: list[Request], config: RunConfig) -> int:
    """The longest sequence the requests can make. Raises WorkloadError if it is longer than is served."""
    limit = config.model.max_seq_len
    lengths = grown_lengths(requests)
    longest = max(requests, key=lambda request: lengths[request.request_id])
    length = lengths[longest.request_id]
    if length > limit:
        earlier = length - longest.max_total_tokens
        behind = f"behind {earlier} tokens of earlier turns " if earlier else ""
        raise WorkloadError(
            f"workload.name={config.workload.name}: request {longest.request_id} {behind}has a prompt of "
            f"{len(longest.prompt_token_ids)} tokens and up to {longest.sampling.max_tokens} output tokens, "
            f"more than model.max_seq_len={limit}; model.max_seq_len={length} would take it"
        )
    return length


def _check_memory(config: RunConfig, weight_bytes: int, pool: PoolSize, device: str) -> None:
    available, needed = available_memory(device), weight_bytes + pool.num_bytes + _WORKING_MEMORY
    if needed <= available:
        return
    left = available - weight_bytes - _WORKING_MEMORY
    if left < pool.block_size * pool.bytes_per_token:
        advice = "no KV cache fits beside these weights: take a smaller model"
        if config.executor.dtype == "float32":
            advice += " or executor.dtype=bfloat16"
    else:
        advice = f"kv.memory={left // 2**20}MiB would fit"
    raise CapacityError(
        f"the run needs {format_bytes(needed)} ({config.model.name} weights "
        f"{format_bytes(weight_bytes)}, KV cache {format_bytes(pool.num_bytes)}, working memory "
        f"{format_bytes(_WORKING_MEMORY)}) and {device} has {format_bytes(available)} available; {advice}"
    )
