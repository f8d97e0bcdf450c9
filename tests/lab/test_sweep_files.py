"""Every named sweep and every experiment runs, with a tiny model and a few short requests."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest

from kvlab.registry import registry
from tests.support.commands import Lab
from tests.support.swept import SWEEPS, smaller_grid, swept_values

SMALL = [
    "model.max_seq_len=4096",
    "repeats=1",
    "workload.num_requests=2",
    "workload.rate=1000",
    "workload.think_s=0",
]
# Where the memory for K and V is given, the tiny model would have very many blocks, which each run sets to zero and
# audits.
MEMORY = ("contiguous_vs_paged", "contiguous_vs_paged_h100", "sharing", "block_size")
LESS = {
    **{f"experiment={name}": ["kv.memory=8MiB"] for name in MEMORY},
    "sweep=block_size": ["kv.memory=8MiB"],
    "sweep=routers": ["fleet.replicas=2"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SWEEPS)
def test_it_runs_in_small(name: str, tmp_path: Path) -> None:
    whole = swept_values(name)
    values = smaller_grid(whole)
    ends = [",".join(each).replace(f",{each[0].partition('=')[0]}=", ",") for each in values if each not in whole]
    ended = Lab(tmp_path).here(name, *ends, *SMALL, *LESS.get(name, []), "tracking=off")
    assert ended.code == 0, ended.output
    summaries = [json.loads(file.read_text()) for file in (tmp_path / "out").rglob("summary.json")]
    # The tiny model takes the place of models that are swept.
    points = {tuple(value for value in point if not value.startswith("model=")) for point in product(*values)}
    assert len(summaries) == len(points)
    for summary in summaries:
        assert (summary["status"], summary["error"]) == ("finished", None)
        assert summary["metrics"]["requests/completed"] >= 2
    if len(summaries) > 1:
        assert f"{len(summaries)} runs: {len(summaries)} finished\n" in ended.output
    else:
        assert "sweep" not in name


@pytest.mark.parametrize(
    ("name", "key"),
    [("eviction", "kv.eviction"), ("preemption", "scheduler.preemption.victim"), ("routers", "fleet.router")],
)
def test_a_sweep_over_policies_has_all_that_there_are(name: str, key: str) -> None:
    swept = {text for values in swept_values(f"sweep={name}") for text in values if text.startswith(f"{key}=")}
    assert swept == {f"{key}={policy}" for policy in registry(key).names()}
