"""The model itself, computed by PyTorch and kvlab's kernels on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvlab.attention.base import layout_of
from kvlab.engine.clock import WallClock
from kvlab.engine.executor import SamplerProtocol, TorchExecutor
from kvlab.engine.executors import EXECUTORS, Execution
from kvlab.engine.sampler import Sampler
from kvlab.kv.storage import KVStorage
from kvlab.models.decoder import Decoder
from kvlab.models.weights import open_weights

if TYPE_CHECKING:
    from kvlab.engine.build import EnginePlan


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
