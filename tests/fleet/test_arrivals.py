"""When a fleet sends what arrives: in its order, and before steps that begin later."""

import pytest

from kvlab.config.fleet import FleetConfig
from kvlab.core import Request, SamplingParams
from tests.fleet.test_fleet import fleet_of, serve
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
