"""Steps about fleets: the real command, its tables and its figures."""

from __future__ import annotations

from pathlib import Path

import pytest
from pytest_bdd import parsers, then

from features.steps.explain_steps import figures_of
from tests.support.commands import Command


@then(parsers.parse('the replicas of its requests are "{replicas}"'))
def has_replicas(commands: list[Command], replicas: str) -> None:
    rows = commands[-1].rows("requests.parquet")
    assert " ".join(str(row.get("replica") or 0) for row in rows) == replicas


@then(parsers.parse('each request\'s row has the group of its replica: "{groups}"'))
def has_groups(commands: list[Command], groups: str) -> None:
    names = groups.split(", ")
    rows = commands[-1].rows("requests.parquet")
    assert [row["group"] for row in rows] == [names[row["replica"]] for row in rows]


@then("its ways and their scores are those of the run's routes.parquet")
def same_routes(explained_run: Command, tmp_path: Path) -> None:
    (found, *_) = figures_of(explained_run.directory, "request=r3 changes=false")["requests"]
    rows = [row for row in explained_run.rows("routes.parquet") if row["request_id"] == "r3"]
    names = ("at_s", "replica", "stage", "scores")
    assert [[hop[name] for name in names] for hop in found["sent"]] == [
        [row[name] for name in names] for row in rows
    ]


@then(parsers.parse('its scaling.parquet says "{events}"'))
def scaled(commands: list[Command], events: str) -> None:
    rows = commands[-1].rows("scaling.parquet")
    assert ", ".join(f"{row['at_s']} {row['event']} {row['replica']}" for row in rows) == events


@then("its routes.parquet has a row for each request, to the same replicas")
def has_routes(commands: list[Command]) -> None:
    routes = {row["request_id"]: row["replica"] for row in commands[-1].rows("routes.parquet")}
    assert routes == {row["request_id"]: row["replica"] for row in commands[-1].rows("requests.parquet")}


@then(parsers.parse('its metrics have {value:d} as "{name}" and four times the bytes of one replica as KV cache'))
def has_whole_cache(commands: list[Command], value: int, name: str) -> None:
    metrics = commands[-1].summary["metrics"]
    assert metrics[name] == value
    assert metrics["capacity/kv_bytes"] == 4 * 2**20


@then(parsers.re(r'its metrics have (?P<value>nothing|\d+) as "(?P<name>[^"]+)"'))
def has_metric(commands: list[Command], value: str, name: str) -> None:
    found = commands[-1].summary["metrics"].get(name)
    assert found == (None if value == "nothing" else float(value))


@then(parsers.parse('its energy is that of "{name}" replicas of {watts:d} W'))
def has_energy(commands: list[Command], name: str, watts: int) -> None:
    metrics = commands[-1].summary["metrics"]
    joules = metrics[name] * watts * metrics["duration_s"]
    assert metrics["energy/output_token_j_most"] == pytest.approx(joules / metrics["tokens/output"])


@then("both runs have the same output tokens")
def same_tokens(commands: list[Command]) -> None:
    first, second = ([row["output_token_ids"] for row in each.rows("requests.parquet")] for each in commands[-2:])
    assert first == second


@then(
    parsers.re(r"(?P<count>\d+) requests? found (?P<tokens>\d+) tokens or more, and no block leaked"),
    converters={"count": int, "tokens": int},
)
def found_tokens(commands: list[Command], count: int, tokens: int) -> None:
    assert sum(row["cached_tokens"] >= tokens for row in commands[-1].rows("requests.parquet")) == count
    no_leak(commands)


@then(parsers.parse('its routes.parquet has the stages "{stages}" of each request'))
def has_stages(commands: list[Command], stages: str) -> None:
    found: dict[str, list[str]] = {}
    for row in commands[-1].rows("routes.parquet"):
        found.setdefault(row["request_id"], []).append(row["stage"])
    assert {" ".join(each) for each in found.values()} == {stages}


@then(parsers.parse('its requests pulled "{tokens}" tokens'))
def pulled_tokens(commands: list[Command], tokens: str) -> None:
    assert " ".join(str(row["pulled_tokens"]) for row in commands[-1].rows("requests.parquet")) == tokens


@then("no block leaked")
def no_leak(commands: list[Command]) -> None:
    assert commands[-1].summary["metrics"]["kv/leaked_blocks"] == 0


@then(parsers.re("(?P<which>all|not all) requests went where one with their prefix had been before"))
def followed_prefixes(commands: list[Command], which: str) -> None:
    rows = commands[-1].rows("requests.parquet")
    computed = sum(row["cached_tokens"] == 0 for row in rows)
    groups = 3  # the first of each finds nothing
    assert computed == groups if which == "all" else computed > groups


@then(parsers.re("(?P<which>all|not all) requests were sent to the replica of the first"))
def stayed(commands: list[Command], which: str) -> None:
    replicas = {row.get("replica") or 0 for row in commands[-1].rows("requests.parquet")}
    assert (len(replicas) == 1) == (which == "all")


@then("each takes longer to pull than the one before")
def longer_pulls(commands: list[Command]) -> None:
    times = [command.summary["metrics"]["fleet/transfer_ms_p50"] for command in commands]
    assert times == sorted(set(times))
