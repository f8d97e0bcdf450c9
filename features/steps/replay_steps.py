"""Steps about replays: the command line in this process."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from pytest_bdd import given, parsers, then, when

from kvlab.cli import replay
from tests.support.commands import Command, call


class Replays:
    """Runs the command with a picture of its own; remembers the arguments of the last one."""

    def __init__(self, directory: Path) -> None:
        self.figure = directory / "curves.png"
        self.arguments: list[str] = []

    def __call__(self, *arguments: str) -> Command:
        self.arguments = [f"figure={self.figure}", *arguments]
        return call(replay.main, *self.arguments)

    def figures(self) -> dict[str, Any]:
        """Of the last command, every figure."""
        output = call(replay.main, *self.arguments, "--json").output
        found: dict[str, Any] = json.loads(output[output.index("{") : output.rindex("}") + 1])
        return found


@pytest.fixture
def replays(tmp_path: Path) -> Replays:
    return Replays(tmp_path)


@given(
    parsers.parse("a file of JSON lines with {count:d} requests that repeat {kinds:d} prompts of 16 tokens"),
    target_fixture="trace",
)
def trace(tmp_path: Path, count: int, kinds: int) -> Path:
    rows = ({"prompt_token_ids": [number % kinds] * 16, "max_tokens": 4} for number in range(count))
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


@when(parsers.parse('I replay "{text}"'))
def replay_it(replays: Replays, commands: list[Command], text: str) -> None:
    commands.append(replays(*text.split()))


@when(parsers.parse('I replay that file with "{text}"'))
def replay_file(replays: Replays, commands: list[Command], trace: Path, text: str) -> None:
    commands.append(replays("workload=jsonl", f"workload.path={trace}", *text.split()))


@then(parsers.parse("the hit rates of {names} are in the table, at {count:d} pool sizes"))
def hit_rates(replays: Replays, commands: list[Command], names: str, count: int) -> None:
    found = replays.figures()
    assert [*found["hit_rates"]] == re.split(r", | and ", names)
    assert len(found["num_blocks"]) == count
    for index, size in enumerate(found["num_blocks"]):
        rates = [f"{100 * rates[index]:.1f}" for rates in found["hit_rates"].values()]
        (line,) = re.findall(rf"^ *{size:,} (.*)$", commands[-1].output, re.MULTILINE)
        assert [cell.strip() for cell in line.split("│")][1:-1] == rates


@then(parsers.parse("{first:d} blocks are new, and {again:d} need a pool of {size:d} blocks"))
def reuse_is(replays: Replays, first: int, again: int, size: int) -> None:
    found = replays.figures()["reuse"]
    classes = zip(found["edges"], found["edges"][1:], found["blocks"], strict=False)
    assert found["first"] == first
    assert [(start <= size < end, blocks) for start, end, blocks in classes if blocks] == [(True, again)]


@then("belady finds at least what each policy finds, and at most the ceiling")
def belady_is_best(replays: Replays) -> None:
    found = replays.figures()
    for rates in zip(*found["hit_rates"].values(), strict=True):
        assert max(rates) == rates[-1] <= found["ceiling"]


@then("in the largest pool all find as much as in one that is never full")
def all_in_the_largest(replays: Replays) -> None:
    found = replays.figures()
    assert {rates[-1] for rates in found["hit_rates"].values()} == {found["ceiling"]}


@then("a picture of them was written")
def picture(replays: Replays, commands: list[Command]) -> None:
    assert replays.figure.read_bytes().startswith(b"\x89PNG")
    assert replays.figure.name in commands[-1].output.replace("\n", "")


@then(
    parsers.parse(
        "{name} finds {percent:d} % of the prompt tokens and belady {best:d} %, of {ceiling:d} % in a pool "
        "that is never full"
    )
)
def finds(replays: Replays, name: str, percent: int, best: int, ceiling: int) -> None:
    found = replays.figures()
    rates = [found["hit_rates"][name][0], found["hit_rates"]["belady"][0], found["ceiling"]]
    assert [round(100 * rate) for rate in rates] == [percent, best, ceiling]
