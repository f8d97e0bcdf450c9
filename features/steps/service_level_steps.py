"""Steps about service levels: the real command, its figures compared with its requests."""

from __future__ import annotations

import pytest
from pytest_bdd import parsers, then, when

from features.steps.run_steps import Runner
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
