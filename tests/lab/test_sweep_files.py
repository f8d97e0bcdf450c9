"""Every named sweep and every experiment runs, with a tiny model and a few short requests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab.sweeps import ROOT, SweepLab

FILES = sorted(
    [f"sweep={file.stem}" for file in (ROOT / "conf/sweep").glob("*.yaml")]
    + [f"experiment={file.stem}" for file in (ROOT / "conf/experiment").glob("*.yaml")]
)
SMALL = ["repeats=1", "workload.num_requests=2", "workload.arrival=burst", "workload.think_s=0", "workload.turns=1"]


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
def test_it_runs_in_small(file: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ended = SweepLab(tmp_path, capfd.readouterr).here(file, *SMALL, "tracking=off")
    assert ended.code == 0, ended.output
    plans = list((tmp_path / "out").glob("*/summary.json"))
    assert plans
    if "sweep" in file:
        assert len(plans) > 1
    assert f"{len(plans)} runs: {len(plans)} finished\n" in ended.output or len(plans) == 1
