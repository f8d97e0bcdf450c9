"""docs/metrics.md and the code say the same: every metric of a run is on the page, and nothing else is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import kvlab.cli.run
from kvlab.lab import execute as execution
from kvlab.lab.drive import RunLog
from kvlab.lab.profile import Part
from kvlab.lab.recording import _series
from kvlab.lab.roofline import MachineRates
from tests.lab.small_runs import run_small

PAGE = (Path(kvlab.cli.run.ROOT) / "docs" / "metrics.md").read_text()
SUFFIXES = ("mean", "p50", "p90", "p99")


def rows() -> list[tuple[list[str], str, str]]:
    """Names, unit and formula of each row of the table."""
    lines = [line for line in PAGE.splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [(expand(re.findall(r"`([^`]+)`", first)), unit, formula) for first, unit, formula in cells]


def expand(written: list[str]) -> list[str]:
    """`x_p50`, `_p99` are x_p50 and x_p99; `x_*` stands for a distribution, `<part>` for the parts of a step."""
    names: list[str] = []
    for name in written:
        if name.startswith("_"):
            name = names[-1].rpartition("_")[0] + name
        if name.endswith("_*"):
            names += [f"{name[:-1]}{suffix}" for suffix in SUFFIXES]
        elif "<part>" in name:
            names += [name.replace("<part>", part) for part in Part]
        else:
            names.append(name)
    return names


@pytest.fixture(scope="module")
def metrics(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """Those of a real run that uses all that measures something: int8, a profile, preemption, a known roofline."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(execution, "known_rates", lambda dtype: MachineRates(1e10, 1e11))
        result = run_small(
            tmp_path_factory.mktemp("run"), "kv.dtype=int8", "debug=profile", "workload.num_requests=6"
        )
    assert result.status == "finished"
    return result.metrics


def test_every_metric_of_a_run_is_on_the_page_and_the_other_way_round(metrics: dict[str, float]) -> None:
    documented = [name for names, _, _ in rows() for name in names]
    assert len(documented) == len(set(documented)), "a metric stands in the table twice"
    assert sorted(metrics) == sorted(documented)


def test_every_row_has_a_unit_and_a_formula() -> None:
    assert all(names and unit and formula for names, unit, formula in rows())


def test_formulas_of_metrics_give_the_metrics(metrics: dict[str, float]) -> None:
    """Those that are written with metrics and arithmetic alone are computed here, as they stand on the page."""
    computed = []
    for names, _, formula in rows():
        terms = re.findall(r"`([^`]+)`", formula)
        arithmetic = re.sub(r"`[^`]+`", "1", formula)
        if not terms or not set(terms) <= set(metrics) or not re.fullmatch(r"[\d\s+*/()-]+", arithmetic):
            continue
        value = re.sub(r"`([^`]+)`", lambda match: repr(metrics[match[1]]), formula)
        assert metrics[names[0]] == pytest.approx(eval(value)), names
        computed += names
    assert {"throughput/output_tokens_per_s", "throughput/total_tokens_per_s", "kv/blocks_freed_per_s"} <= {
        *computed
    }


def test_every_series_is_on_the_page_and_the_other_way_round() -> None:
    sentence = re.search(r"The series (`series/.*?)\nfollow the steps", PAGE, re.DOTALL)
    assert sentence is not None
    documented = [name.removeprefix("series/") for name in re.findall(r"`([^`]+)`", sentence[1])]
    assert sorted(documented) == sorted(_series(RunLog()))
