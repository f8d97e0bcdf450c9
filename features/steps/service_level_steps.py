"""Steps about service levels: the real command, its figures compared with its requests."""

from __future__ import annotations

import shlex

import pytest
from pytest_bdd import parsers, then, when

from features.steps.run_steps import Runner
from features.steps.sweep_steps import Commands
from tests.support.commands import Command


@when(parsers.parse("I run it again with a limit that the first tokens of {count:d} requests are within"))
def run_with_limit(lab: Runner, commands: list[Command], count: int) -> None:
    times = sorted(row["ttft_ms"] for row in commands[-1].rows("requests.parquet"))
    assert times[count - 1] < times[count]
    limit = f"slo.ttft_ms={times[count - 1]!r}"
    commands.append(lab.run(f"executor=simulated hardware=l4 scheduler.max_batch_size=1 {limit}"))


@then(
    parsers.parse(
        "{count:d} of {submitted:d} requests are within the limits, and the goodput is as many in its duration"
    )
)
def counted(commands: list[Command], count: int, submitted: int) -> None:
    metrics = commands[-1].summary["metrics"]
    assert metrics["slo/attainment"] == metrics["slo/ttft_attainment"] == 100 * count / submitted
    assert metrics["slo/goodput_per_s"] == pytest.approx(count / metrics["duration_s"])


@then("the run has no service levels")
def no_service_levels(commands: list[Command]) -> None:
    assert commands[-1].code == 0
    assert not [name for name in commands[-1].summary["metrics"] if name.startswith("slo/")]
    assert "service levels" not in commands[-1].output


@then(parsers.parse("the store holds the search with {count:d} finished runs, and its {key} is {value:g}"))
def search_in_store(laboratory: Commands, count: int, key: str, value: float) -> None:
    (search,) = [run for run in laboratory.lab.runs() if run.tags.get("kvlab.kind") == "tune"]
    assert search.finished
    assert search.metrics[key] == value
    children = laboratory.lab.children()
    assert [run.finished for run in children] == [True] * count
    assert {run.tags["mlflow.parentRunId"] for run in children} == {search.run_id}


@then(parsers.parse('of the runs that the store holds, its best is the one with the most "{metric}"'))
def best_of_search(laboratory: Commands, metric: str) -> None:
    (search,) = [run for run in laboratory.lab.runs() if run.tags.get("kvlab.kind") == "tune"]
    ranked = sorted(laboratory.lab.children(), key=lambda run: run.metrics[metric])
    assert len(ranked) > 1
    assert ranked[0].metrics[metric] < ranked[-1].metrics[metric]
    assert search.metrics[metric] == ranked[-1].metrics[metric]
    (line,) = [line for line in laboratory.last.output.splitlines() if line.startswith("kvlab run ")]
    values = dict(setting.split("=", 1) for setting in shlex.split(line)[2:])
    chosen = {key: value for key, value in values.items() if key.startswith(("scheduler.max_", "kv.block"))}
    assert chosen.items() <= ranked[-1].params.items()
    assert not chosen.items() <= ranked[0].params.items()


@then(parsers.parse('it leaves the files "{names}"'))
def search_files(laboratory: Commands, names: str) -> None:
    (folder,) = (laboratory.base / "tune").glob("*/search")
    assert {file.name for file in folder.iterdir()} == set(names.split())
