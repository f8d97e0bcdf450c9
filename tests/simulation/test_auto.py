"""The choice of a timing: measured operations where they are known, else the roofline."""

from __future__ import annotations

import pytest

from kvlab.engine.build import plan_engine
from kvlab.errors import ConfigError
from kvlab.simulation.timings import TIMINGS, Deployment
from kvlab.simulation.timings.roofline import RooflineTiming
from tests.support.plans import composed


class Measured(RooflineTiming):
    """Stands for tables that hold one device."""

    description = "measured"

    @classmethod
    def of(cls, deployment: Deployment) -> RooflineTiming:
        if deployment.hardware.name != "h100_sxm":
            raise ConfigError("hardware", deployment.hardware.name, "is in no table")
        return super().of(deployment)


@pytest.mark.parametrize(("device", "timing"), [("h100_sxm", "measured"), ("l4", "roofline")])
def test_auto_takes_what_is_measured_and_says_which(
    device: str, timing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    TIMINGS.get("silicon")
    monkeypatch.setitem(TIMINGS._entries, "silicon", Measured)
    config = composed("executor=simulated", "model=qwen3_8b", "executor.timing=auto", f"hardware={device}")
    assert plan_engine(config).chosen == {"device": device, "timing": timing}
