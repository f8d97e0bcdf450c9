"""The first command of the README: `python -m src.run kv=paged model=qwen3_4b workload=burst48`.

The run is composed and planned as it is on a user's machine; only the weights are a stub, since eight gigabytes of
random numbers would show nothing more.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import kvlab.cli.run
from kvlab.engine.clock import WallClock
from kvlab.engine.executors import EXECUTORS, Execution
from kvlab.engine.executors.torch import TorchExecution
from kvlab.engine.plan import EnginePlan
from kvlab.engine.step import StepInput, StepResult
from kvlab.kv.view import CacheView

COMMAND = ["kv=paged", "model=qwen3_4b", "workload=burst48"]


class StubExecutor:
    """The token after a sequence's own last one; reads what a model would read of the view."""

    def execute(self, step: StepInput, view: CacheView) -> StepResult:
        assert len(view.slot_mapping) == len(view.positions) == len(step.token_ids)
        return StepResult([int(step.token_ids[row] + 1) % 151_936 for row in step.logits_rows()])


class Stub(TorchExecution):
    @staticmethod
    def build(plan: EnginePlan, **_: Any) -> Execution:
        return Execution(StubExecutor(), WallClock(), None)


@pytest.mark.slow
def test_the_first_command_serves_its_48_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EXECUTORS, "get", lambda name: Stub)
    monkeypatch.setattr("kvlab.lab.run.plan.available_memory", lambda device: 32 * 2**30)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    monkeypatch.setattr(sys, "argv", ["src/run.py", *COMMAND, f"hydra.run.dir={tmp_path / 'run'}"])
    kvlab.cli.run.main()

    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert summary["choices"] | {"kv": "paged", "model": "qwen3_4b", "workload": "burst48"} == summary["choices"]
    metrics = summary["metrics"]
    assert metrics["requests/completed"] == 48
    assert metrics["capacity/peak_running"] == 48
    # 48 slots of 1,024 tokens: 2 (K and V) x 36 layers x 8 heads x 128 numbers x 2 bytes each.
    assert metrics["capacity/kv_bytes"] == 48 * 1024 * 2 * 36 * 8 * 128 * 2
    assert summary["kv_bytes_per_token"] == 147_456
    assert metrics["capacity/weight_bytes"] > 4.02e9 * 2
    rows = pq.read_table(tmp_path / "run" / "requests.parquet").to_pylist()
    for row in rows:
        tokens = row["output_token_ids"]
        assert all(after == (before + 1) % 151_936 for before, after in itertools.pairwise(tokens))
    assert sum(len(row["output_token_ids"]) for row in rows) == metrics["tokens/output"]
