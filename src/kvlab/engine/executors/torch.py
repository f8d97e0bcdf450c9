"""The model itself, computed by PyTorch and kvlab's kernels on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from kvlab.attention.base import layout_of
from kvlab.engine.clock import WallClock
from kvlab.engine.executors import EXECUTORS, Execution
from kvlab.engine.sampler import Sampler
from kvlab.engine.step import Executor, StepInput, StepResult
from kvlab.kv.storage import KVStorage
from kvlab.kv.view import CacheView
from kvlab.models.decoder import Decoder
from kvlab.models.weights import open_weights

if TYPE_CHECKING:
    from kvlab.engine.build import EnginePlan


class TorchExecutor(Executor):
    """The model's forward pass, then the sampler."""

    def __init__(self, model: Decoder, sampler: Sampler, device: torch.device | str = "cpu") -> None:
        self._model = model
        self._sampler = sampler
        self._device = torch.device(device)

    def execute(self, step: StepInput, view: CacheView) -> StepResult:
        sampling = step.sampling()
        batch = self._tensor(step.token_ids), view, self._tensor(step.logits_rows())
        if self._sampler.is_greedy(sampling):
            return self._sampler.take_top1(self._model.forward_top1(*batch), sampling)
        return self._sampler(self._model.forward(*batch), sampling)

    def _tensor(self, values: NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)


@EXECUTORS.register("torch")
def build(plan: EnginePlan, *, sampler: Sampler | None = None) -> Execution:
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
