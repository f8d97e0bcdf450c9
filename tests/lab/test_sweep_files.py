"""Every named sweep and every experiment runs, with a tiny model and a few short requests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.commands import Lab
from tests.support.swept import SWEEPS, points_of

SMALL = ["repeats=1", "workload.num_requests=2", "workload.rate=1000", "workload.think_s=0"]


@pytest.mark.slow
@pytest.mark.parametrize("name", SWEEPS)
def test_it_runs_in_small(name: str, tmp_path: Path) -> None:
    ended = Lab(tmp_path).here(name, *SMALL, "tracking=off")
    assert ended.code == 0, ended.output
    summaries = [json.loads(file.read_text()) for file in (tmp_path / "out").rglob("summary.json")]
    assert len(summaries) == len(points_of(name))
    for summary in summaries:
        assert (summary["status"], summary["error"]) == ("finished", None)
        assert summary["metrics"]["requests/completed"] >= 2
    if len(summaries) > 1:
        assert f"{len(summaries)} runs: {len(summaries)} finished\n" in ended.output
    else:
        assert "sweep" not in name
