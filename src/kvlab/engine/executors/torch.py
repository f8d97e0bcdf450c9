"""The model itself, computed by PyTorch and kvlab's kernels on this machine."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from kvlab.attention.registry import attention_backends, select_backend
from kvlab.config import EngineConfig
from kvlab.core import TokenLogprobs
from kvlab.engine.clock import WallClock
from kvlab.engine.executors import EXECUTORS, Execution, ExecutorKind
from kvlab.engine.garbage import return_memory
from kvlab.engine.plan import EnginePlan, Kernels
from kvlab.engine.ranks import RankedModel, RankedStorage, RankProcesses
from kvlab.engine.sampler import Sampler
from kvlab.engine.step import Executor, ScoredTokens, StepInput, StepResult
from kvlab.engine.threads import resolve_threads
from kvlab.errors import ConfigError
from kvlab.kv.sizing import PoolSize
from kvlab.kv.storage import KVStorage
from kvlab.kv.view import CacheView
from kvlab.models.config import TransformersConfig, attention_specs
from kvlab.models.decoder import Decoder, Model
from kvlab.models.families import decoder_config
from kvlab.models.ops import select_ops
from kvlab.models.ops.cpu_ops import CpuOps
from kvlab.models.split import Ranks, SplitDecoder
from kvlab.models.weight_sources import open_weights
from kvlab.models.weights import DigestedWeights, WeightSource
from kvlab.planning.cache import kv_spec, planned_pool
from kvlab.planning.plan import plan_memory
from kvlab.planning.settings import (
    memory_settings,
    refuse_devices,
    refuse_packed,
    refuse_simulated,
    refuse_split,
    resolve_device,
)

_SCORED_AT_ONCE = 16  # rows of logits, which are as wide as the vocabulary


class TorchExecutor(Executor):
    """The model's forward pass, then the sampler."""

    def __init__(self, model: Model, sampler: Sampler, device: torch.device | str = "cpu") -> None:
        self._model = model
        self._sampler = sampler
        self._device = torch.device(device)

    def execute(self, step: StepInput, view: CacheView) -> StepResult:
        sampling = step.sampling()
        if step.scored is not None:
            return self._scored(step, step.scored, view)
        batch = self._tensor(step.token_ids), view, self._tensor(step.logits_rows())
        if self._sampler.is_greedy(sampling):
            return self._sampler.take_top1(self._model.forward_top1(*batch), sampling)
        return self._sampler(self._model.forward(*batch), sampling)

    def _scored(self, step: StepInput, scored: ScoredTokens, view: CacheView) -> StepResult:
        """The same for a step that also has log-probabilities of prompts to give, few of them at a time."""
        sampled = step.logits_rows()
        rows = np.union1d(sampled, scored.rows)
        hidden = self._model.hidden(self._tensor(step.token_ids), view, self._tensor(rows))
        places = np.searchsorted(rows, sampled), np.searchsorted(rows, scored.rows)
        own, others = (hidden[self._tensor(place)] for place in places)
        result = self._sampler(self._model.logits(own), step.sampling())
        logprobs: list[TokenLogprobs] = []
        for start in range(0, len(others), _SCORED_AT_ONCE):
            part = slice(start, start + _SCORED_AT_ONCE)
            logits = self._model.logits(others[part])
            logprobs += self._sampler.logprobs(logits, scored.tokens[part].tolist(), scored.counts[part])
        return replace(result, prompt_logprobs=logprobs)

    def _tensor(self, values: NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)


