"""Steps about recorded traffic: a trace in a file, run by the real command."""

from __future__ import annotations

from pathlib import Path

import pytest
from pytest_bdd import given, parsers, then, when

from features.steps.run_steps import Runner
from tests.support.commands import Command


def amounts(text: str) -> list[float]:
    """What a sentence lists."""
    return [float(each) for each in text.split(",")]


@given("a trace", target_fixture="trace")
def write_trace(tmp_path: Path, docstring: str) -> Path:
    path = tmp_path / "trace"
    path.write_text(docstring.strip() + "\n")
    return path


@when(parsers.parse('I run "{text}" on that trace'))
def run_trace(lab: Runner, commands: list[Command], trace: Path, text: str) -> None:
    commands.append(lab.run(f"{text} workload.path={trace}"))


@then(parsers.parse("the requests arrived at {times} s with prompts of {prompts} and outputs of {outputs} tokens"))
def arrived(commands: list[Command], times: str, prompts: str, outputs: str) -> None:
    rows = commands[-1].rows("requests.parquet")
    assert [row["arrival_s"] for row in rows] == pytest.approx(amounts(times), abs=1e-6)
    assert [row["prompt_tokens"] for row in rows] == amounts(prompts)
    assert [len(row["output_token_ids"]) for row in rows] == amounts(outputs)


@then(parsers.parse("the requests found {tokens} tokens of their prompts in the cache"))
def found(commands: list[Command], tokens: str) -> None:
    rows = commands[-1].rows("requests.parquet")
    assert [row["cached_tokens"] for row in rows] == amounts(tokens)


@then("each request arrived when the one before it had ended")
def arrived_in_turn(commands: list[Command]) -> None:
    rows = commands[-1].rows("requests.parquet")
    assert len(rows) > 1
    assert [row["arrival_s"] for row in rows[1:]] == [row["end_s"] for row in rows[:-1]]


@then("a picture of it is all that the run left, and nothing was tracked")
def only_a_picture(lab: Runner, commands: list[Command]) -> None:
    assert [file.name for file in commands[-1].directory.iterdir()] == ["workload.png"]
    assert all("dry_run" not in run.params or run.params["dry_run"] == "False" for run in lab.lab.runs())
