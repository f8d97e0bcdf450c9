"""What a simulated run says of how sure it is: the errors of the published comparison."""

from __future__ import annotations

import csv

import pytest

from experiments.simulated_vs_silicon.calibration import LEFT_OUT, intervals
from experiments.simulated_vs_silicon.results import RESULTS
from kvlab.simulation import accuracy
from kvlab.simulation.accuracy import FEWEST, FIGURES, Case, HeldOut, held_out, how_sure, interval, sentence

HERE = Case("vllm", "h200_sxm", "llama3_1_70b", False, 4, 1024, 1024, 16)


def test_the_errors_are_those_of_the_comparison() -> None:
    with RESULTS.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for figure in FIGURES:
        found = {
            round(float(row[f"measured_{figure}_ms"]) / float(row[f"simulated_{figure}_ms"]) - 1, 3) for row in rows
        }
        assert {getattr(row, figure) for row in held_out()} <= found
    assert len(held_out()) < len(rows)


@pytest.mark.parametrize("figure", FIGURES)
@pytest.mark.parametrize("left", LEFT_OUT)
def test_intervals_hold_nine_of_ten_that_they_were_not_made_of(figure: str, left: str) -> None:
    held = [is_held for is_held, _ in intervals(held_out(), LEFT_OUT[left], figure)]
    assert 0.85 <= sum(held) / len(held) <= 0.97


def test_the_most_alike_are_asked_and_where_they_are_few_others() -> None:
    def row(case: Case, error: float) -> HeldOut:
        return HeldOut(case, 0, error, error)

    near = [row(HERE, 0.1)] * FEWEST
    far = [row(HERE._replace(device="l40s"), -0.5)] * 4
    found = interval(HERE, "tpot", [*near, *far])
    assert found is not None
    assert (found.low, found.high) == pytest.approx((0.1, 0.1))
    assert found.n == FEWEST
    found = interval(HERE, "tpot", [*near[1:], *far])
    assert found is not None
    assert (found.low < -0.5, found.n) == (True, FEWEST + 3)
    assert interval(HERE._replace(framework="mine"), "tpot", near) is None
    assert interval(HERE._replace(model="mixture", device="l40s", is_sparse=True), "tpot", near) is None


def test_of_many_those_of_a_like_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy, "NEAREST", 2)
    rows = [HeldOut(HERE._replace(concurrency=2.0**at), 0, at / 100, 0.0) for at in range(FEWEST)]
    found = interval(HERE._replace(concurrency=2**15), "tpot", rows)
    assert found is not None
    assert (found.n, round(found.high, 2)) == (2, 0.15)


def test_a_figure_is_told_with_what_it_is_worth() -> None:
    found = interval(HERE, "ttft")
    assert found is not None
    text = sentence({"ttft": 35_400.0}, {"ttft": found})
    assert (
        text
        == f"mean ttft 35.4 s (measured deployments like this: within {100 * found.within:.0f} %, 90 % of them)"
    )


def test_errors_are_never_more_than_all_of_it() -> None:
    errors = (*[-0.7] * 2, *[0.0] * (FEWEST - 4), *[2.0] * 2)
    rows = [HeldOut(HERE._replace(device="l40s"), 0, error, error) for error in errors]
    found = interval(HERE, "tpot", rows)
    assert found is not None
    assert -1 < found.low < -0.7
    assert found.high > 2


def test_one_in_ten_that_came_out_otherwise_decides_no_interval() -> None:
    rows = [HeldOut(HERE, 0, error, error) for error in (*[0.01, 0.02, 0.03] * 12, 1.0, 1.1, 1.5, -0.6)]
    found = interval(HERE, "tpot", rows)
    assert found is not None
    assert (0 <= found.low <= 0.01, found.within < 0.05) == (True, True)


def test_devices_that_were_measured_and_not() -> None:
    assert (how_sure("vllm", "l40s", is_sparse=False) or "").endswith("on l40s, where more is to be expected")
    assert "none is" not in (how_sure("vllm", "h100_sxm", is_sparse=False) or "none is")
    assert how_sure("mine", "l40s", is_sparse=False) is None


def test_an_error_that_is_no_prediction_is_a_factor() -> None:
    assert accuracy.bound(2.0) == "200 %"
    assert accuracy.Interval(-0.5, 2140.36, 40).text().endswith("like this: within a factor of 2,141, 90 % of them")