@EXECUTORS.register("torch")
class TorchExecution(ExecutorKind):
    """On this machine, at its own pace."""

    @staticmethod
    def plan(config: EngineConfig, *, random_sampling: bool = True) -> EnginePlan:
        if config.hardware is not None:
            raise ConfigError("hardware", config.hardware.name, "can only be simulated; use executor=simulated")
        executor = config.executor
        refuse_devices(executor, "devices can only be simulated; use executor=simulated")
        refuse_simulated(executor.weights)
        device, ranks = resolve_device(config.executor.device), config.executor.tensor_parallel
        _check_devices(device, ranks)
        threads = resolve_threads(config.executor.threads, ranks if device == "cpu" else 1)
        model = decoder_config(config.model)
        refuse_packed(executor.weights, model)
        refuse_split(ranks, config.kv, model)
        spec = kv_spec(config, model)
        pool = planned_pool(config, spec)
        kernels = config.executor.kernels
        specs = attention_specs(model, config.executor.dtype, device, config.kv_dtypes)
        among = attention_backends(kernels=kernels, prefer=config.attention.prefer)
        backend = config.attention.backend
        if backend in attention_backends().keys() - among.keys():
            raise ConfigError("attention.backend", backend, "is a kernel, and executor.kernels=false allows none")
        attention = select_backend(specs, backend, among)
        dtype = getattr(torch, config.executor.dtype)
        ops = select_ops(dtype, device, kernels=kernels, weights=config.executor.weights)
        native = isinstance(ops, CpuOps) and not isinstance(model, TransformersConfig)
        settings = memory_settings(config, device, attention.name, native=native, random_sampling=random_sampling)
        planned, computing = plan_memory(model, spec, settings), Kernels(attention, specs, ops, threads)
        return EnginePlan(
            config, device, model, planned.weights, planned.working, pool, computing, None, None, None
        )

    @staticmethod
    def build(plan: EnginePlan, *, sampler: Sampler | None = None) -> Execution:
        """Load the weights and allocate the cache. Raises WeightsError or CapacityError.

        The plan's `threads` are set for the whole process: PyTorch has one setting.
        """
        kernels = plan.computed_by
        torch.set_num_threads(kernels.threads)
        sampler = sampler or Sampler(kernels.ops)
        if plan.config.executor.tensor_parallel > 1:
            return _build_ranks(plan, sampler)
        weights = weight_source(plan)
        if plan.config.kv.offload_disk is not None:
            weights = DigestedWeights(weights)
        executor = TorchExecutor(build_decoder(plan, weights), sampler, plan.device)
        storage = build_storage(plan, plan.pool)
        digest = weights.digest if isinstance(weights, DigestedWeights) else ""
        return Execution(executor, WallClock(), storage, weights=digest)


def _build_ranks(plan: EnginePlan, sampler: Sampler) -> Execution:
    """This process as rank 0 of several; the others load beside it."""
    processes = RankProcesses(plan.config, plan.pool, plan.device)
    try:
        model = RankedModel(build_decoder(plan, ranks=processes.group), processes)
        storage = build_storage(plan, plan.pool, partial(RankedStorage, processes))
        processes.meet()
    except BaseException:
        processes.close()
        raise
    executor = TorchExecutor(model, sampler, plan.device)
    return Execution(executor, WallClock(), storage, close=processes.close)


def _check_devices(device: str, ranks: int) -> None:
    """Raise ConfigError where ranks on GPUs have not one each."""
    if device == "cuda" and ranks > (found := torch.cuda.device_count()):
        text = f"takes a GPU for each rank, and PyTorch finds {found}; executor.tensor_parallel={found} would do"
        raise ConfigError("executor.tensor_parallel", ranks, text)


def build_storage(plan: EnginePlan, pool: PoolSize, make: Callable[..., KVStorage] = KVStorage) -> KVStorage:
    """The tensors of a pool: with several ranks, of the heads of one. Raises CapacityError."""
    spec = kv_spec(plan.config, plan.model)
    heads = spec.num_kv_heads // plan.config.executor.tensor_parallel
    spec = replace(spec, groups=pool.groups, num_kv_heads=heads)
    return make(spec, pool.num_blocks, pool.block_size, plan.device, plan.computed_by.attention.layout)


def weight_source(plan: EnginePlan) -> WeightSource:
    """Where the model's weights are. Raises WeightsError."""
    config = plan.config
    return open_weights(
        config.model.weights or "dummy",
        getattr(torch, config.executor.dtype),
        plan.device,
        seed=config.seed,
        norm_weight=plan.model.initial_norm_weight,
    )


def build_decoder(plan: EnginePlan, weights: WeightSource | None = None, ranks: Ranks | None = None) -> Model:
    """The model with its weights, by default those of the plan; one rank's part of it. Raises WeightsError."""
    config, kernels, weights = plan.config, plan.computed_by, weights or weight_source(plan)
    if isinstance(plan.model, TransformersConfig):
        from kvlab.models.transformers_decoder import TransformersDecoder

        return TransformersDecoder(plan.model, weights, kernels.attention, kernels.specs, kernels.ops)
    parts = plan.model, weights, kernels.attention, kernels.specs, config.model.max_seq_len, kernels.ops
    model = Decoder(*parts) if ranks is None else SplitDecoder(*parts, ranks)
    return_memory()  # what was joined and packed, before a cache takes its place
    return model
