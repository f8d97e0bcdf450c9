"""The tables of the comparisons with other engines."""

from __future__ import annotations

from pathlib import Path

from experiments.engine_comparison import turns
from experiments.engine_comparison.run import RATE, table
from experiments.prefix_cache_comparison.run import row
from kvlab.lab.results.records import RunRecord


def run(engine: str, repeat: int, rate: float, status: str = "finished") -> RunRecord:
    choices = {"engine": engine, "workload": "burst16", "model": "m"}
    return RunRecord("", None, status, None, {"repeat": repeat}, choices, {RATE: rate}, {}, Path())


def test_ratios_are_those_of_each_round() -> None:
    runs = [run("kvlab", 0, 100), run("vllm", 0, 50), run("kvlab", 1, 90), run("vllm", 1, 30)]
    runs += [run("kvlab", 2, 80), run("vllm", 2, 1, "failed")]
    assert table(runs).splitlines()[2:] == [
        "| m | burst16 | kvlab | 90.0 | 100.0, 90.0, 80.0 |  |",
        "| m | burst16 | vllm | 40.0 | 50.0, 30.0 | 2.50 times (2.00 to 3.00) |",
    ]


def test_requests_with_other_hits_are_counted() -> None:
    ours = {"a": (100, 32), "b": (100, 64)}
    assert row("x", ours, {"a": (100, 32), "b": (100, 32)}) == "| x | 2 | 1 | 200 | 96 / 64 | 48.0 % / 32.0 % |"


def test_turns_are_compared_with_the_side_of_the_same_bits() -> None:
    found = {
        "kvlab": [turns.Turn(8, 10), turns.Turn(8, 12)],
        "kvlab int8": [turns.Turn(30, 40), turns.Turn(30, 40)],
        "llama.cpp BF16": [turns.Turn(4, 5), turns.Turn(2, 4)],
        "llama.cpp Q8_0": [turns.Turn(10, 20), turns.Turn(10, 20)],
    }
    assert turns.table({"one stream": found}).splitlines()[2:] == [
        "| one stream | kvlab | 8.0 | 11.0 |  |  |",
        "| one stream | kvlab int8 | 30.0 | 40.0 |  |  |",
        "| one stream | llama.cpp BF16 | 3.0 | 4.5 | 3.00 (2.00 to 4.00) | 2.50 (2.00 to 3.00) |",
        "| one stream | llama.cpp Q8_0 | 10.0 | 20.0 | 3.00 (3.00 to 3.00) | 2.00 (2.00 to 2.00) |",
    ]
