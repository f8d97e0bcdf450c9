"""Runs the flat batch of a step."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np
import torch

from kvlab.core import Sequence, StepPlan
from kvlab.kv.view import CacheView
from kvlab.models.decoder import Decoder
from kvlab.models.ops.base import TopK


class Executor(Protocol):
    """Computes a step's tokens."""

    def execute(self, plan: StepPlan, view: CacheView) -> list[int]:
        """One new token for each scheduled sequence that samples, in the plan's order."""
        ...


class SamplerProtocol(Protocol):
    """Picks tokens."""

    def __call__(self, logits: torch.Tensor, sequences: list[Sequence]) -> list[int]:
        """One token id for each row of `logits` `[len(sequences), vocab]`."""
        ...


@runtime_checkable
class GreedySampler(SamplerProtocol, Protocol):
    """One that, where every token is that of the largest logit, needs to know no other."""

    def is_greedy(self, sequences: list[Sequence]) -> bool:
        """Whether the largest logit of each is all it takes."""
        ...

    def take(self, largest: TopK, sequences: list[Sequence]) -> list[int]:
        """The tokens of the largest logits, of as many rows as there are sequences."""
        ...


class TorchExecutor:
    """The real thing: the model's forward pass, then the sampler."""

    def __init__(self, model: Decoder, sampler: SamplerProtocol, device: torch.device | str = "cpu") -> None:
        self._model = model
        self._sampler = sampler
        self._greedy = sampler if isinstance(sampler, GreedySampler) else None
        self._device = torch.device(device)

    def execute(self, plan: StepPlan, view: CacheView) -> list[int]:
        """See Executor."""
        token_ids: list[int] = []
        rows: list[int] = []
        sampling = []
        for sequence, count in plan.scheduled:
            start = sequence.num_computed
            token_ids += sequence.token_ids[start : start + count]
            if start + count == len(sequence.token_ids):
                rows.append(len(token_ids) - 1)
                sampling.append(sequence)
        batch = self._tensor(token_ids), view, self._tensor(rows)
        if self._greedy is not None and self._greedy.is_greedy(sampling):
            return self._greedy.take(self._model.forward_top1(*batch), sampling)
        return self._sampler(self._model.forward(*batch), sampling)

    def _tensor(self, values: list[int]) -> torch.Tensor:
        return torch.from_numpy(np.asarray(values, dtype=np.int64)).to(self._device)
