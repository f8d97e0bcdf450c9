"""The model itself, computed by PyTorch and kvlab's kernels on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from kvlab.attention.base import layout_of
from kvlab.engine.clock import WallClock
from kvlab.engine.executors import EXECUTORS, Execution
from kvlab.engine.sampler import Sampler
from kvlab.engine.step import SamplingBatch, StepInput, StepResult
from kvlab.kv.storage import KVStorage
from kvlab.kv.view import CacheView
from kvlab.models.decoder import Decoder
from kvlab.models.ops.base import TopK
from kvlab.models.weights import open_weights

if TYPE_CHECKING:
    from kvlab.engine.build import EnginePlan


class SamplerProtocol(Protocol):
    """Picks tokens."""

    def __call__(self, logits: torch.Tensor, batch: SamplingBatch) -> StepResult:
        """A token, and log-probabilities where asked for, for each row of `logits` `[len(batch), vocab]`."""
        ...


@runtime_checkable
class GreedySampler(SamplerProtocol, Protocol):
    """A sampler that needs no other logits than the largest of each row where every sequence is greedy."""

    def is_greedy(self, batch: SamplingBatch) -> bool:
        """Whether the largest logit of each row is enough."""
        ...

    def take_top1(self, top1: TopK, batch: SamplingBatch) -> StepResult:
        """The tokens of the largest logits, `top1` `[len(batch), 1]`."""
        ...


class TorchExecutor:
    """The model's forward pass, then the sampler. See Executor."""

    def __init__(self, model: Decoder, sampler: SamplerProtocol, device: torch.device | str = "cpu") -> None:
        self._model = model
        self._sampler = sampler
        self._greedy = sampler if isinstance(sampler, GreedySampler) else None
        self._device = torch.device(device)

    def execute(self, step: StepInput, view: CacheView) -> StepResult:
        """See Executor."""
        sampling = step.sampling()
        batch = self._tensor(step.token_ids), view, self._tensor(step.logits_rows())
        if self._greedy is not None and self._greedy.is_greedy(sampling):
            return self._greedy.take_top1(self._model.forward_top1(*batch), sampling)
        return self._sampler(self._model.forward(*batch), sampling)

    def _tensor(self, values: NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)


@EXECUTORS.register("torch")
def build(plan: EnginePlan, *, sampler: SamplerProtocol | None = None) -> Execution:
    """Load the weights and allocate the cache. Raises WeightsError or CapacityError.

    The plan's `threads` are set for the whole process: PyTorch has one setting.
    """
    torch.set_num_threads(plan.threads)
    model = build_decoder(plan)
    spec = plan.model.kv_spec(plan.config.kv_dtype)
    storage = KVStorage(spec, plan.pool.num_blocks, plan.pool.block_size, plan.device, layout_of(plan.attention))
    executor = TorchExecutor(model, sampler or Sampler(plan.ops), plan.device)
    return Execution(executor, WallClock(), storage)


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
