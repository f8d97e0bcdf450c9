"""A run as a benchmark report of llm-d: its figures are those of the run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import kvlab.cli.export
import kvlab.cli.import_
import kvlab.cli.run
from kvlab.lab.results.llm_d import VERSION
from tests.support.commands import TINY, Command, call


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Command:
    folder = tmp_path_factory.mktemp("run") / "out"
    simulated = ("executor=simulated", "hardware=h100_sxm", "executor.timing=roofline", "tracking=off")
    arrivals = ("workload.arrival=poisson", "workload.rate=20")
    command = call(kvlab.cli.run.main, *TINY, *simulated, *arrivals, f"hydra.run.dir={folder}")
    return Command(command.code, command.output, folder)


def exported(run: Command, to: Path) -> dict[str, Any]:
    command = call(kvlab.cli.export.main, str(run.directory), f"to={to}")
    assert command.code == 0, command.output
    found: dict[str, Any] = yaml.safe_load(to.read_text())
    return found


def leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for each in value.values() for leaf in leaves(each)]
    return [leaf for each in value for leaf in leaves(each)] if isinstance(value, list) else [value]


def test_its_figures_are_those_of_the_run(run: Command, tmp_path: Path) -> None:
    found, rows = exported(run, tmp_path / "report.yaml"), run.rows("requests.parquet")
    assert found["version"] == VERSION == "0.2"
    aggregate = found["results"]["request_performance"]["aggregate"]
    assert aggregate["requests"]["total"] == len(rows) == 3
    assert aggregate["requests"]["failures"] == 0
    for name, column, units in (
        ("time_to_first_token", "ttft_ms", "ms"),
        ("time_per_output_token", "tpot_ms", "ms/token"),
        ("request_latency", "e2el_ms", "ms"),
    ):
        values = [row[column] for row in rows]
        said = aggregate["latency"][name]
        assert said["units"] == units
        assert said["mean"] == pytest.approx(np.mean(values))
        assert said["p99"] == pytest.approx(np.percentile(values, 99))
        assert (said["min"], said["max"]) == (min(values), max(values))
    seconds = max(row["end_s"] for row in rows) - min(row["arrival_s"] for row in rows)
    tokens = sum(len(row["output_token_ids"]) for row in rows)
    assert aggregate["throughput"]["output_token_rate"]["mean"] == pytest.approx(tokens / seconds)


def test_requests_that_were_refused_failed(run: Command, tmp_path: Path) -> None:
    """They leave no records."""
    copied = tmp_path / "run"
    shutil.copytree(run.directory, copied)
    summary = json.loads((copied / "summary.json").read_text())
    summary["metrics"]["requests/refused"] = 2.0
    (copied / "summary.json").write_text(json.dumps(summary))
    found = exported(Command(0, "", copied), tmp_path / "report.yaml")
    requests = found["results"]["request_performance"]["aggregate"]["requests"]
    assert (requests["total"], requests["failures"]) == (5, 2)
    imported = call(kvlab.cli.import_.main, str(copied), f"to={tmp_path / 'trace.jsonl'}")
    assert "3 requests" in imported.output
    assert (
        "2 more were refused, or not sent behind one that failed, so that this load is lighter than it was"
        in imported.output
    )


def test_it_says_what_was_run(run: Command, tmp_path: Path) -> None:
    found = exported(run, tmp_path / "report.yaml")
    (component,) = found["scenario"]["stack"]
    assert component["standardized"]["tool"] == "kvlab"
    assert component["native"]["config"]["executor.kind"] == "simulated"
    assert found["run"]["keywords"] == ["simulated"]
    assert found["scenario"]["load"]["standardized"]["rate_qps"] == 20
    assert None not in leaves(found)  # the schema has fields absent, not null


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "run=nowhere: is no output directory"),
        (["a", "b"], "name one run"),
        (["too=a.yaml"], "did you mean to?"),
    ],
)
def test_what_is_no_run_is_refused(arguments: list[str], message: str) -> None:
    command = call(kvlab.cli.export.main, *arguments)
    assert command.code == 2
    assert message in command.output


def test_a_run_without_a_completed_request_is_refused(run: Command, tmp_path: Path) -> None:
    for file in run.directory.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    command = call(kvlab.cli.export.main, str(tmp_path), f"to={tmp_path / 'report.yaml'}")
    assert command.code == 2
    assert "no request completed, so that there is nothing to export" in command.output
