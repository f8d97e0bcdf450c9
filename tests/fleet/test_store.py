"""A store that the replicas of a fleet have in common."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from kvlab.config.fleet import FleetConfig, LinkConfig, WeightsConfig
from kvlab.core import Request, SamplingParams
from kvlab.engine.build import build_engine, plan_engine
from kvlab.fleet.build import build_fleet
from kvlab.fleet.fleet import Fleet
from kvlab.fleet.store import SharedStore
from kvlab.fleet.transfer import LinkRate
from kvlab.kv.audit import Finding
from tests.fleet.test_fleet import POOL, fleet_of, serve, small_pool, traffic
from tests.simulation.test_executor import config
from tests.support.model import prompt_for


def stored(
    blocks: int, *, router: str = "round_robin", setup_us: float = 100.0, is_open: bool = True, life: str = ""
) -> Fleet:
    plan = plan_engine(config("simulated", **POOL))
    page_bytes = plan.pool.block_size * plan.pool.bytes_per_slot
    rate = LinkRate(LinkConfig(setup_us=setup_us), 1, page_bytes, 2 * plan.model.num_layers)
    makers = [lambda tier: build_engine(plan, remote=tier)] * 3
    settings = FleetConfig(replicas=3, router=router, store="1GiB", life=[life] if life else [])
    return build_fleet(settings, makers, [rate] * 3, SharedStore(blocks, page_bytes), is_open=is_open)


def asked(name: str, at: float) -> Request:
    return Request(name, prompt_for("same", 17), SamplingParams(max_tokens=2), at)


def test_what_one_replica_has_computed_the_next_finds_when_it_has_come() -> None:
    fleet = stored(100, setup_us=5000.0)
    log = serve(fleet, [asked("r0", 0.0), asked("r1", 0.001), asked("r2", 0.1)])
    assert [record.replica for record in log.records] == [0, 1, 2]
    assert [record.cached_tokens for record in log.records] == [0, 0, 16]
    first = log.records[2].first_token_s
    assert first is not None
    assert first - 0.1 > 0.005  # it was loaded, over a link that takes so long
    assert sum(side.counts.hits for side in fleet.sides.values()) == 4
    assert sum(side.counts.stored for side in fleet.sides.values()) == 4  # once, although two replicas computed it


def test_what_a_replica_that_dies_has_not_written_whole_is_not_there() -> None:
    for life, found in (("0.004:die:0", 0), ("0.05:die:0", 16)):
        log = serve(stored(100, setup_us=5000.0, life=life), [asked("r0", 0.0), asked("r1", 0.1)])
        assert [record.cached_tokens for record in log.records] == [0, found]


def test_a_store_that_is_full_keeps_what_was_used_last() -> None:
    fleet = stored(4)
    other = [Request("o", prompt_for("other", 17), SamplingParams(max_tokens=2), 0.1)]
    log = serve(fleet, [asked("r0", 0.0), *other, asked("r2", 0.2)])
    assert [record.cached_tokens for record in log.records] == [0, 0, 0]
    assert len(fleet.sides[0]) == 4


def test_a_router_counts_what_the_store_has_at_its_weight() -> None:
    scores = {}
    for weight in (0.0, 0.5):
        settings = FleetConfig(replicas=2, router="estimated", prefixes="exact", store="100", store_weight=weight)
        fleet = fleet_of(replace(settings, weights=WeightsConfig(kv=0, queue=0, prefix=1)), is_open=True)
        serve(fleet, [asked("r0", 0.0), asked("r1", 0.5)])
        first, second = (routed.choice.scores for routed in fleet.routed)
        assert first == (0.0, 0.0)
        scores[weight] = sorted(second)
    assert scores == {0.0: [0.0, 1.0], 0.5: [0.5, 1.0]}  # of 17 tokens, one whole block


@pytest.mark.parametrize("seed", range(6))
def test_no_request_is_lost_and_steps_at_once_change_nothing(seed: int) -> None:
    draw = random.Random(seed)
    requests = traffic(40, seed=seed, groups=8, gap_s=0.003)
    blocks, router = draw.choice([3, 20, 200]), draw.choice(["round_robin", "precise", "estimated"])
    life = draw.choice(["", "0.06:die:1"])
    one = serve(stored(blocks, router=router, life=life), requests)
    fleet, broken = stored(blocks, router=router, is_open=False, life=life), list[Finding]()
    other = serve(fleet, requests, at_once=False, on_step=lambda log, record: broken.extend(fleet.audit()))
    assert one.records == other.records
    assert broken == []
    plain = serve(fleet_of(FleetConfig(replicas=3, router="round_robin")), requests)
    assert [each.output_token_ids for each in one.records] == [each.output_token_ids for each in plain.records]
    assert one.completed == 40


@pytest.mark.parametrize("seed", [2, 6, 43])
def test_what_a_pool_drops_in_steps_at_once_is_used_before_what_they_write(seed: int) -> None:
    requests = [
        replace(request, sampling=replace(request.sampling, max_tokens=3 * request.sampling.max_tokens))
        for request in traffic(40, seed=seed, groups=8, gap_s=0.003)
    ]
    settings = FleetConfig(replicas=2, router="sessions", store="10")
    once, by_step = (
        serve(fleet_of(settings, own=small_pool(None), is_open=True), requests, at_once=at_once)
        for at_once in (True, False)
    )
    assert once.records == by_step.records
