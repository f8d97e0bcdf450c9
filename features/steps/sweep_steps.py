"""Steps about sweeps and searches: the real commands in this process, which has their imports behind it."""

from __future__ import annotations

import json
import re
import shlex
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow.entities import Run
from mlflow.tracking import MlflowClient
from pytest_bdd import given, parsers, then, when

from kvlab.cli import tune
from kvlab.cli.compose import compose_run
from kvlab.config import parse_bytes
from kvlab.lab.campaigns.sweep.plan import read_plan
from kvlab.lab.campaigns.tune.space import check_fits
from kvlab.lab.results.roofline import MachineRates
from tests.support.commands import TINY, Command, Lab, call


class Commands:
    """Runs sweeps, against a store of its own if they are `tracked`; remembers how the latest command ended."""

    def __init__(self, base: Path, *, tracked: bool) -> None:
        self.lab = Lab.with_store(base)
        self.tracking = [f"tracking.uri={self.lab.uri}"] if tracked else ["tracking=off"]
        self.base, self.uri = self.lab.base, self.lab.uri
        self.last = Command(0, "")
        self.count = 0

    def sweep(self, text: str) -> None:
        self.count += 1
        words = [*self.tracking, *shlex.split(text)]
        self.last = self.lab.here("-m", *words, directory=f"sweep{self.count}")

    @property
    def directory(self) -> Path:
        return self.base / f"sweep{self.count}"


@given("a laboratory with a store of its own", target_fixture="laboratory")
def laboratory(tmp_path: Path, request: pytest.FixtureRequest) -> Commands:
    return Commands(tmp_path, tracked="tracked_runs" in request.fixturenames)


