"""Routers of a plugin that answer nothing of use."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from kvlab.config.fleet import FleetConfig
from kvlab.errors import ConfigError
from kvlab.fleet.base import Choice, ReplicaView, RoutedRequest, Router
from kvlab.fleet.prefixes import RoutedPrompt
from kvlab.fleet.routers import ROUTERS
from tests.fleet.test_fleet import fleet_of, traffic

NAN = float("nan")


class Mistyped(Router):
    load = "pulled"

    def choose(self, request: RoutedRequest, replicas: Sequence[ReplicaView], now: float) -> Choice:
        return Choice(0)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda router, views: Choice(7), "chose replica 7 for r0, of 0, 1"),
        (lambda router, views: Choice("0"), "chose replica '0' for r0, of 0, 1"),  # type: ignore[arg-type]
        (lambda router, views: None, "has to return a Choice of 0, 1 for r0, not None"),
        (lambda router, views: router.highest(views, [NAN, NAN]), "scores replicas with nan, nan; what is no"),
        (lambda router, views: router.lowest(views, [NAN, 1.0]), "scores replicas with nan, 1.0; what is no"),
    ],
)
def test_a_router_that_answers_nothing_of_use_is_named(
    answer: Callable[[Router, Sequence[ReplicaView]], Choice], said: str
) -> None:
    class Wrong(Router):
        def choose(self, request: RoutedRequest, replicas: Sequence[ReplicaView], now: float) -> Choice:
            return answer(self, replicas)

    fleet = fleet_of(FleetConfig(replicas=2))
    fleet.router = Wrong(FleetConfig(replicas=2))
    with pytest.raises(ConfigError, match=re.escape(said)):
        fleet.submit(traffic(1)[0])


def test_a_router_may_choose_by_a_number_of_numpy() -> None:
    choice = Choice(np.int64(1), (0.5, 0.25))  # type: ignore[arg-type]
    request = RoutedPrompt(traffic(1)[0], "")
    checked = Mistyped(FleetConfig(replicas=2)).checked(choice, request, (0, 1))
    assert checked == Choice(1, (0.5, 0.25))
    assert type(checked.replica) is int


def test_a_view_that_a_router_mistypes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ROUTERS._entries, "mistyped", Mistyped)
    with pytest.raises(ConfigError, match=r"fleet\.router=mistyped: has load='pulled'; known: exact, polled"):
        FleetConfig(router="mistyped").fed_by("load")
