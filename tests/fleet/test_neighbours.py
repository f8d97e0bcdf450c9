"""Prefixes that are pulled from other replicas."""

from __future__ import annotations

import pytest

from kvlab.config.fleet import FleetConfig, LinkConfig
from kvlab.core import Request, RequestRecord, SamplingParams
from kvlab.engine.build import build_engine
from kvlab.fleet.fleet import Fleet
from kvlab.fleet.holdings import Duplicates
from kvlab.kv.pool import BlockPool
from kvlab.lab.run.fleet import _prefill_times
from kvlab.lab.run.plan import plan_run
from tests.fleet.test_fleet import fleet_of, serve, traffic
from tests.fleet.test_store import asked
from tests.support.model import prompt_for
from tests.support.plans import composed

LINK = LinkConfig(setup_us=10_000.0)


def pulling(*, prefill_s: float = 1.0, link: LinkConfig = LINK, replicas: int = 3, **settings: object) -> Fleet:
    config = FleetConfig(replicas=replicas, neighbours=True, link=link, **settings)  # type: ignore[arg-type]
    return fleet_of(config, is_open=True, prefill_s=prefill_s)


def test_a_prefix_that_another_replica_has_computed_is_pulled() -> None:
    fleet = pulling()
    log = serve(fleet, [asked("r0", 0.0), asked("r1", 0.1), asked("r2", 0.2)])
    assert [record.cached_tokens for record in log.records] == [0, 16, 16]
    (first,), (second,) = (fleet.neighbours[index].pulls for index in (1, 2))
    assert (first.request_id, first.source, first.target, first.tokens) == ("r1", 0, 1, 16)
    assert (second.source, second.end_s - second.start_s >= 0.01) == (1, True)  # it was free longer
    start = log.records[1].scheduled_s
    assert start is not None
    assert first.ready_s == start
    assert log.records[1].ttft_ms is not None
    assert log.records[1].ttft_ms > 10


@pytest.mark.parametrize(("pull", "prefill_s", "found"), [
    ("auto", 1e-3, 16), ("auto", 1e-4, 0), ("always", 1e-4, 16), ("cheaper", 1e-3, 16), ("cheaper", 1e-4, 0),
])  # fmt: skip
def test_what_is_computed_sooner_is_not_pulled(pull: str, prefill_s: float, found: int) -> None:
    fleet = pulling(pull=pull, prefill_s=prefill_s, replicas=2)
    log = serve(fleet, [asked("r0", 0.0), asked("r1", 0.1)])
    assert [record.cached_tokens for record in log.records] == [0, found]


def test_a_store_is_weighed_in_the_same_way() -> None:
    requests = [asked("r0", 0.0), asked("r1", 0.1)]
    for pull, found in (("auto", 16), ("cheaper", 0)):
        fleet = fleet_of(FleetConfig(replicas=2, store="100", link=LINK, pull=pull), is_open=True)
        assert [record.cached_tokens for record in serve(fleet, requests).records] == [0, found]


def test_a_link_that_is_taken_counts() -> None:
    fleet = pulling(
        prefill_s=1.5e-3
    )  # 24 ms for the prefix: two pulls of 10 ms behind each other fit, three do not
    prompts = [Request(f"r{n}", prompt_for("same", 17), SamplingParams(max_tokens=2), 0.1) for n in range(3)]
    log = serve(fleet, [asked("first", 0.0), *(prompts[n] for n in (0, 1))])
    assert [record.cached_tokens for record in log.records] == [0, 16, 16]
    busy = pulling(prefill_s=0.9e-3)  # 14 ms
    log = serve(busy, [asked("first", 0.0), prompts[0], prompts[1]])
    assert [record.cached_tokens for record in log.records] == [0, 16, 0]


def test_the_source_keeps_what_is_pulled_and_a_dead_one_gives_nothing() -> None:
    fleet = pulling(replicas=2, life=["0.105:die:0"])
    records, kept = list[RequestRecord](), list[tuple[int, int]]()
    for name, at in (("r0", 0.0), ("r1", 0.1)):
        fleet.submit(asked(name, at), on_finish=records.append)
    while fleet.has_work():
        if fleet.step() is None and (when := fleet.next_wakeup()) is not None:
            fleet.clock.wait_until(when)
        assert fleet.audit() == []
        pool = fleet.replicas[0].core.pool
        assert isinstance(pool, BlockPool)
        kept.append((pool.stats().blocks_in_use, pool.allocator.num_evictable()))
    assert (4, 0) in kept
    assert kept[-1] == (0, 0)
    assert [(record.request_id, record.cached_tokens) for record in records] == [("r0", 0), ("r1", 0)]
    (pull,) = fleet.neighbours[1].pulls
    assert pull.end_s == 0.105


def test_copies_are_counted_over_time() -> None:
    fleet = fleet_of(FleetConfig(replicas=2), is_open=True)
    log = serve(fleet, [asked("r0", 0.0), asked("r1", 0.1)])
    assert fleet.holdings is not None
    fleet.holdings.until(1.0)
    counts, end_s = fleet.holdings.duplicates, log.records[1].finished_s
    assert (counts.peak, counts.peak_held) == (16, 32)
    assert 16 * (1.0 - end_s) <= counts.duplicate_s < 16 * 0.9
    assert 32 * (1.0 - end_s) < counts.held_s < 16 + 16 * 0.9


def test_copies_are_the_same_however_often_their_time_is_told() -> None:
    """As with steps one by one and at once."""
    counts = Duplicates(), Duplicates()
    for each in counts:
        each.until(0.1)
        each.add(3, 1)
    for tenths in range(2, 97):
        counts[0].until(tenths / 10)
    for each in counts:
        each.until(9.7)
    assert (counts[0].held_s, counts[0].duplicate_s) == (counts[1].held_s, counts[1].duplicate_s)
    assert counts[1].held_s == pytest.approx(3 * 9.6)


@pytest.mark.parametrize("seed", range(3))
def test_steps_at_once_change_nothing(seed: int) -> None:
    requests = traffic(40, seed=seed, groups=8, gap_s=0.003)
    found = []
    for at_once in (True, False):
        fleet = pulling(link=LinkConfig(setup_us=200.0), router=("round_robin", "load", "random")[seed])
        log = serve(fleet, requests, at_once=at_once)
        assert fleet.holdings is not None
        fleet.holdings.until(10.0)
        found.append((log.records, [each.pulls for each in fleet.neighbours], fleet.holdings.duplicates))
    assert found[0] == found[1]
    assert any(pulls for pulls in found[0][1])


@pytest.mark.parametrize("framework", ["vllm", "vllm_synchronous"])
def test_what_a_pull_spares_is_predicted_as_steps_take_with_their_host(framework: str) -> None:
    simulated = "executor=simulated", "hardware=h100_sxm", "executor.timing=roofline", f"framework={framework}"
    plan = plan_run(composed("model=qwen3_8b", *simulated, "scheduler.long_prefill_threshold=256"))
    (predicted,) = _prefill_times(plan.replicas)
    engine = build_engine(plan)
    engine.submit(Request("r", tuple(range(100, 8101)), SamplingParams(max_tokens=2)))
    *prefill, decode = [step.end_s - step.start_s for _ in range(33) if (step := engine.step())]
    assert predicted(0, 8000) == pytest.approx(sum(prefill) - decode, rel=1e-3)
