"""Dynamo's router: with a temperature, and what it looks at."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvlab.config.fleet import FleetConfig
from kvlab.engine.scheduler.waiting_queue import WaitingQueue
from kvlab.fleet.routers.dynamo import Dynamo
from tests.fleet.test_fleet import fleet_of, serve, traffic


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


@pytest.mark.parametrize("router", ["dynamo", "oracle"])
def test_a_router_that_counts_tokens_to_come_looks_at_no_sequence_that_waits(
    router: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be thousands for each request that comes."""
    monkeypatch.setattr(WaitingQueue, "__iter__", lambda queue: pytest.fail("walks over the queue"))
    log = serve(fleet_of(FleetConfig(replicas=2, router=router)), traffic(40, gap_s=0.0))
    assert all(record.completed for record in log.records)
