"""Which prefixes are hot, where they are, who is told of that, and the pictures of it."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest

from kvlab.config.fleet import FleetConfig
from kvlab.core import Request, SamplingParams
from kvlab.fleet.hot_prefixes import HotPrefix, hot_prefixes
from kvlab.fleet.prefixes import HeldPrefixes
from kvlab.kv.content_log import Removed, Stored
from kvlab.lab.figures.points import Point, Points
from kvlab.lab.figures.prefix_places import prefix_places_figure, router_hits_figure
from kvlab.lab.results.fleet import prefixes_table
from tests.fleet.test_fleet import fleet_of, serve, traffic
from tests.fleet.test_store import asked
from tests.support.model import prompt_for


def test_a_prefix_is_hot_by_the_tokens_that_it_could_spare() -> None:
    long, short = prompt_for("long", 12), prompt_for("short", 4)
    prompts = [(*long, *prompt_for(f"own {n}", 5)) for n in range(2)]
    prompts += [(*short, *prompt_for(f"other {n}", 5)) for n in range(3)]
    requests = [Request(f"r{n}", prompt, SamplingParams(max_tokens=2), 0.0) for n, prompt in enumerate(prompts)]
    found = hot_prefixes(requests, 4)
    assert [(each.tokens, each.requests, len(each.keys)) for each in found] == [(12, 2, 3), (4, 3, 1)]
    assert hot_prefixes([replace(requests[0], request_id="alone")], 4) == []


def test_of_a_hot_prefix_all_requests_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The turns of conversations, and those of many that are not looked at."""
    sampling = SamplingParams(max_tokens=2)
    firsts = [Request(f"r{n}", prompt_for("system", 8) + prompt_for(f"{n}", 4), sampling, 0.0) for n in range(8)]
    turns = [Request(f"r{n}.1", prompt_for(f"turn {n}", 4), sampling, 1.0, follows=f"r{n}") for n in range(8)]
    turns += [Request(f"r{n}.2", prompt_for(f"more {n}", 4), sampling, 1.0, follows=f"r{n}.1") for n in range(8)]
    for most in (2**17, 10):  # 24 blocks of firsts: every third
        monkeypatch.setattr("kvlab.fleet.hot_prefixes._MOST_BLOCKS", most)
        (found,) = hot_prefixes([*firsts, *turns], 4)
        assert (found.tokens, found.requests) == (8, 24)


def test_it_is_kept_where_they_are_and_from_when_on() -> None:
    requests = [asked("r0", 0.0), asked("r1", 0.1)]
    fleet = fleet_of(FleetConfig(replicas=2), hot=hot_prefixes(requests, 4), is_open=True)
    assert fleet.holdings is not None
    log = serve(fleet, requests)
    fleet.holdings.until(1.0)
    rows = prefixes_table(fleet.holdings).to_pylist()
    assert [(row["replica"], row["tokens"], row["of_tokens"], row["requests"]) for row in rows] == [
        (0, 16, 16, 2),
        (1, 16, 16, 2),
    ]
    assert [row["at_s"] for row in rows] == [record.first_token_s for record in log.records]
    figure = prefix_places_figure(prefixes_table(fleet.holdings), 2, log.duration_s)
    shares = figure.axes[0].images[0].get_array()
    assert shares is not None
    assert [row[-1] for row in shares] == [100, 100]
    assert [row[200] for row in shares] == [100, 0]


def test_what_one_step_evicts_is_kept_in_the_order_of_its_events() -> None:
    keys = [bytes([number]) * 16 for number in range(12)]
    hot = [HotPrefix(4, 2, [key]) for key in keys]
    fleet = fleet_of(FleetConfig(replicas=2), hot=hot, is_open=True)
    holdings = fleet.holdings
    assert holdings is not None
    holdings._take(0, [Stored(keys, None, [], 0, None, list(range(12)))], 0.0, 0.0)
    holdings._take(0, [Removed(keys, 0)], 1.0, 1.0)
    holdings.until(1.0)
    assert [held.prefix for held in holdings.history] == [*range(12), *range(12)]


def test_routers_that_find_nothing_where_nothing_comes_again_are_drawn() -> None:
    figures = {"kv/prefix_hit_rate": 0.0, "fleet/hit_rate_ceiling": 0.0}
    points = [Point({"fleet.router": name}, figures) for name in ("random", "precise")]
    with warnings.catch_warnings(action="error"):
        figure = router_hits_figure(Points(points))
    assert figure is not None
    assert figure.axes[0].get_title(loc="left").startswith("Nothing comes again")


def test_routers_are_drawn_against_the_ceiling() -> None:
    points = [
        Point({"fleet.router": name}, {"kv/prefix_hit_rate": rate, "fleet/hit_rate_ceiling": 0.8})
        for name, rate in (("random", 0.2), ("precise", 0.6))
    ]
    figure = router_hits_figure(Points(points))
    assert figure is not None
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["precise", "random"]
    assert [patch.get_width() for patch in axes.patches] == pytest.approx([60, 20])  # type: ignore[attr-defined]
    assert axes.get_title(loc="left").startswith("75 % of what there is to find is found behind precise")
    assert router_hits_figure(Points(replace(point, config={"seed": n}) for n, point in enumerate(points))) is None


@pytest.mark.parametrize("prefixes", ["exact", "events"])
def test_what_a_router_never_asks_for_does_not_pile_up(prefixes: str) -> None:
    fleet = fleet_of(FleetConfig(replicas=2, router="round_robin", prefixes=prefixes, events_ms=0.01))
    serve(fleet, traffic(60))
    for view in fleet.views:
        assert isinstance(view.prefixes, HeldPrefixes)
        assert view.prefixes._held
        assert len(view.prefixes._coming) < 3
        assert len(view.prefixes._log.take()) < 3
