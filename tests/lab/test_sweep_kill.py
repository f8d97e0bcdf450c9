"""Sweeps that are killed, started at once, or run in several processes: one store, each point once."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.support import killer
from tests.support.commands import TIMEOUT_S, Command, Lab, kvlab_run
from tests.support.forked import Forked
from tests.support.marked import ENVIRONMENT, MARK, SECRETS, check

ORDER = """
from kvlab.engine.scheduler.orders import ORDERS, Order


@ORDERS.register("last_come")
class LastCome(Order):
    def rank(self, sequence):
        return -sequence.request.arrival_s
"""
SIX = ["-m", "kv.num_blocks=34,35,36", "scheduler.max_batch_size=1,2"]


@pytest.mark.slow
def test_a_sweep_killed_in_the_middle_and_resumed_leaves_each_point_finished_once(tmp_path: Path) -> None:
    lab = Lab.with_store(tmp_path)
    # As the run of the third point is open in the store.
    strike = ["kvlab.lab.tracking.mlflow_tracker.MlflowTracker.log_input", "3", "after", "SIGKILL"]
    killed = Forked(killer.main, [*strike, "run", *lab.arguments(*SIX, directory="first")])
    killed.finish()
    assert killed.returncode == -signal.SIGKILL
    assert Counter(run.state for run in lab.children()) == {"FINISHED": 2, "RUNNING": 1}
    assert [run.state for run in lab.parents()] == ["RUNNING"]

    resumed = lab.here(*SIX, "resume=true", directory="second")
    assert resumed.code == 0, resumed.output
    assert "2 runs done before: 4 jobs" in resumed.output
    after = lab.children()
    done = [run for run in after if run.finished]
    assert len({run.tags["kvlab.config_digest"] for run in done}) == len(done) == 6
    points = {(run.params["kv.num_blocks"], run.params["scheduler.max_batch_size"]) for run in done}
    assert len(points) == 6
    assert Counter(run.state for run in after) == {"FINISHED": 6, "KILLED": 1}
    (parent,) = lab.parents()
    assert parent.state == "FINISHED"
    assert {run.tags["mlflow.parentRunId"] for run in after} == {parent.run_id}
    assert len(list((tmp_path / "second").glob("*/summary.json"))) == 6  # those done before are fetched
    assert "6 runs: 6 finished" in resumed.output


@pytest.mark.slow
def test_four_sweeps_started_at_once_on_a_fresh_store_all_finish(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    processes = [lab.start("-m", "kv.num_blocks=8,9", f"seed={seed}", directory=str(seed)) for seed in range(4)]
    outputs = [process.finish(TIMEOUT_S) for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, "\n".join(outputs)
    assert "INFO" not in "".join(outputs)  # MLflow announces each step of making a store
    assert sum(run.finished for run in lab.children()) == 8
    assert [run.state for run in lab.parents()] == ["FINISHED"] * 4


def swept_elsewhere(folder: Path, *settings: str, **environment: str) -> tuple[Lab, str]:
    """A sweep whose launcher starts processes, with an order that a plugin registers, and what it printed."""
    (folder / "theirs.py").write_text(ORDER)
    path = os.pathsep.join([str(folder), *sys.path])
    lab = Lab.with_store(folder)
    asked = ["-m", "plugins=[theirs]", "scheduler.order=last_come", *settings]
    sweep = Forked(kvlab_run, lab.arguments(*asked), folder, PYTHONPATH=path, **environment)
    output = sweep.finish(TIMEOUT_S)
    assert sweep.returncode == 0, output
    (parent,) = lab.parents()
    assert parent.state == "FINISHED"
    children = lab.children()
    assert {run.tags["mlflow.parentRunId"] for run in children} == {parent.run_id}
    assert {run.params["scheduler.order"] for run in children} == {"last_come"}
    assert {run.tags["kvlab.process"] for run in children} - {parent.tags["kvlab.process"]}
    return lab, output


@pytest.mark.slow
@pytest.mark.long
def test_points_run_in_other_processes_load_plugins_belong_to_one_sweep_and_keep_no_secret(tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    launcher = ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2")
    # One amount of memory does not fit, which is a result in any process.
    points = ("kv.num_blocks=1,8", f"+tags.password=one-{MARK},two-{MARK}")
    lab, output = swept_elsewhere(tmp_path, *points, *launcher, *SECRETS, **ENVIRONMENT)
    assert "4 jobs" in output
    assert "KV cache" in output
    assert "2 finished, 2 did not fit in memory" in output
    assert re.search(r"best so far throughput/output_tokens_per_s = .* \(kv.num_blocks=8", output)
    assert Counter(run.tags["kvlab.status"] for run in lab.children()) == {"finished": 2, "out_of_memory": 2}
    check(tmp_path, Command(0, output))


@pytest.mark.slow
@pytest.mark.long
def test_a_point_that_submitit_runs_loads_plugins_and_belongs_to_its_sweep(tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    lab, output = swept_elsewhere(tmp_path, "kv.num_blocks=8", "hydra/launcher=submitit_local")
    assert "1 finished" in output
    assert [run.tags["kvlab.status"] for run in lab.children()] == ["finished"]
