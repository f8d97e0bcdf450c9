"""When a fleet sends what arrives: in its order, and before steps that begin later; and what it never sends."""

from dataclasses import replace
from typing import Any

import pytest

from kvlab.config.fleet import FleetConfig
from kvlab.core import Request, RequestRecord, SamplingParams
from tests.fleet.test_fleet import fleet_of, serve, traffic
from tests.support.model import prompt_for


@pytest.mark.parametrize("at_once", [False, True])
def test_what_arrives_behind_a_death_is_sent_in_its_order_before_later_steps(at_once: bool) -> None:
    requests = [
        Request(name, prompt_for(name, 6), SamplingParams(max_tokens=8, ignore_eos=True), arrival_s)
        for name, arrival_s in (("a", 0.01), ("lost", 0.01), ("b", 0.0105), ("c", 0.0105), ("d", 0.0105))
    ]
    fleet = fleet_of(FleetConfig(replicas=2, life=["0.01049:die:1"]), is_open=True)
    log = serve(fleet, requests, at_once=at_once)
    assert [routed.request_id for routed in fleet.routed] == ["a", "lost", "lost", "b", "c", "d"]
    first = next(step for step in log.steps if step.start_s >= 0.0105)
    assert (first.running, first.waiting) == (4, 1)


@pytest.mark.parametrize("settings", [{}, {"prefill": 1}, {"prefill": 1, "handshake": "decode_first"}])
def test_what_has_not_ended_when_it_is_closed_is_aborted(settings: dict[str, Any]) -> None:
    """What has not arrived, too."""
    fleet, ended = fleet_of(FleetConfig(replicas=3, **settings)), list[RequestRecord]()
    for request in traffic(20, gap_s=0.05):
        fleet.submit(request, on_finish=ended.append)
    while fleet.clock.now() < 0.4:
        if fleet.step() is None:
            fleet.clock.wait_until(fleet.next_wakeup() or 0.0)
    fleet.close()
    assert sorted(record.request_id for record in ended) == sorted(f"r{number}" for number in range(20))
    assert {record.finish_reason for record in ended} == {"length", "aborted"}
    assert not fleet.has_work()


def test_no_time_passes_while_it_is_closed() -> None:
    fleet, ended = fleet_of(FleetConfig(replicas=2)), list[RequestRecord]()
    for request in traffic(6, gap_s=1.0):
        fleet.submit(replace(request, arrival_s=request.arrival_s + 1.0), on_finish=ended.append)
    closed_s = fleet.clock.now()
    fleet.close()
    assert [record.finished_s for record in ended] == [closed_s] * 6
