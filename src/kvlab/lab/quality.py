"""What int8 costs in quality: logits of the run's model beside those of the same model without int8."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from kvlab.attention.base import layout_of
from kvlab.config import format_bytes
from kvlab.core import Request
from kvlab.engine.build import EnginePlan, plan_engine
from kvlab.engine.executors.torch import build_decoder
from kvlab.kv.pools.contiguous import ContiguousKVCachePool
from kvlab.kv.storage import KVStorage
from kvlab.lab.machine import available_memory

_PROMPTS = 4
_POSITIONS = 16  # the last of each prompt
_LONGEST = 512  # tokens of a prompt that are run
_WORKING_MEMORY = 2**29


def quality_metrics(plan: EnginePlan, requests: Sequence[Request]) -> tuple[dict[str, float], str]:
    """Mean and largest error of a logit, and the share of positions whose most likely token is the same, against
    the run's own dtype: at the last 16 positions of the first 4 prompts. Nothing without int8, and nothing but the
    reason where memory is short. Builds either model in turn, so the run's engine must be closed.
    """
    config = plan.config
    if plan.kernels is None or "int8" not in (config.kv.dtype, config.executor.weights):
        return {}, ""
    reference = plan_engine(
        replace(config, kv=replace(config.kv, dtype="auto"), executor=replace(config.executor, weights="auto"))
    )
    needed, available = reference.weights.parameters + _WORKING_MEMORY, available_memory(plan.device)
    if needed > available:
        return {}, (
            f"quality/*: not measured, as the model without int8 needs {format_bytes(needed)} and "
            f"{plan.device} has {format_bytes(available)} available"
        )
    prompts = [list(request.prompt_token_ids[:_LONGEST]) for request in requests[:_PROMPTS]]
    return compare(_logits(plan, prompts), _logits(reference, prompts)), ""


def compare(found: torch.Tensor, expected: torch.Tensor) -> dict[str, float]:
    """The metrics for logits `[positions, vocab]`."""
    error = (found - expected).abs()
    return {
        "quality/logit_error_mean": float(error.mean()),
        "quality/logit_error_max": float(error.max()),
        "quality/top1_agreement": float((found.argmax(-1) == expected.argmax(-1)).float().mean()),
    }


def _logits(plan: EnginePlan, prompts: list[list[int]]) -> torch.Tensor:
    """`[positions, vocab]` float32 of the last positions of each prompt."""
    model, spec = build_decoder(plan), plan.model.kv_spec(plan.config.kv_dtype)
    found = []
    for prompt in prompts:
        storage = KVStorage(spec, 1, len(prompt), plan.device, layout_of(plan.computed_by.attention))
        pool = ContiguousKVCachePool(1, len(prompt), storage)
        view = pool.view([pool.allocate_slot(len(prompt))], [len(prompt)])
        rows = torch.arange(max(0, len(prompt) - _POSITIONS), len(prompt), device=plan.device)
        found.append(model.forward(torch.tensor(prompt, device=plan.device), view, rows).float())
        view.advance()
    return torch.cat(found)
