"""Steps about explained runs: the command line in this process."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pytest_bdd import given, parsers, then, when

from features.steps.run_steps import Runner
from kvlab.cli import explain
from kvlab.workloads.trace_format import Header, TracedRequest, write_trace
from tests.support.commands import Command, call


@given(parsers.parse('a run of "{text}"'), target_fixture="explained_run")
def run_of(lab: Runner, text: str) -> Command:
    command = lab.run(text)
    assert command.code == 0, command.output
    return command


@given("a request of it ended at another time", target_fixture="explained_run")
def changed_run(lab: Runner, explained_run: Command, tmp_path: Path) -> Command:
    rows = explained_run.rows("requests.parquet")
    rows[1]["end_s"] += 1.0
    for file in explained_run.directory.glob("*.*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "requests.parquet")
    return Command(0, "", tmp_path)


@given(parsers.re(r"a trace of (?P<count>\d+) requests that (?P<whom>a server recorded|nobody timed)"))
def recorded_trace(tmp_path: Path, count: str, whom: str) -> None:
    """Prompts that begin with the same block, a second apart; each took 10 ms more than the one before."""
    requests = [
        TracedRequest(
            100,
            float(number),
            20,
            [1, *range(100 * number, 100 * number + 6)],
            "length",
            cached_tokens=16 * (number > 0),
        )
        for number in range(int(count))
    ]
    for number, request in enumerate(requests if whom == "a server recorded" else ()):
        request.ttft_ms, request.e2el_ms = 40.0 + number, 300.0 + 10 * number
    write_trace(tmp_path / "trace.jsonl", Header(source="record"), requests)


@when(parsers.re('I explain the trace with "(?P<text>[^"]*)"(?P<drawn> and a picture)?$'))
def explain_trace(commands: list[Command], tmp_path: Path, text: str, drawn: str | None) -> None:
    named = [f"{tmp_path}/trace.jsonl", *text.split()]  # a file is a trace
    commands.append(call(explain.main, f"figure={f'{tmp_path}/explained.png' if drawn else 'null'}", *named))
    if commands[-1].code == 0:
        commands[-1].output += call(explain.main, "figure=null", "trace=" + named[0], *named[1:], "--json").output


@then(parsers.parse("{count:d} requests of the trace are named, and the terms of each sum to what was recorded"))
def trace_terms_sum(commands: list[Command], tmp_path: Path, count: int) -> None:
    output = commands[-1].output
    assert len(re.findall(r"^(r\d+) +│ +[\d,]+ │", output, re.MULTILINE)) == count
    figures = json.loads(output[output.index("{") : output.rindex("}") + 1])
    for found in figures["requests"]:
        recorded = 300.0 + 10 * int(found["request_id"][1:])
        assert found["e2el_ms"] == recorded
        assert sum(found["terms_ms"].values()) == pytest.approx(recorded, abs=1e-9)
        assert found["terms_ms"]["unexplained"] > 0
    assert (tmp_path / "explained.png").stat().st_size > 5000


@when(parsers.re('I explain it with "(?P<text>[^"]*)"(?P<drawn> and a picture)?$'))
def explain_it(
    commands: list[Command], explained_run: Command, tmp_path: Path, text: str, drawn: str | None
) -> None:
    figure = f"figure={f'{tmp_path}/explained.png' if drawn else 'null'}"  # which takes half a second
    commands.append(call(explain.main, f"run={explained_run.directory}", figure, *text.split()))


@cache
def figures_of(directory: Path, text: str) -> dict[str, Any]:
    output = call(explain.main, f"run={directory}", "--json", "figure=null", *text.split()).output
    found: dict[str, Any] = json.loads(output[output.index("{") : output.rindex("}") + 1])
    return found


@then(parsers.parse("{count:d} requests are named as the slowest, and a picture of the first was drawn"))
def slowest_are_named(commands: list[Command], explained_run: Command, tmp_path: Path, count: int) -> None:
    rows = sorted(explained_run.rows("requests.parquet"), key=lambda row: -row["e2el_ms"])
    named = re.findall(r"^(r\d+) +│ +[\d,]+ │", commands[-1].output, re.MULTILINE)
    assert len(named) == count
    assert named[0] == rows[0]["request_id"]
    assert (tmp_path / "explained.png").stat().st_size > 5000


@then(parsers.parse("the terms of {name} sum to its time in the run, and those to its first token to that"))
def terms_sum(commands: list[Command], explained_run: Command, tmp_path: Path, name: str) -> None:
    row = next(row for row in explained_run.rows("requests.parquet") if row["request_id"] == name)
    (found, *_) = figures_of(explained_run.directory, f"request={name} changes=false")["requests"]
    assert sum(found["terms_ms"].values()) == pytest.approx(row["e2el_ms"], abs=1e-6)
    assert f"first token after {row['ttft_ms']:,.1f} ms" in commands[-1].output


@then("what became of its prompt's tokens sums to its length")
def prompt_sums(explained_run: Command, tmp_path: Path) -> None:
    row = next(row for row in explained_run.rows("requests.parquet") if row["request_id"] == "r3")
    (found, *_) = figures_of(explained_run.directory, "request=r3 changes=false")["requests"]
    assert sum(found["prompt_tokens"].values()) == row["prompt_tokens"]
    assert found["prompt_tokens"].get("found", 0) == row["cached_tokens"]


@then(parsers.parse("its metrics of computed prompt tokens are those that explaining it gives, {some} among them"))
def counted_as_explained(explained_run: Command, tmp_path: Path, some: str) -> None:
    metrics = explained_run.summary["metrics"]
    counted = {"found": metrics["kv/prefix_hit_tokens"]} | {
        name.removeprefix("prompt/").removesuffix("_tokens"): value
        for name, value in metrics.items()
        if name.startswith("prompt/")
    }
    explained = figures_of(explained_run.directory, "")["prompt_tokens"]
    assert {name: value for name, value in counted.items() if value} == explained
    assert explained[some]


@then(parsers.parse('"{change}" is simulated, unless that is too far off'))
def simulated_unless_far_off(commands: list[Command], change: str) -> None:
    """How near it comes depends on what else the machine does: tests/lab/test_explain.py holds both cases."""
    output = " ".join(commands[-1].output.split())
    assert (change in output) != ("which is too far off" in output)


@then(parsers.parse('with it {name} took what it takes in a run with "{setting}"'))
def change_is_a_run(lab: Runner, explained_run: Command, tmp_path: Path, name: str, setting: str) -> None:
    changes = figures_of(explained_run.directory, f"request={name}")["changes"]
    (change,) = [each for each in changes if each["settings"] == setting]
    config = explained_run.summary["config"]
    again = lab.run(
        f"executor=simulated hardware=h100_sxm executor.timing=roofline {setting} "
        f"model.max_seq_len={config['model.max_seq_len']} workload.num_requests=9 workload.arrival=burst"
    )
    row = next(row for row in again.rows("requests.parquet") if row["request_id"] == name)
    assert change["asked_ms"] == pytest.approx(row["e2el_ms"], abs=1e-9)
