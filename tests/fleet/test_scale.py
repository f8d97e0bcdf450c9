"""Replicas that start and stop by a rule."""

from __future__ import annotations

import math

import pytest

from kvlab.config.fleet import FleetConfig, ScaleConfig
from kvlab.core import Request, SamplingParams
from kvlab.fleet.fleet import Fleet
from kvlab.fleet.scale import Scaled
from kvlab.lab.run.drive import RunLog
from tests.fleet.test_fleet import fleet_of, serve, traffic
from tests.support.model import prompt_for

QUICK = {"every_s": 0.01, "warm_up_s": 0.015, "down_s": 0.02}


def scaled(
    on: str, target: float, requests: list[Request], *, at_once: bool = True, **options: float
) -> tuple[Fleet, RunLog, float]:
    scale = ScaleConfig(on=on, target=target, **(QUICK | options))  # type: ignore[arg-type]
    fleet = fleet_of(FleetConfig(replicas=4, router="least_requests", scale=scale), is_open=True)
    log = serve(fleet, requests, at_once=at_once)
    assert fleet.scaler is not None
    return fleet, log, fleet.scaler.finish(log.duration_s)


def waves() -> list[Request]:
    """Many requests at a time, few, and many again, all with one prefix."""
    times = [0.001 * n for n in range(40)] + [0.06 + 0.02 * n for n in range(10)]
    times += [0.27 + 0.001 * n for n in range(40)]
    prefix = prompt_for("same", 8)
    return [Request(f"r{n}", prefix, SamplingParams(max_tokens=40), at) for n, at in enumerate(times)]


@pytest.mark.parametrize(("on", "target"), [("queue", 1.0), ("kv", 0.2), ("rate", 250.0)])
def test_no_request_is_sent_to_a_replica_that_is_not_there(on: str, target: float) -> None:
    fleet, log, seconds = scaled(on, target, waves())
    assert fleet.scaler is not None
    events = fleet.scaler.events
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
    assert one[0].scaler is not None
    assert other[0].scaler is not None
    assert one[0].scaler.events == other[0].scaler.events


def test_as_many_at_least_as_at_most_is_a_fleet_without_a_rule() -> None:
    requests = traffic(40)
    _, log, seconds = scaled("queue", 1.0, requests, least=4)
    plain = serve(fleet_of(FleetConfig(replicas=4, router="least_requests"), is_open=True), requests)
    assert log.records == plain.records
    assert seconds == pytest.approx(4 * log.duration_s)


def test_a_replica_that_starts_again_has_an_empty_cache() -> None:
    fleet, log, _ = scaled("rate", 250.0, waves())
    assert fleet.scaler is not None
    again = [event for event in fleet.scaler.events if event.event == "start" and event.at_s > 0.25]
    for event in again:
        after = [each for each in log.records if each.replica == event.replica and each.arrival_s > event.at_s]
        assert [each.cached_tokens for each in after[:1]] == [0]
    assert again
