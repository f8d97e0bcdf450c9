"""Models whose layers leave their windows: transformers' greedy tokens, whatever was in the blocks before.

features/windows.feature has each backend, eviction, preemption and prefix hits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from kvlab.config import KVConfig, SpeculationConfig
from tests.support.poisoned import OUTPUT, answers, engine_of
from tests.support.transformers_models import PROMPTS, Written, write_model

FAMILIES = ("gemma3_text", "mistral", "gemma2")
GetModel = Callable[[str], tuple[Written, list[list[int]]]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> GetModel:
    @cache
    def get(family: str) -> tuple[Written, list[list[int]]]:
        written = write_model(family, tmp_path_factory.mktemp(family))
        return written, [written.greedy(prompt, OUTPUT) for prompt in PROMPTS]

    return get


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
def test_speculated_tokens_and_forks(model: GetModel, family: str) -> None:
    written, expected = model(family)
    engine = engine_of(written, KVConfig(block_size=4, num_blocks=200), speculation=SpeculationConfig("ngram"))
    assert answers(engine) == expected
