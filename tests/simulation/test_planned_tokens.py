"""The planned pool of a simulated SGLang beside those that started servers reported."""

from __future__ import annotations

from itertools import chain

import pytest

from experiments.planner_vs_sglang.run import Case, cases
from kvlab.simulation.accuracy import PLANNED_SGLANG
from tests.support.plans import composed


def test_as_many_tokens_as_sglang_reported() -> None:
    every = list(cases())
    assert len(every) == 14
    assert {case: case.ratio for case in every} == {case: pytest.approx(1, abs=_bound(case)) for case in every}
    judging = sorted(round(case.ratio, 3) for case in every if case.number % 2 == 0)
    assert sorted(chain.from_iterable(PLANNED_SGLANG.values())) == judging


@pytest.mark.parametrize(
    ("version", "mib"),
    [
        ("0.5.13", 0),
        ("0.5.14", 8 * 46),  # for 46 graphs of prompts
        ("0.5.15", 8 * 46 + 2 * 32),  # and 32 sequences
        ("0.5.23", 8 * 46 + 2 * 32),
    ],
)
def test_sglang_keeps_nothing_for_graphs_that_are_off(version: str, mib: float) -> None:
    """On an L40S, with steps of 4,096 tokens."""
    settings = ("executor=simulated", "framework=sglang", f"framework.version={version}", "hardware=l40s")
    shares = [
        composed(*settings, f"framework.cuda_graphs={graphs}").executor.memory_utilization
        for graphs in ("true", "false")
    ]
    assert shares[1] - shares[0] == pytest.approx(mib / (45 * 1_024), abs=0.0011)


def _bound(case: Case) -> float:
    if "Windows" in case.card:
        return 0.16  # whose desktop has memory, too
    return 0.08 if case.card.startswith("4 x") and case.published < 100_000 else 0.02
