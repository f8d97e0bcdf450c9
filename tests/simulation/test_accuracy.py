"""What a simulated run says of how sure it is: the errors of the published comparison."""

from __future__ import annotations

import csv

import numpy as np
import pytest

from experiments.simulated_vs_silicon.campaigns import CAMPAIGNS
from experiments.simulated_vs_silicon.run import RESULTS
from kvlab.simulation.accuracy import MEASURED, Errors, how_sure

BACKENDS = {campaign.name: (campaign.backend, campaign.system) for campaign in CAMPAIGNS}


def errors_of(framework: str, figure: str) -> list[tuple[str, float]]:
    """Device and error of each row."""
    with RESULTS.open(newline="") as file:
        return [
            (system, abs(float(row[f"simulated_{figure}_ms"]) / float(row[f"measured_{figure}_ms"]) - 1))
            for row in csv.DictReader(file)
            for backend, system in [BACKENDS[row["campaign"]]]
            if backend == framework
        ]


@pytest.mark.parametrize("framework", MEASURED)
@pytest.mark.parametrize("figure", ["tpot", "ttft"])
def test_the_table_is_that_of_the_comparison(framework: str, figure: str) -> None:
    rows, held = errors_of(framework, figure), MEASURED[framework]
    errors: Errors = getattr(held, figure)
    devices = sorted({device for device, _ in rows})
    assert (held.rows, list(held.devices)) == (len(rows), devices)
    assert np.quantile([error for _, error in rows], (0.5, 0.9)) == pytest.approx(errors[:2], abs=5e-4)
    if len(devices) == 1:
        assert errors.left_out is None
        return
    bounds = {left: np.quantile([error for device, error in rows if device != left], 0.9) for left in devices}
    assert np.mean([error <= bounds[device] for device, error in rows]) == pytest.approx(errors.left_out, abs=5e-4)


def test_devices_that_were_measured_and_not() -> None:
    here = "nine of ten of 119 measured vllm deployments had tpot within 22 % (half of them 4) and ttft within 34 %"
    assert (how_sure("vllm", "h100_sxm") or "").startswith(here)
    assert (how_sure("vllm", "l40s") or "").endswith(
        "none is on l40s, and of a device left out 85 % and 92 % were as near"
    )
    assert (how_sure("trtllm", "l40s") or "").endswith("they are all on h100_sxm, and none on l40s")
    assert how_sure("mine", "l40s") is None
