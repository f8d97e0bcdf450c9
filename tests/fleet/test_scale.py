"""Replicas that start and stop by a rule."""

from __future__ import annotations

import math

import pytest

from kvlab.config.fleet import FleetConfig, LinkConfig, ScaleConfig
from kvlab.core import Request, SamplingParams
from kvlab.fleet.fleet import Fleet
from kvlab.fleet.scale import Scaled
from kvlab.lab.results.log import RunLog
from tests.fleet.test_fleet import fleet_of, serve, traffic
from tests.support.model import prompt_for

QUICK = {"every_s": 0.01, "warm_up_s": 0.015, "down_s": 0.02}


def scaled(
    on: str, target: float, requests: list[Request], *, at_once: bool = True, **options: float
) -> tuple[Fleet, RunLog, float]:
    scale = ScaleConfig(on=on, target=target, **(QUICK | options))  # type: ignore[arg-type]
    fleet = fleet_of(FleetConfig(replicas=4, router="least_requests", scale=scale), is_open=True)
    log = serve(fleet, requests, at_once=at_once)
    return fleet, log, fleet.scalers[0].finish(log.duration_s)


def waves() -> list[Request]:
    """Many requests at a time, few, and many again, all with one prefix."""
    times = [0.001 * n for n in range(40)] + [0.06 + 0.02 * n for n in range(10)]
    times += [0.27 + 0.001 * n for n in range(40)]
    prefix = prompt_for("same", 8)
    return [Request(f"r{n}", prefix, SamplingParams(max_tokens=40), at) for n, at in enumerate(times)]


@pytest.mark.parametrize(("on", "target"), [("queue", 1.0), ("kv", 0.2), ("rate", 250.0)])
def test_no_request_is_sent_to_a_replica_that_is_not_there(on: str, target: float) -> None:
    fleet, log, seconds = scaled(on, target, waves())
    events = fleet.scalers[0].events
    assert {event.event for event in events} == {"start", "drain", "stop"}
    assert log.completed == 90
    serves = {0: 0.0}
    there = {0: 0.0}
    spent, waiting = 0.0, list(events)
    for routed in fleet.routed:
        while waiting and waiting[0].at_s <= routed.at_s:
            spent += _follow(waiting.pop(0), serves, there)
        assert serves.get(routed.choice.replica, math.inf) <= routed.at_s
    for event in waiting:
        spent += _follow(event, serves, there)
    assert seconds == pytest.approx(spent + sum(log.duration_s - since_s for since_s in there.values()))
    assert log.duration_s < seconds < 4 * log.duration_s


def _follow(event: Scaled, serves: dict[int, float], there: dict[int, float]) -> float:
    """What an event makes of who serves from when on, and is there since when; the seconds of one that stops."""
    if event.event == "start":
        serves[event.replica], there[event.replica] = event.at_s + QUICK["warm_up_s"], event.at_s
        return 0.0
    serves.pop(event.replica, None)
    return event.at_s - there.pop(event.replica) if event.event == "stop" else 0.0


@pytest.mark.parametrize("on", ["queue", "kv", "rate"])
def test_steps_at_once_change_no_decision(on: str) -> None:
    one, other = (scaled(on, 0.2, traffic(60, gap_s=0.003), at_once=at_once) for at_once in (True, False))
    assert one[1].records == other[1].records
    assert one[0].scalers[0].events == other[0].scalers[0].events


def test_as_many_at_least_as_at_most_is_a_fleet_without_a_rule() -> None:
    requests = traffic(40)
    _, log, seconds = scaled("queue", 1.0, requests, least=4)
    plain = serve(fleet_of(FleetConfig(replicas=4, router="least_requests"), is_open=True), requests)
    assert log.records == plain.records
    assert seconds == pytest.approx(4 * log.duration_s)


def test_a_replica_that_starts_again_has_an_empty_cache() -> None:
    fleet, log, _ = scaled("rate", 250.0, waves())
    again = [event for event in fleet.scalers[0].events if event.event == "start" and event.at_s > 0.25]
    for event in again:
        after = [each for each in log.records if each.replica == event.replica and each.arrival_s > event.at_s]
        assert [each.cached_tokens for each in after[:1]] == [0]
    assert again


def test_a_replica_that_prefills_stops_when_all_was_pulled_from_it() -> None:
    rule = ScaleConfig("queue", 1.0, every_s=0.01, warm_up_s=0.0, down_s=0.0)
    link = LinkConfig(setup_us=1e5)
    fleet = fleet_of(FleetConfig(replicas=3, prefill=2, prefill_scale=rule, link=link), is_open=True)
    times = [0.0095] * 16 + [0.0105] * 8
    requests = [
        Request(f"r{n}", prompt_for(f"r{n}", 16), SamplingParams(max_tokens=3), at) for n, at in enumerate(times)
    ]
    serve(fleet, requests)
    fleet.scalers[0].until(10.0)
    events = fleet.scalers[0].events
    assert [(event.event, event.replica) for event in events] == [("start", 1), ("drain", 1), ("stop", 1)]
    assert fleet.split is not None
    pulled_s = [sent.end_s for sent in fleet.split.transfers if sent.source == 1]
    assert pulled_s
    assert events[2].at_s >= max(pulled_s) > events[1].at_s


def test_a_replica_stops_when_no_neighbour_pulls_from_it_any_more() -> None:
    rule = ScaleConfig("rate", 100.0, every_s=0.1, warm_up_s=0.0, down_s=0.0)
    config = FleetConfig(
        replicas=2, neighbours=True, pull="always", scale=rule, link=LinkConfig(setup_us=1e6), router="round_robin"
    )
    fleet = fleet_of(config, is_open=True)
    asked = [(f"r{n}", 0.001 * n) for n in range(20)]  # so that the second starts at 0.1 s
    asked += [("other", 0.12), ("same", 0.14), ("same", 0.16)]  # by the second, and then by the first
    requests = [
        Request(f"{n}", prompt_for(name, 17), SamplingParams(max_tokens=2), at)
        for n, (name, at) in enumerate(asked)
    ]
    serve(fleet, requests)
    fleet.scalers[0].until(10.0)
    (pull,) = fleet.neighbours[0].pulls
    events = [(event.event, event.replica) for event in fleet.scalers[0].events]
    assert events == [("start", 1), ("drain", 1), ("stop", 1)]
    assert fleet.scalers[0].events[1].at_s < pull.end_s <= fleet.scalers[0].events[2].at_s
