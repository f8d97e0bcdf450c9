"""Dynamo's router with a temperature."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvlab.config.fleet import FleetConfig
from kvlab.fleet.routers.dynamo import Dynamo


def replica(index: int, blocks_in_use: int) -> Any:
    return SimpleNamespace(
        index=index, blocks_in_use=blocks_in_use, prefill_tokens=0, block_size=4, cached_tokens=lambda _: 0
    )


@pytest.mark.parametrize("temperature", [0.1, 0.5, 4.0])
def test_draws_by_the_softmax_of_costs_between_the_lowest_and_the_highest(temperature: float) -> None:
    router = Dynamo(FleetConfig(replicas=3, router="dynamo", temperature=temperature), seed=1)
    request: Any = SimpleNamespace(prompt_tokens=16)
    replicas = [replica(4, 20), replica(5, 0), replica(6, 10)]
    drawn = Counter(router.choose(request, replicas, 0.0).replica for _ in range(3000))
    odds = np.exp(-np.array([1.0, 0.0, 0.5]) / temperature)
    assert [drawn[index] / 3000 for index in (4, 5, 6)] == pytest.approx(odds / odds.sum(), abs=0.04)