@given(parsers.parse('a sweep over "{text}" that was interrupted behind its first point'))
def interrupted(laboratory: Commands, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By Ctrl-C, as the second point begins to serve its requests."""
    from kvlab.lab.run import serve
    from kvlab.lab.run.drive import drive as original

    runs = iter(range(10))

    def drive(*args: Any, **kwargs: Any) -> Any:
        if next(runs) == 1:
            signal.raise_signal(signal.SIGINT)
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(serve, "drive", drive)
        laboratory.sweep(text)
    assert laboratory.last.code == 130, laboratory.last.output
    assert "3 runs: 1 finished, 2 interrupted or not run" in laboratory.last.output


@when(parsers.parse('I sweep in the laboratory "{text}"'))
def sweep_in(laboratory: Commands, text: str) -> None:
    laboratory.sweep(text)


@given(parsers.parse("a machine whose measured rate is {rate:g} numbers multiplied a second"))
def measured_rate(rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvlab.lab.machine_rates.rates_here", lambda *_: MachineRates(rate, rate, rate))
    monkeypatch.setattr("kvlab.lab.run.estimate._WORTH_MEASURING", 0)


@when(parsers.parse('I compare slots and pages there with short requests, and "{asked}"'))
def compare_there(laboratory: Commands, asked: str) -> None:
    own_count = [text for text in TINY if not text.startswith("workload.num_requests")]
    laboratory.lab = Lab(laboratory.base, own_count, laboratory.uri)
    laboratory.sweep(f"experiment=contiguous_vs_paged kv.memory=4MiB workload.system_len=16 {asked}")


@then(parsers.parse("each of its {runs:d} runs served {count:d} requests"))
def each_served(laboratory: Commands, runs: int, count: int) -> None:
    summaries = [json.loads(file.read_text()) for file in laboratory.directory.glob("*/summary.json")]
    assert [summary["metrics"]["requests/completed"] for summary in summaries] == [count] * runs


@then(parsers.parse('it says of fewer requests "{line}"'))
def says_of_fewer(laboratory: Commands, line: str) -> None:
    said = [text for text in laboratory.last.output.splitlines() if " in place of " in text]
    expected = re.escape(line).replace(re.escape("..."), r"[\d.]+ \w+")
    assert said == [] if line == "nothing" else re.fullmatch(expected, said[0])


@when(parsers.parse('I tune in the laboratory "{text}"'))
def tune_in(laboratory: Commands, text: str) -> None:
    where = [f"output={laboratory.base / 'tune'}", *laboratory.tracking]
    laboratory.last = call(tune.main, *TINY, *shlex.split(text), *where)


@then(parsers.parse("it ends with status {code:d}"))
def status(laboratory: Commands, code: int) -> None:
    assert laboratory.last.code == code, laboratory.last.output
    assert "Traceback" not in laboratory.last.output


@then(parsers.parse('it says "{text}"'))
def sweep_says(laboratory: Commands, text: str) -> None:
    assert text in laboratory.last.output, laboratory.last.output


@then(
    parsers.parse(
        "the store holds one sweep with {done:d} finished runs, each of another configuration, and {killed:d} "
        "marked as interrupted"
    )
)
def one_sweep(laboratory: Commands, done: int, killed: int) -> None:
    (parent,) = laboratory.lab.parents()
    children = laboratory.lab.children()
    assert {run.tags["mlflow.parentRunId"] for run in children} == {parent.run_id}
    assert Counter(run.state for run in children) == {"FINISHED": done, "KILLED": killed}
    assert len({run.tags["kvlab.config_digest"] for run in children if run.finished}) == done
    assert parent.state == "FINISHED"


def _plan_rows(directory: Path) -> Iterator[tuple[str, str]]:
    plan = read_plan(directory)
    assert plan is not None
    return ((point.group, str(point.repeat)) for point in plan.jobs)


@then("in the same bytes its points had")
def points_had(laboratory: Commands, datatable: list[list[str]]) -> None:
    found, sizes = [], set()
    for file in sorted(laboratory.directory.glob("*/summary.json")):
        summary = json.loads(file.read_text())
        metrics = summary["metrics"]
        sizes.add(metrics["capacity/kv_bytes"])
        figures = metrics["capacity/peak_running"], metrics["kv/prefix_hit_tokens"]
        found.append([summary["choices"]["kv"], *(f"{figure:.0f}" for figure in figures)])
    assert found == datatable[1:]
    assert len(sizes) == 1


@then("it names the figures of the comparison")
def names_figures(laboratory: Commands) -> None:
    named = [Path(word) for word in laboratory.last.output.split() if word.endswith(".png")]
    assert named
    assert all(path.is_file() for path in named)


@then("its jobs were")
def jobs(laboratory: Commands, datatable: list[list[str]]) -> None:
    assert [list(row) for row in _plan_rows(laboratory.directory)] == datatable[1:]


@then("the repeats of a point are tagged, and had the same requests")
def tagged(laboratory: Commands) -> None:
    runs = laboratory.lab.children()
    points: dict[str, set[str]] = {}
    for run in runs:
        points.setdefault(run.params["kv.num_blocks"], set()).add(run.tags["kvlab.repeat"])
    assert set(map(frozenset, points.values())) == {frozenset({"0", "1"})}
    summaries = [json.loads(file.read_text()) for file in laboratory.directory.glob("*/summary.json")]
    assert len({summary["workload_digest"] for summary in summaries}) == 1


@then(parsers.parse('it ends with a command line whose run fits in "{memory}"'))
def fits_in(laboratory: Commands, memory: str) -> None:
    (command,) = [line for line in laboratory.last.output.splitlines() if line.startswith("kvlab run ")]
    config = compose_run(shlex.split(command)[2:]).config
    assert config.kv.num_blocks is not None
    check_fits(config, parse_bytes(memory, key="memory"))


@then("it drew what it tried")
def drew(laboratory: Commands) -> None:
    (folder,) = (laboratory.base / "tune").glob("*/search")
    assert (folder / "tune.png").read_bytes().startswith(b"\x89PNG")
    assert "Trial by trial" in (folder / "tune.html").read_text()


@pytest.fixture
def children(commands: list[Command]) -> list[Run]:
    """The runs that are points of the latest sweep."""
    client = MlflowClient(commands[-1].uri)
    summaries = [json.loads(file.read_text()) for file in commands[-1].directory.glob("*/summary.json")]
    return [client.get_run(summary["run_id"]) for summary in summaries]


@then(parsers.parse("the tracking store holds one parent with {count:d} children"))
def one_parent(commands: list[Command], children: list[Run], count: int) -> None:
    assert len(children) == count, commands[-1].output
    parents = {child.data.tags["mlflow.parentRunId"] for child in children}
    assert len(parents) == 1
    parent = MlflowClient(commands[-1].uri).get_run(parents.pop())
    assert "mlflow.parentRunId" not in parent.data.tags
    assert parent.info.status == "FINISHED"


@then(parsers.parse('each child has its own "{first}" and "{second}" among its parameters'))
def own_parameters(children: list[Run], first: str, second: str) -> None:
    points = {(child.data.params[first], child.data.params[second]) for child in children}
    assert len(points) == len(children)
    assert all(child.data.params["model.name"] == "qwen3_tiny" for child in children)


@then(parsers.parse('the points with {blocks:d} blocks, too few for a request, are recorded as "{status}"'))
def small_points(children: list[Run], blocks: int, status: str) -> None:
    small = [child for child in children if child.data.params["kv.num_blocks"] == str(blocks)]
    assert small
    assert {child.data.tags["kvlab.status"] for child in small} == {status}
    assert all("kv.num_blocks=3" in child.data.tags["kvlab.error"] for child in small)


@then(parsers.parse('the other points are recorded as "{status}"'))
def other_points(children: list[Run], status: str) -> None:
    others = [child for child in children if child.data.tags["kvlab.status"] != "out_of_memory"]
    assert len(others) == 4
    assert {child.data.tags["kvlab.status"] for child in others} == {status}


@then("both runs had the same prompts and produced the same tokens")
def same_tokens(commands: list[Command]) -> None:
    first, second = (command.rows("requests.parquet") for command in commands)
    assert commands[0].directory != commands[1].directory
    assert [row["output_token_ids"] for row in first] == [row["output_token_ids"] for row in second]
    assert commands[0].summary["workload_digest"] == commands[1].summary["workload_digest"]


@then("the second took fewer steps, and accepted some proposed tokens and not all")
def fewer_steps(commands: list[Command]) -> None:
    first, second = (command.summary["metrics"] for command in commands[-2:])
    assert second["engine/steps"] < first["engine/steps"]
    assert 0 < second["speculation/accepted_tokens"] < second["speculation/proposed_tokens"]


@then("the runs had different prompts")
def different_prompts(commands: list[Command]) -> None:
    assert commands[0].summary["workload_digest"] != commands[1].summary["workload_digest"]
