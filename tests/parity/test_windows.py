"""Models whose layers leave their windows: transformers' greedy tokens, whatever was in the blocks before."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from kvlab.attention.registry import attention_backends
from kvlab.config import KVConfig, SpeculationConfig
from kvlab.core import Request, SamplingParams
from kvlab.engine.build import build_engine, plan_engine
from kvlab.engine.core import EngineCore
from kvlab.engine.step import Executor, StepInput, StepResult
from kvlab.errors import BackendError
from kvlab.kv.pool import BlockPool
from kvlab.kv.view import CacheView
from kvlab.lab.run.drive import drive
from tests.support.transformers_models import PROMPTS, Written, engine_config, write_model

OUTPUT = 24  # tokens of an answer, so that even the shortest prompt's leaves the windows
FAMILIES = ("gemma3_text", "mistral", "gemma2")
GetModel = Callable[[str], tuple[Written, list[list[int]]]]


class Poison(Executor):
    """Overwrites every block that nobody holds and that holds nothing to share, before each pass."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.pool: BlockPool | None = None

    def execute(self, step: StepInput, view: CacheView) -> StepResult:
        assert self.pool is not None
        allocator, storage = self.pool.allocator, self.pool.storage
        assert storage is not None
        free = sorted(allocator.free_block_ids() - allocator.evictable_block_ids())
        storage.keys[:, free] = storage.values[:, free] = torch.nan
        return self._executor.execute(step, view)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> GetModel:
    @cache
    def get(family: str) -> tuple[Written, list[list[int]]]:
        written = write_model(family, tmp_path_factory.mktemp(family))
        return written, [written.greedy(prompt, OUTPUT) for prompt in PROMPTS]

    return get


def engine_of(written: Written, kv: KVConfig, backend: str = "auto", **scheduler: Any) -> EngineCore:
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
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    requests = [Request(str(number), prompt, sampling) for number, prompt in enumerate(PROMPTS[:count])]
    found = {each.request_id: list(each.output_token_ids) for each in drive(engine, requests).records}
    assert engine.audit() == []
    return [found[str(number)] for number in range(count)]


@pytest.mark.parametrize("backend", attention_backends())
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_transformers(model: GetModel, family: str, backend: str) -> None:
    written, expected = model(family)
    engine = engine_of(written, KVConfig(block_size=8, num_blocks=60), backend)
    assert any(group.layers.window for group in engine.pool.groups)  # type: ignore[attr-defined]
    if backend == "triton":  # interpreted
        assert answers(engine, 2, 4) == [tokens[:4] for tokens in expected[:2]]
    else:
        assert answers(engine) == expected


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("kv", "scheduler"),
    [
        ({"block_size": 5, "num_blocks": 60}, {}),
        ({"block_size": 1, "num_blocks": 300}, {"max_batch_size": 3}),
        ({"block_size": 4, "num_blocks": 60, "eviction": "cost", "ttl_s": 0.02}, {}),
        ({"block_size": 4, "num_blocks": 60, "eviction": "s3_fifo", "quota": 0.5}, {"max_batch_size": 2}),
        ({"block_size": 16, "num_blocks": 60, "prefix_sharing": False}, {"policy": "static", "max_batch_size": 3}),
    ],
)
def test_whatever_the_blocks_and_the_policy(
    model: GetModel, family: str, kv: dict[str, Any], scheduler: dict[str, Any]
) -> None:
    written, expected = model(family)
    assert answers(engine_of(written, KVConfig(**kv), **scheduler)) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_across_preemption_eviction_and_hits(model: GetModel, family: str) -> None:
    """The first run is preempted, the second finds what the first left and evicts the rest."""
    written, expected = model(family)
    scheduler: dict[str, Any] = {
        "max_batch_size": 6,
        "admission_reserve": 0.0,
        "watermark": 0.0,
        "max_batched_tokens": 20,
    }
    engine = engine_of(written, KVConfig(block_size=4, num_blocks=24), **scheduler)
    assert answers(engine) == expected
    assert answers(engine) == expected
    stats, counters = engine.stats(), engine.pool.counters()
    assert stats.preemptions
    assert counters.evicted_blocks
    assert counters.hit_tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_cold_run_warm_run_and_sharing_off_agree(model: GetModel, family: str) -> None:
    written, expected = model(family)
    engine = engine_of(written, KVConfig(block_size=4, num_blocks=200))
    cold, warm = answers(engine), answers(engine)
    assert engine.pool.counters().hit_tokens > 100
    off = answers(engine_of(written, KVConfig(block_size=4, num_blocks=200, prefix_sharing=False)))
    kept = answers(engine_of(written, KVConfig(block_size=4, num_blocks=200, windows=False)))
    assert cold == warm == off == kept == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_speculated_tokens_and_forks(model: GetModel, family: str) -> None:
    written, expected = model(family)
    engine = engine_of(written, KVConfig(block_size=4, num_blocks=200), speculation=SpeculationConfig("ngram"))
    assert answers(engine) == expected
