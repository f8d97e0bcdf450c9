"""The published fit predicts the published runs: what the engine decides and the fit times is what was measured."""

from __future__ import annotations

import csv

import pytest

from experiments.simulated_vs_real.run import HERE, LIMITS, PREDICTED, predict


@pytest.mark.parametrize("workload", PREDICTED)
def test_a_fit_to_one_workload_predicts_the_others(workload: str) -> None:
    with (HERE / "measured.csv").open() as file:
        runs = [row for row in csv.DictReader(file) if row["workload"] == workload]
    simulated, remark = predict(workload)
    assert remark is not None  # its steps are larger than those that were fitted
    for metric, limit in LIMITS.items():
        middle = sorted(float(run[metric]) for run in runs)[1]
        assert simulated[metric] == pytest.approx(middle, rel=limit / 100), metric
