"""Layers with windows beside a split: of each group of layers what its sequences hold goes over the link."""

from __future__ import annotations

from itertools import product

import pytest

from kvlab.config.fleet import FleetConfig, LinkConfig
from kvlab.core import Request, SamplingParams
from kvlab.fleet.fleet import Fleet
from kvlab.lab.results.log import RunLog
from tests.fleet.test_fleet import POOL, WINDOWED, fleet_of, serve, traffic
from tests.support.model import prompt_for

WAYS = [("prefill_first", "prompt"), *product(["decode_first"], ["prompt", "chunk", "layer"])]


def split(
    handshake: str, send: str, requests: list[Request], *life: str, setup_us: float = 0.0
) -> tuple[Fleet, RunLog]:
    link = LinkConfig(setup_us=setup_us, send=send)
    config = FleetConfig(replicas=3, prefill=2, handshake=handshake, link=link, life=list(life))
    fleet = fleet_of(config, own=POOL | WINDOWED)
    return fleet, serve(fleet, requests)


def asked(name: str, tokens: int) -> Request:
    return Request(name, prompt_for(name, tokens), SamplingParams(max_tokens=4), 0.0)


@pytest.mark.parametrize(("handshake", "send"), WAYS)
@pytest.mark.parametrize(("tokens", "whole"), [(8, 2), (17, 4), (40, 10)])
def test_bytes_are_those_of_what_each_layer_needs(handshake: str, send: str, tokens: int, whole: int) -> None:
    fleet, log = split(handshake, send, [asked("r0", tokens)])
    assert fleet.split is not None
    (sent,) = fleet.split.transfers
    of_layer = fleet.replicas[2].core.pool.offload.tiers[0].page_bytes // 2  # type: ignore[attr-defined]
    assert sent.num_bytes == (2 * whole + 5 * min(whole, 2)) * of_layer  # blocks of 4 tokens; windows of 8
    computed = [step.prefill_tokens for step in log.steps if step.replica == 2]
    assert sum(computed) == max(tokens - 4 * whole, 1)


@pytest.mark.parametrize(("handshake", "send"), WAYS)
def test_what_comes_to_nothing_is_computed(handshake: str, send: str) -> None:
    fleet, log = split(handshake, send, [asked("r0", 17)], "0.5:die:0", setup_us=1e6)
    assert [each.stage for each in fleet.routed].count("prefill") == 1
    assert sum(step.prefill_tokens for step in log.steps if step.replica == 2) == 17
    assert log.records[0].token_times_s[0] < 1.0


@pytest.mark.parametrize(("handshake", "send"), WAYS)
def test_all_that_is_pulled_is_found(handshake: str, send: str) -> None:
    fleet, log = split(handshake, send, traffic(30))
    assert fleet.split is not None
    assert len(fleet.split.transfers) > 5
    assert log.completed == 30


def same(name: str, at_s: float) -> Request:
    return Request(name, prompt_for("same", 41), SamplingParams(max_tokens=2), at_s)


@pytest.mark.parametrize("way", [{"store": "100"}, {"neighbours": True}])
@pytest.mark.parametrize(("setup_us", "pull", "found"), [
    (0.0, "always", 40), (1e4, "always", 40), (1e4, "cheaper", 0),
])  # fmt: skip
def test_what_others_have_is_loaded_where_it_is_worth_it(
    way: dict[str, object], setup_us: float, pull: str, found: int
) -> None:
    link = LinkConfig(setup_us=setup_us)
    config = FleetConfig(replicas=2, link=link, pull=pull, **way)  # type: ignore[arg-type]
    fleet = fleet_of(config, own=POOL | WINDOWED, is_open=True, prefill_s=1e-4)
    log = serve(fleet, [same("r0", 0.0), same("r1", 1.0)])
    assert [record.cached_tokens for record in log.records] == [0, found]
    (tier,) = fleet.replicas[1].core.pool.offload.tiers  # type: ignore[attr-defined]
    assert tier.counts.loaded == (10 + 3 * 2 if found else 0)  # all of one group, of three a window of two blocks


def test_a_neighbour_without_its_windows_is_not_asked() -> None:
    config = FleetConfig(replicas=3, pull="always", neighbours=True)
    fleet = fleet_of(config, own=POOL | WINDOWED, is_open=True, prefill_s=1.0)
    serve(fleet, [same("r0", 0.0), same("r1", 1.0)])
    holdings = fleet.holdings
    assert holdings is not None
    holdings.until(1.5)
    both = [holders for holders in holdings.holders.values() if len(holders) == 2]
    assert {bool(holders[0].tokens) for holders in both} == {True, False}
    for holders in both:  # as if one had lost what lies in windows, one all else
        del holders[1 if holders[0].tokens else 0]
    assert [record.cached_tokens for record in serve(fleet, [same("r2", 2.0)]).records] == [0]
    assert not fleet.neighbours[2].pulls
