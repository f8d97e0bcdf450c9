"""Tracking in a process beside: what is in the store, and what is said where there is none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from kvlab.config import TrackingConfig
from kvlab.errors import TrackingError
from kvlab.lab.tracking import RunStatus, Tracker
from kvlab.lab.tracking.beside import TrackingProcess
from tests.support.commands import TINY
from tests.support.tracking import empty_store

RUN = """
import sys
import kvlab.cli.run
sys.argv = ["kvlab run", *sys.argv[1:]]
kvlab.cli.run.main()
assert "mlflow" not in sys.modules
"""


@pytest.fixture
def config(tmp_path: Path) -> TrackingConfig:
    (tmp_path / "store.db").write_bytes(empty_store())
    return TrackingConfig(uri=f"sqlite:///{tmp_path / 'store.db'}")


@pytest.fixture(scope="module")
def process() -> TrackingProcess:
    """Of any local store: two seconds go into its imports."""
    return TrackingProcess(TrackingConfig())


def begin(process: TrackingProcess, config: TrackingConfig, root: Path) -> Tracker:
    return process.start_run(config, root=root, run_name="a", params={"a": 1}, tags={}, facts={})


def test_a_run_is_in_the_store_with_all_that_was_recorded(
    process: TrackingProcess, config: TrackingConfig, tmp_path: Path
) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "mine.txt").write_text("here")
    tracker = begin(process, config, tmp_path)
    tracker.log_metrics({"m": 2.5})
    tracker.log_series({"s": [(0, 0.1, 1.0), (1, 0.2, 3.0)]})
    tracker.watch_system()
    tracker.log_artifacts(tmp_path / "files")
    tracker.finish(RunStatus.INTERRUPTED, "by me")
    client = MlflowClient(config.uri)
    assert tracker.run_id is not None
    run = client.get_run(tracker.run_id)
    assert (run.info.status, run.data.params) == ("KILLED", {"a": "1"})
    assert run.data.metrics == {"m": 2.5, "series/s": 3.0}
    assert run.data.tags["kvlab.error"] == "by me"
    assert [file.path for file in client.list_artifacts(tracker.run_id)] == ["mine.txt"]
    assert f"/runs/{tracker.run_id}" in tracker.where()


def test_a_store_that_cannot_be_used_is_the_same_sentence(process: TrackingProcess, tmp_path: Path) -> None:
    config = TrackingConfig(uri=f"sqlite:///{tmp_path / 'nowhere' / 'store.db'}")
    with pytest.raises(TrackingError, match=r"tracking.uri=sqlite:///.*nowhere.*: there is no directory"):
        begin(process, config, tmp_path)


def test_a_process_that_was_killed_is_named(config: TrackingConfig, tmp_path: Path) -> None:
    process = TrackingProcess(config)
    tracker = begin(process, config, tmp_path)
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(TrackingError, match=f"process {process.pid}, which writes to the store, has ended"):
        tracker.log_metrics({"m": 1.0})


@pytest.mark.slow
def test_a_command_leaves_mlflow_to_it(config: TrackingConfig, tmp_path: Path) -> None:
    settings = [*TINY, f"tracking.uri={config.uri}", f"hydra.run.dir={tmp_path / 'out'}"]
    done = subprocess.run([sys.executable, "-c", RUN, *settings], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = MlflowClient(config.uri).search_runs(["1"])
    assert run.info.status == "FINISHED"
    assert run.data.metrics["requests/completed"] == 3
