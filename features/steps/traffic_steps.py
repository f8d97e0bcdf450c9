"""Steps about recorded traffic: a trace in a file, run by the real command."""

from __future__ import annotations

import statistics
from itertools import pairwise
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


@given(parsers.parse("a trace of {count:d} requests, one every {gap:g} s"), target_fixture="trace")
def write_even_trace(tmp_path: Path, count: int, gap: float) -> Path:
    rows = (f"2023-11-16 18:15:{10 + number * gap:09.6f},{20 + number},{1 + number % 3}" for number in range(count))
    return write_trace(tmp_path, "\n".join(("TIMESTAMP,ContextTokens,GeneratedTokens", *rows)))


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


def shapes(command: Command) -> set[tuple[int, int, int]]:
    """Hundredths of a second, prompt and output tokens of what a run served."""
    rows = command.rows("requests.parquet")
    return {(round(100 * row["arrival_s"]), row["prompt_tokens"], len(row["output_token_ids"])) for row in rows}


@then(
    parsers.parse(
        "between {least:d} and {most:d} of its requests were served, each at its time and with its length"
    )
)
def share_is_served(commands: list[Command], least: int, most: int) -> None:
    served = shapes(commands[-1])
    assert least <= len(served) <= most
    assert served <= {(number, 20 + number, 1 + number % 3) for number in range(40)}


@then("those that were served are a part of those before")
def smaller_share(commands: list[Command]) -> None:
    before, after = (
        {row["prompt_tokens"] for row in command.rows("requests.parquet")} for command in commands[-2:]
    )
    assert after < before


@then(parsers.parse("the gaps between its arrivals have a mean of {mean:g} s, and a deviation of {deviation:g} s"))
def gaps(commands: list[Command], mean: float, deviation: float) -> None:
    times = [row["arrival_s"] for row in commands[-1].rows("requests.parquet")]
    found = [after - before for before, after in pairwise(times)]
    assert statistics.mean(found) == pytest.approx(mean, rel=0.15, abs=1e-9)
    assert statistics.pstdev(found) == pytest.approx(deviation, rel=0.15, abs=1e-9)


@then("each request arrived when the one before it had ended")
def arrived_in_turn(commands: list[Command]) -> None:
    rows = commands[-1].rows("requests.parquet")
    assert len(rows) > 1
    assert [row["arrival_s"] for row in rows[1:]] == [row["end_s"] for row in rows[:-1]]


@then("a picture of it is all that the run left, and nothing was tracked")
def only_a_picture(lab: Runner, commands: list[Command]) -> None:
    assert [file.name for file in commands[-1].directory.iterdir()] == ["workload.png"]
    assert all("dry_run" not in run.params or run.params["dry_run"] == "False" for run in lab.lab.runs())
