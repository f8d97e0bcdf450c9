"""Steps about reports: the real command, in this process, on runs that were made or written for it."""

from __future__ import annotations

import math
import re
import shlex
import statistics
from collections.abc import Sequence
from pathlib import Path

import pytest
from pytest_bdd import given, parsers, then, when

from features.steps.run_steps import Runner
from kvlab.cli import report
from tests.support.commands import Command, call
from tests.support.recorded import record_run, record_sweep

DRIFT = (1.0, 0.97, 0.9, 0.91, 0.85)
SIDES = {"first": {"kv__block_size": 16}, "second": {"kv__block_size": 32}}
CHANCE = (1.002, 0.998, 1.001, 0.997, 1.0)


class Reporter:
    """Runs the command in a folder of its own."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self._monkeypatch = folder, monkeypatch
        self.ratios: list[float] = []  # of the second configuration to the first, repeat by repeat

    def run(self, *arguments: str) -> Command:
        self._monkeypatch.chdir(self.folder)
        output = self.folder / "report"
        ended = call(report.main, *arguments, "figures=false", f"output={output}")
        return Command(ended.code, ended.output, output)


@pytest.fixture
def reporter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reporter:
    return Reporter(tmp_path, monkeypatch)


def record_turns(reporter: Reporter, factor: float, chances: Sequence[float]) -> None:
    second = [1000 * factor * drift * chance for drift, chance in zip(DRIFT, chances, strict=True)]
    record_sweep(reporter.folder / "two", SIDES, {"first": [1000 * drift for drift in DRIFT], "second": second})
    reporter.ratios = [factor * chance for chance in chances]


@given(
    parsers.parse(
        "five repeats of a configuration on a machine that slows down, and of another that makes {factor:g} times "
        "the tokens"
    )
)
def timed_repeats(reporter: Reporter, factor: float) -> None:
    record_turns(reporter, factor, CHANCE)


@given(
    parsers.parse(
        "five repeats of a configuration that vary by {percent:g} %, and of another that makes {factor:g} times "
        "the tokens"
    )
)
def varying_repeats(reporter: Reporter, percent: float, factor: float) -> None:
    record_turns(reporter, factor, [1 + percent / 100 * part for part in (1, -1, 0.5, -0.5, 0)])


@given(parsers.parse("one run of a configuration, and one of another that makes {factor:g} times the tokens"))
def single_runs(reporter: Reporter, factor: float) -> None:
    record_sweep(reporter.folder / "two", SIDES, {"first": [1000.0], "second": [1000 * factor]})


@given("two runs of different requests")
def different_requests(reporter: Reporter) -> None:
    for number in (2, 3):
        facts = {"workload_digest": f"d{number}"}
        record_run(reporter.folder / "two" / str(number), workload__num_requests=number, facts=facts)


@when("I report on the two")
def report_on_two(reporter: Reporter, commands: list[Command]) -> None:
    commands.append(reporter.run(str(reporter.folder / "two")))


@when(parsers.parse('I report on the two with "{setting}"'))
def report_with(reporter: Reporter, commands: list[Command], setting: str) -> None:
    settings = [setting] if setting.startswith("fail_if") else re.split(r" (?=tracking)", setting)
    commands.append(reporter.run(str(reporter.folder / "two"), *settings))


@when("I report on those two")
def report_on_those(reporter: Reporter, commands: list[Command]) -> None:
    commands.append(reporter.run(*(str(command.directory) for command in commands[-2:])))


@when("I report on that sweep")
def report_on_sweep(reporter: Reporter, commands: list[Command]) -> None:
    commands.append(reporter.run(str(commands[-1].directory)))


@when("I report on that sweep by its id in the tracking store")
def report_by_id(reporter: Reporter, commands: list[Command], lab: Runner) -> None:
    swept = commands[-2]
    match = re.search(r"/runs/([0-9a-f]{32})", swept.output)
    assert match, shlex.quote(swept.output)
    commands.append(reporter.run(match[1], f"tracking.uri={lab.lab.uri}"))


@then(parsers.parse('the report says "{text}"'))
def report_says(commands: list[Command], text: str) -> None:
    assert text in commands[-1].output, commands[-1].output


def cells(commands: list[Command], label: str) -> list[str]:
    line = next(row for row in commands[-1].output.splitlines() if row.startswith(f"  {label}"))
    return re.split(r"\s*│\s*", line.strip())


@then(parsers.re(r'the verdict on (?P<label>[\w, ]+) is "(?P<word>\w*)"'))
def verdict_is(commands: list[Command], label: str, word: str) -> None:
    assert cells(commands, label)[-1] == word


@then("the interval of output tokens is Student's for the logarithms of the five ratios")
def interval_is(reporter: Reporter, commands: list[Command]) -> None:
    logs = [math.log(ratio) for ratio in reporter.ratios]
    half = 2.776445 * statistics.stdev(logs) / math.sqrt(5)  # the 97.5 % quantile of t with 4 degrees of freedom
    ends = [100 * math.expm1(statistics.mean(logs) + side * half) for side in (-1, 1)]
    low, high = cells(commands, "output tokens")[-2].removesuffix(" %").replace("\N{MINUS SIGN}", "-").split(" to ")
    assert [float(low), float(high)] == pytest.approx(ends, abs=0.051)


@then("the page and the Markdown of the report have every configuration")
def forms(commands: list[Command]) -> None:
    page, text = ((commands[-1].directory / name).read_text() for name in ("report.html", "report.md"))
    for group in ("kv=contiguous", "kv=paged"):
        assert group in text
        assert f"<summary>{group}</summary>" in page
    assert "kv.block_size" in page
