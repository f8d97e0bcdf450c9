"""Steps about simulated devices: the real command."""

from __future__ import annotations

import pytest
from pytest_bdd import given, parsers, then, when

from features.steps.run_steps import Runner
from tests.support.commands import Command


@given("the tables of measured operations")
def has_tables() -> None:
    pytest.importorskip("aiconfigurator_core", reason="pip install 'kvlab[silicon]' for the tables")


@when(parsers.re('I run "(?P<text>.*)" for each of these (devices|settings)'))
def run_each(lab: Runner, commands: list[Command], text: str, datatable: list[list[str]]) -> None:
    (name,), *values = datatable
    for (value,) in values:
        commands.append(lab.run(text.replace(f"<{name}>", value)))


@then(parsers.parse('the summary says "{machine}" for its machine'))
def has_machine(commands: list[Command], machine: str) -> None:
    assert commands[-1].summary["machine"] == machine


@then(parsers.parse('the tracked run has the tags "{first}" and "{second}"'))
def has_tags(commands: list[Command], first: str, second: str) -> None:
    tags = commands[-1].tracked.data.tags
    for tag in (first, second):
        name, _, value = tag.partition("=")
        assert tags[name] == value


@then("each has a larger cache than the one before, and takes less time")
def larger_and_faster(commands: list[Command]) -> None:
    metrics = [command.summary["metrics"] for command in commands]
    sizes = [each["capacity/token_slots"] for each in metrics]
    times = [each["duration_s"] for each in metrics]
    assert sizes == sorted(set(sizes))
    assert times == sorted(set(times), reverse=True)


@then("both runs have the same requests.parquet and steps.parquet, byte for byte")
def same_records(commands: list[Command]) -> None:
    first, second = commands[-2:]
    assert first.directory != second.directory
    for name in ("requests.parquet", "steps.parquet"):
        assert (first.directory / name).read_bytes() == (second.directory / name).read_bytes()
