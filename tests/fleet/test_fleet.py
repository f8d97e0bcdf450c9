"""A fleet: one replica is the engine itself, several are engines on one clock, and a run is the same on any
machine.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml

from kvlab.cli.compose import compose_run
from kvlab.config import FrameworkConfig, KVConfig, ModelConfig, PreemptionConfig, SchedulerConfig
from kvlab.config.effects import without_effect
from kvlab.config.fleet import FleetConfig, LinkConfig, WeightsConfig
from kvlab.core import Request, RequestRecord, SamplingParams
from kvlab.engine.build import build_engine, plan_engine
from kvlab.engine.core import EngineCore
from kvlab.engine.front_end import FrontEnd, behind_front_end
from kvlab.fleet.base import ReplicaView, RoutedRequest
from kvlab.fleet.build import build_fleet
from kvlab.fleet.dispatcher import Routed
from kvlab.fleet.fleet import Fleet
from kvlab.fleet.hot_prefixes import HotPrefix
from kvlab.fleet.prefixes import SentPrefixes
from kvlab.fleet.replica import Asked, SimulatedView
from kvlab.fleet.routers import ROUTERS
from kvlab.fleet.split import Split
from kvlab.fleet.store import SharedStore
from kvlab.fleet.transfer import LinkRate
from kvlab.kv.groups import LayerGroup, layers_per_block
from kvlab.kv.sizing import PoolSize
from kvlab.kv.tiers.tier import Tier
from kvlab.lab.results.fleet import fleet_metrics
from kvlab.lab.results.log import FleetLog, RunLog
from kvlab.lab.run.drive import drive
from kvlab.lab.run.recording import _series
from kvlab.paths import CONF
from tests.simulation.test_executor import config
from tests.support.model import prompt_for

SLOW = FrameworkConfig(request_us=2000.0, output_token_us=100.0)
POOL = {"kv": KVConfig(num_blocks=40, block_size=4), "scheduler": SchedulerConfig(max_batch_size=4)}


WINDOWS = yaml.safe_load((CONF / "model" / "gemma3_tiny.yaml").read_text())
WINDOWS["architecture"] |= {
    "num_hidden_layers": 7,
    "sliding_window": 8,
}  # groups of two layers
WINDOWED = {"model": ModelConfig(**WINDOWS, max_seq_len=96)}


def small_pool(offload: str | None, mode: str = "recompute") -> dict[str, Any]:
    """A pool that four sequences do not fit in, with host memory behind it or without."""
    scheduler = SchedulerConfig(max_batch_size=4, preemption=PreemptionConfig(mode=mode))
    return {"kv": KVConfig(num_blocks=14, block_size=4, offload=offload), "scheduler": scheduler}


def traffic(count: int, *, seed: int = 0, groups: int = 3, gap_s: float = 0.002) -> list[Request]:
    """Requests behind one of a few prefixes, some at once."""
    draw = random.Random(seed)
    requests, when = [], 0.0
    for number in range(count):
        group = draw.randrange(groups)
        prompt = (*prompt_for(f"group {group}", 16), *prompt_for(f"own {number}", draw.randrange(1, 9)))
        requests.append(Request(f"r{number}", prompt, SamplingParams(max_tokens=draw.randrange(1, 12)), when))
        when += draw.choice((0.0, gap_s, 3 * gap_s))
    return requests


def fleet_of(
    fleet: FleetConfig,
    *,
    framework: FrameworkConfig | None = None,
    hot: Sequence[HotPrefix] = (),
    is_open: bool = False,
    prefill_s: float = 1e-4,
    own: Mapping[str, Any] = POOL,
) -> Fleet:
    """A fleet of tiny replicas with pools of their `own`, which predict so many seconds a token of a prompt; its
    store has so many blocks as `fleet.store` says. The model is tiny, unless `own` has another.
    """
    engine = config("simulated", **{name: value for name, value in own.items() if name != "model"})
    plan = plan_engine(replace(engine, model=own.get("model", engine.model)))

    def make(remote: Sequence[Tier]) -> EngineCore | FrontEnd:
        return behind_front_end(build_engine(plan, remote=remote), framework or FrameworkConfig())

    pool = plan.pool
    page_bytes = pool.block_size * pool.bytes_per_slot
    groups = pool.groups or (LayerGroup((0,)),)
    rate = LinkRate(fleet.link, 1, page_bytes, 2 * layers_per_block(groups), layers=4, groups=groups)
    store = SharedStore(int(fleet.store), page_bytes) if fleet.store is not None else None
    times = [lambda before, tokens: prefill_s * tokens] * fleet.replicas
    makers, rates = [make] * fleet.replicas, [rate] * fleet.replicas
    return build_fleet(fleet, makers, rates, store, prefill_s=times, hot=hot, is_open=is_open)


def serve(fleet: Fleet, requests: list[Request], **options: Any) -> RunLog:
    log = drive(fleet, requests, **options)
    assert fleet.audit() == []
    assert not any(replica.core.is_keeping for replica in fleet.replicas)  # also one that died: it may return
    fleet.close()
    return log


def alone(requests: list[Request], framework: FrameworkConfig | None = None) -> RunLog:
    engine = behind_front_end(
        build_engine(plan_engine(config("simulated", **POOL))), framework or FrameworkConfig()
    )
    return drive(engine, requests)


@pytest.mark.parametrize("router", ROUTERS.names())
@pytest.mark.parametrize("framework", [FrameworkConfig(), SLOW], ids=["plain", "front_end"])
def test_one_replica_behind_any_router_is_the_engine_itself(router: str, framework: FrameworkConfig) -> None:
    requests = traffic(30)
    expected = alone(requests, framework)
    log = serve(fleet_of(FleetConfig(router=router), framework=framework, is_open=True), requests)
    assert log.records == expected.records
    assert list(log.steps) == list(expected.steps)


@pytest.mark.parametrize("router", ROUTERS.names())
def test_what_knows_prefixes_is_said_to_be_read_by_the_routers_that_have_such_a_view(router: str) -> None:
    words = ["executor=simulated", "fleet.replicas=2", f"fleet.router={router}", "fleet.prefixes=exact"]
    sentences = without_effect(compose_run(words).config)
    unread = any(sentence.startswith("fleet.prefixes=exact has no effect") for sentence in sentences)
    assert unread == (ROUTERS.get(router).prefixes == "none")


def test_round_robin_over_three_is_three_engines() -> None:
    requests = traffic(31)
    log = serve(fleet_of(FleetConfig(replicas=3)), requests)
    for index in range(3):
        own = alone(requests[index::3])
        assert [replace(record, replica=0) for record in log.records if record.replica == index] == own.records


@pytest.mark.parametrize("router", ROUTERS.names())
def test_steps_at_once_are_those_one_by_one(router: str) -> None:
    requests = traffic(40, gap_s=0.05)
    found = [
        serve(fleet_of(FleetConfig(replicas=3, router=router), is_open=is_open), requests, at_once=at_once)
        for is_open, at_once in ((True, True), (False, True), (False, False))
    ]
    for log in found[1:]:
        assert log.records == found[0].records
        assert sorted(log.steps, key=lambda step: (step.replica, step.index)) == sorted(
            found[0].steps, key=lambda step: (step.replica, step.index)
        )


def test_no_replica_begins_a_step_before_what_comes_earlier_was_sent() -> None:
    fleet = fleet_of(FleetConfig(replicas=2, router="least_requests"))
    log = serve(
        fleet,
        [Request(f"r{n}", prompt_for(f"r{n}", 8), SamplingParams(max_tokens=9), 0.003 * n) for n in range(20)],
    )
    for record in log.records:
        assert record.scheduled_s is not None
        assert record.scheduled_s >= record.arrival_s
    idle = [record for record in log.records[:2] if record.scheduled_s == record.arrival_s]
    assert len(idle) == 2  # the second went to the replica that had nothing to do, and did not wait


def test_a_conversation_stays_with_its_replica() -> None:
    first = [Request(f"a{n}", prompt_for(f"r{n}", 8), SamplingParams(max_tokens=4), 0.001 * n) for n in range(6)]
    second = [replace(each, request_id=f"b{n}", follows=f"a{n}", arrival_s=0.01) for n, each in enumerate(first)]
    log = serve(fleet_of(FleetConfig(replicas=4, router="sessions")), first + second)
    where = {record.request_id: record.replica for record in log.records}
    assert [where[f"a{n}"] for n in range(6)] == [where[f"b{n}"] for n in range(6)]
    assert len(set(where.values())) > 1


@pytest.mark.parametrize("router", ["round_robin", "precise", "dynamo"])
def test_splitting_changes_no_token(router: str) -> None:
    requests = traffic(30)
    whole = serve(fleet_of(FleetConfig(replicas=3, router=router)), requests)
    fleet = fleet_of(FleetConfig(replicas=3, prefill=1, router=router))
    split = serve(fleet, requests)
    assert [record.output_token_ids for record in split.records] == [
        record.output_token_ids for record in whole.records
    ]
    assert fleet.split is not None
    assert {each.request_id for each in fleet.split.transfers} <= {request.request_id for request in requests}
    assert all(record.replica > 0 for record in split.records)


def test_a_transfer_takes_its_pieces_and_waits_for_the_one_before() -> None:
    link = LinkConfig(gb_s=1.0, setup_us=100.0, piece_us=10.0)
    rate = LinkRate(link, devices=2, block_bytes=4096, pieces_per_block=8)
    assert rate.seconds(10 * 4096) == pytest.approx(100e-6 + 80 * 10e-6 + 10 * 4096 / 2 / 1e9)
    fleet = fleet_of(FleetConfig(replicas=2, prefill=1, link=replace(link, setup_us=1e5)))
    requests = [Request(f"r{n}", prompt_for(f"r{n}", 16), SamplingParams(max_tokens=3), 0.0) for n in range(3)]
    serve(fleet, requests)
    assert isinstance(fleet.split, Split)
    sent = fleet.split.transfers
    assert [each.request_id for each in sent] == ["r0", "r1", "r2"]
    assert all(after.start_s >= before.end_s for before, after in pairwise(sent))
    assert all(each.end_s - each.start_s == pytest.approx(sent[0].end_s - sent[0].start_s) for each in sent)
    assert all(each.num_bytes == 4 * fleet.split.tiers[1].page_bytes for each in sent)  # 16 tokens in blocks of 4


def test_blocks_stay_where_they_were_computed_until_they_have_been_pulled() -> None:
    fleet = fleet_of(FleetConfig(replicas=2, prefill=1, link=LinkConfig(setup_us=1e6)))
    fleet.submit(Request("r0", prompt_for("r0", 16), SamplingParams(max_tokens=3), 0.0))
    source = fleet.replicas[0].core.pool
    held = []
    while fleet.has_work():
        if fleet.step() is None and (when := fleet.next_wakeup()) is not None:
            fleet.clock.wait_until(when)
        assert fleet.split is not None
        if fleet.split.transfers:
            held.append((source.stats().blocks_in_use, fleet.replicas[1].core.pool.stats().loading_sequences))
    assert (4, 1) in held or (5, 1) in held  # both ends hold the prompt while it is on its way
    assert held[-1][0] == 0


@pytest.mark.parametrize("router", ["precise", "estimated", "load"])
def test_steps_at_once_change_nothing_that_a_router_sees(router: str) -> None:
    def run(*, at_once: bool) -> tuple[list[RequestRecord], list[Routed]]:
        fleet = fleet_of(FleetConfig(replicas=3, router=router, events_ms=3.0, events_lost=0.3), is_open=True)
        log = serve(fleet, traffic(60, groups=6, gap_s=0.01), at_once=at_once)
        return log.records, fleet.routed

    assert run(at_once=True) == run(at_once=False)


def test_polled_metrics_are_of_the_last_step_that_has_ended() -> None:
    (replica,), (request,) = fleet_of(FleetConfig()).replicas, traffic(1)
    replica.submit(Asked(request, None, lambda record: None, lambda when_s: None), 0.0)
    record = replica.step()
    assert record is not None
    middle, behind = record.end_s / 2, record.end_s * 1.5
    replica.submit(Asked(replace(request, request_id="r1"), None, lambda record: None, lambda when_s: None), middle)
    exact, polled = SimulatedView(replica), SimulatedView(replica, middle / 2)
    assert (exact.at(middle).running, exact.waiting) == (1, 1)
    assert (polled.at(middle).running, polled.waiting) == (0, 0)
    assert (polled.at(behind).running, polled.waiting) == (1, 0)


def test_figures_are_sums_over_the_replicas_and_means_of_shares() -> None:
    fleet = fleet_of(FleetConfig(replicas=2, router="round_robin"))
    for request in traffic(3):
        fleet.submit(replace(request, arrival_s=0.0), None, lambda record: None)
    fleet.step()
    fleet.step()
    every, both = [replica.engine.stats() for replica in fleet.replicas], fleet.stats()
    assert [stats.running for stats in every] == [2, 1]
    assert (both.running, both.blocks_in_use) == (3, sum(stats.blocks_in_use or 0 for stats in every))
    assert both.kv_usage_percent == pytest.approx(sum(stats.kv_usage_percent or 0 for stats in every) / 2)


@pytest.mark.parametrize("dies", [False, True])
def test_what_runs_at_one_moment_is_counted_where_it_runs(dies: bool) -> None:
    """Not also where it was lost."""
    requests = [Request(name, prompt_for(name, 9), SamplingParams(max_tokens=9), 0.0) for name in ("a", "b")]
    usual = serve(fleet_of(FleetConfig(replicas=2, router="round_robin")), requests)
    ends_s = [step.end_s for step in usual.steps if step.replica == 0]
    life = [f"{ends_s[2]:.9f}:die:0"] if dies else []
    fleet = fleet_of(FleetConfig(replicas=2, router="round_robin", life=life))
    log = serve(fleet, requests)
    log.fleet = FleetLog.of(fleet, log.duration_s)
    metrics = fleet_metrics(log, log.fleet, [PoolSize(24, 4, 8)] * 2, requests)
    assert fleet.retried == dies
    assert metrics["capacity/peak_running"] == 2
    assert max(running for _, _, running in _series(log)["running"]) == 2


def test_the_most_blocks_at_one_moment_are_those_of_all_replicas() -> None:
    fleet, requests = fleet_of(FleetConfig(replicas=2, router="round_robin")), traffic(40, groups=1)
    log = serve(fleet, requests)
    log.fleet = FleetLog.of(fleet, log.duration_s)
    most = max(shared for _, _, shared in _series(log)["shared_blocks"])
    assert most > log.steps.column("pool.shared_blocks").max()
    assert fleet_metrics(log, log.fleet, [PoolSize(24, 4, 8)] * 2, requests)["kv/shared_blocks_peak"] == most


@pytest.mark.parametrize(("last", "replicas"), [("drain", {0}), ("return", {0, 1})])
def test_events_of_one_time_happen_as_they_are_given(last: str, replicas: set[int]) -> None:
    events = ["return", "drain"] if last == "drain" else ["drain", "return"]
    life = ["0.001:die:1", *(f"0.05:{event}:1" for event in events)]
    fleet = fleet_of(FleetConfig(replicas=2, router="round_robin", life=life))
    log = serve(fleet, traffic(20, gap_s=0.01))
    assert {record.replica for record in log.records if record.arrival_s > 0.05} == replicas


def test_a_prompt_that_is_known_as_far_as_it_is_compared_scores_as_one_that_is_known_whole() -> None:
    config = FleetConfig(replicas=2, router="estimated", prefixes="memory", weights=WeightsConfig(kv=0, queue=0))
    fleet = fleet_of(config, is_open=True)
    fleet.router.memory = (4, 100, 2)  # type: ignore[misc]
    for view in fleet.views:
        view.prefixes = SentPrefixes(4, 100, 2)
    log = serve(fleet, traffic(3, groups=1))
    assert log.completed == 3
    assert [max(routed.choice.scores) for routed in fleet.routed] == [0.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("cached", "scores"),
    [
        ((0, 0, 0), (0, 0, 0)),
        ((96, 0, 0), (1, 0, 0)),  # the most, however little
        ((96, 96, 0), (1, 1, 0)),
        ((112, 96, 0), (1, 0, 0)),  # the least of those that have any scores as one that has none
        ((112, 96, 104), (1, 0, 0.5)),
    ],
)
def test_llm_d_scores_what_is_cached_between_the_least_and_the_most(
    cached: tuple[int, ...], scores: tuple[float, ...]
) -> None:
    router = ROUTERS.get("precise")(FleetConfig(weights=WeightsConfig(kv=0, queue=0, prefix=1)))
    replicas = [
        SimpleNamespace(index=index, cached_tokens=lambda _, has=has: has, waiting=0, kv_usage=0.0)
        for index, has in enumerate(cached)
    ]
    choice = router.choose(cast("RoutedRequest", None), cast("list[ReplicaView]", replicas), 0.0)
    assert choice.scores == scores


def test_a_sample_that_had_ended_when_its_request_was_lost_ends_once() -> None:
    def served(*life: str, stop: tuple[int, ...] = ()) -> tuple[Fleet, RunLog]:
        sampling = SamplingParams(max_tokens=12, n=2, temperature=1.0, seed=3, stop_token_ids=stop)
        fleet = fleet_of(FleetConfig(replicas=2, life=list(life)))
        return fleet, serve(fleet, [Request("r", prompt_for("r", 17), sampling, 0.0)])

    first, second = served()[1].records
    stop = next(token for token in first.output_token_ids[2:] if token not in second.output_token_ids)
    _, usual = served(stop=(stop,))[1].records
    fleet, log = served(f"{usual.token_times_s[-3]}:die:0", stop=(stop,))
    assert [(each.sample, each.replica) for each in log.records] == [(0, 1), (1, 1)]
    lost = [step for step in log.steps if step.replica == 0]
    forked = 1  # the prompt's last token, computed for each sample
    assert fleet.lost_tokens == sum(step.prefill_tokens + step.output_tokens for step in lost) - forked
