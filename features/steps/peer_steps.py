"""Steps about engines that are not kvlab's: the real command against a scripted server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pyarrow.parquet as pq
import pytest
from pytest_bdd import given, parsers, then, when

from features.steps.run_steps import Runner
from kvlab.peers import remote
from tests.support.commands import Command
from tests.support.endpoint import FakeServer, endpoint

_BEHAVIOURS: dict[str, dict[str, Any]] = {
    "wants a key": {"key": "k"},
    "is another version": {"version": "9.9"},
    "refuses a parameter": {"refuses": "cache_salt"},
    "ends after the first answer": {"after": 2, "then": "end"},
    "hangs": {"after": 1, "then": "hang"},
}


@pytest.fixture
def open_servers() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@given("a server of OpenAI's protocol", target_fixture="peer")
def server(open_servers: ExitStack, monkeypatch: pytest.MonkeyPatch) -> FakeServer:
    monkeypatch.setattr(remote, "MOST_LAG_MS", 1e9)  # other tests keep the machine busy
    return open_servers.enter_context(endpoint())


@given(parsers.parse("a server of OpenAI's protocol that {behaves}"), target_fixture="peer")
def server_that(open_servers: ExitStack, behaves: str) -> FakeServer:
    return open_servers.enter_context(endpoint(**_BEHAVIOURS[behaves]))


@given("a client that may send nothing late")
def never_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "MOST_LAG_MS", 0.0)


@when("its address is given to a run")
def run_peer(lab: Runner, commands: list[Command], peer: FakeServer) -> None:
    run_peer_with(lab, commands, peer, "workload.num_requests=3")


@when(parsers.parse('its address is given to a run with "{text}"'))
def run_peer_with(lab: Runner, commands: list[Command], peer: FakeServer, text: str) -> None:
    loop = [] if "arrival" in text else ["workload.concurrency=1"]
    settings = ["engine=openai", f"engine.url={peer.url}", *loop, *text.split()]
    commands.append(lab.lab.here(*settings, directory=lab.folder()))


@then(parsers.parse('its requests have the column "{column}" and not "{other}"'))
def has_column(commands: list[Command], column: str, other: str) -> None:
    names = pq.read_table(commands[-1].directory / "requests.parquet").column_names
    assert column in names
    assert other not in names


@then(parsers.parse('nothing is said of "{text}"'))
def is_not_said(commands: list[Command], text: str) -> None:
    assert text not in commands[-1].output
