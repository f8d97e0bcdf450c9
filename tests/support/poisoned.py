"""Engines that overwrite what nobody holds: who reads a block that was given back reads no number at all."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvlab.config import KVConfig
from kvlab.core import Request, SamplingParams
from kvlab.engine.build import build_engine, plan_engine
from kvlab.engine.core import EngineCore
from kvlab.engine.step import Executor, StepInput, StepResult
from kvlab.errors import BackendError
from kvlab.kv.pool import BlockPool
from kvlab.kv.view import CacheView
from kvlab.lab.run.drive import drive
from tests.support.transformers_models import PROMPTS, Written, engine_config

OUTPUT = 24  # tokens of an answer, so that even the shortest prompt's leaves the windows


class Poison(Executor):
    """Overwrites every block that nobody holds and that holds nothing to share, before each pass."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.pool: BlockPool | None = None

    def execute(self, step: StepInput, view: CacheView) -> StepResult:
        assert self.pool is not None
        allocator, storage = self.pool.allocator, self.pool.storage
        assert storage is not None
        free = sorted(allocator.free_block_ids() - set(allocator.eviction.blocks()))
        storage.keys[:, free] = storage.values[:, free] = torch.nan
        return self._executor.execute(step, view)


def engine_of(written: Written, kv: KVConfig, backend: str = "auto", **scheduler: Any) -> EngineCore:
    """An engine that small steps and batches drive, whose freed blocks are overwritten; skips the test where the
    backend cannot compute the model.
    """
    config = engine_config(
        written.directory, kv, backend, "auto", **{"max_batched_tokens": 28, "max_batch_size": 4, **scheduler}
    )
    try:
        plan = plan_engine(config)
    except BackendError as error:
        pytest.skip(str(error))
    poison: list[Poison] = []
    engine = build_engine(plan, wrap=lambda executor: poison.append(Poison(executor)) or poison[0])  # type: ignore[func-returns-value]
    assert isinstance(engine.pool, BlockPool)
    poison[0].pool = engine.pool
    return engine


def answers(engine: EngineCore, count: int = len(PROMPTS), tokens: int = OUTPUT) -> list[list[int]]:
    """What it says to the first prompts, all asked at once."""
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    requests = [Request(str(number), prompt, sampling) for number, prompt in enumerate(PROMPTS[:count])]
    found = {each.request_id: list(each.output_token_ids) for each in drive(engine, requests).records}
    assert engine.audit() == []
    return [found[str(number)] for number in range(count)]
