"""What a run leaves in a store, and which store that is."""

import itertools
import math
import os
import subprocess
import sys
import time

import pytest

from kvlab.config import TrackingConfig
from kvlab.errors import TrackingError
from kvlab.lab.results.provenance import provenance
from kvlab.lab.tracking import RunStatus, Tracker, start_run
from kvlab.lab.tracking.mlflow_tracker import SERIES_POINTS
from kvlab.lab.tracking.search import done_before, done_before_tags
from kvlab.lab.tracking.uri import resolve_uri
from tests.support.tracking import empty_store, start


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRUNCATE_LONG_VALUES", "false")  # what is cut, the tracker cuts


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("root with space")
    (folder / "mlflow.db").write_bytes(empty_store())
    return folder


@pytest.fixture(scope="module")
def client(root):
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=f"sqlite:///{root / 'mlflow.db'}")


# What is recorded


def test_params_are_written_as_text_and_cut(root, client):
    params = {f"model.architecture.value_{i}": i for i in range(250)}  # more than MLflow takes at once
    tracker = start(root, params=params | {"kv.memory": None, "long": "x" * 7000, "flag": True})
    logged = client.get_run(tracker.run_id).data.params
    assert len(logged) == 253
    assert logged["model.architecture.value_249"] == "249"
    assert logged["kv.memory"] == "None"
    assert logged["flag"] == "True"
    assert logged["long"] == "x" * 6000


def test_tags_name_the_user_the_versions_and_the_machine(root, client):
    tracker = start(root, tags={"sweep": "block size", "long": "x" * 9000})
    run = client.get_run(tracker.run_id)
    assert run.info.run_name == "a run"
    assert run.data.tags["sweep"] == "block size"
    assert run.data.tags["long"] == "x" * 8000
    assert run.data.tags["host.cpus"] == str(os.cpu_count())
    assert {"host.name", "version.python", "version.torch", "mlflow.source.name"} <= run.data.tags.keys()
    assert run.data.tags.get("mlflow.source.git.commit") == provenance().get("git.commit")


def test_final_figures_have_no_steps_and_are_finite(root, client):
    tracker = start(root)
    figures = {
        "throughput/output_tokens_per_s": 21.5,
        "latency/ttft_ms_p99": 3,
        "capacity/kv_bytes": 2**40,
        "kv/block_utilization_mean": 0.0,
        "duration_s": -1.25,
    }
    tracker.log_metrics(figures | {"inf": math.inf, "minus_inf": -math.inf, "nan": math.nan})
    assert client.get_run(tracker.run_id).data.metrics == figures
    (point,) = client.get_metric_history(tracker.run_id, "latency/ttft_ms_p99")
    assert point.step == 0
    assert abs(point.timestamp - time.time() * 1000) < 60_000


def test_series_are_sampled_with_their_ends_and_their_times(root, client):
    tracker = start(root)
    long = [(step, step / 10, float(step * step)) for step in range(5000)]
    short = [(0, 0.0, 1.0), (1, 0.5, math.nan), (7, 2.25, 3.0)]
    # four long series are more points than MLflow takes at once
    tracker.log_series({"running": long, "a": long, "b": long, "c": long, "short": short, "none": []})

    history = client.get_metric_history(tracker.run_id, "series/running")
    steps = [point.step for point in history]
    assert len(steps) == SERIES_POINTS
    assert (steps[0], steps[-1]) == (0, 4999)
    assert steps == sorted(set(steps))
    assert max(b - a for a, b in itertools.pairwise(steps)) <= 17
    assert all(point.value == point.step**2 for point in history)

    started = client.get_run(tracker.run_id).info.start_time
    kept = client.get_metric_history(tracker.run_id, "series/short")
    assert [(p.step, p.timestamp - started, p.value) for p in kept] == [(0, 0, 1.0), (7, 2250, 3.0)]
    assert client.get_metric_history(tracker.run_id, "series/none") == []


def test_artifacts_keep_their_folders_and_lie_beside_the_store(root, client, tmp_path):
    (tmp_path / ".hydra").mkdir()  # hidden: not stored
    (tmp_path / ".hydra" / "config.yaml").touch()
    (tmp_path / "figures").mkdir()
    (tmp_path / "summary.json").write_text("{}")
    (tmp_path / "figures" / "kv.png").write_bytes(b"png")
    tracker = start(root)
    tracker.log_artifacts(tmp_path)
    assert {file.path for file in client.list_artifacts(tracker.run_id)} == {"figures", "summary.json"}
    assert (root / "mlartifacts" / tracker.run_id / "artifacts" / "figures" / "kv.png").read_bytes() == b"png"
    with pytest.raises(TrackingError, match="no such directory"):
        tracker.log_artifacts(tmp_path / "missing")


@pytest.mark.parametrize(
    ("status", "theirs"),
    [
        (RunStatus.FINISHED, "FINISHED"),
        (RunStatus.FAILED, "FAILED"),
        (RunStatus.INTERRUPTED, "KILLED"),
        (RunStatus.OUT_OF_MEMORY, "FAILED"),
    ],
)
def test_the_ending_of_a_run_is_recorded(root, client, status, theirs):
    tracker = start(root)
    assert client.get_run(tracker.run_id).info.status == "RUNNING"
    error = None if status is RunStatus.FINISHED else "E" * 9000
    tracker.finish(status, error)
    run = client.get_run(tracker.run_id)
    assert run.info.status == theirs
    assert run.info.end_time is not None
    assert run.data.tags["kvlab.status"] == status.value
    assert run.data.tags.get("kvlab.error") == (None if error is None else "E" * 8000)


def test_runs_nest_and_do_not_disturb_each_other(root, client):
    import mlflow

    parent = start(root)
    first, second = start(root, parent=parent.run_id), start(root, parent=parent.run_id)
    first.log_metrics({"x": 1.0})
    second.log_metrics({"x": 2.0})
    experiment = client.get_experiment_by_name("kvlab").experiment_id
    children = client.search_runs([experiment], f"tags.mlflow.parentRunId = '{parent.run_id}'")
    assert {run.info.run_id: run.data.metrics["x"] for run in children} == {first.run_id: 1, second.run_id: 2}
    assert "mlflow.parentRunId" not in client.get_run(parent.run_id).data.tags
    assert mlflow.active_run() is None


@pytest.mark.parametrize("count", [0, 1, 2400])
def test_all_runs_that_were_done_before_are_kept(root, client, count):
    run_ids = [f"{number:032x}" for number in range(count)]
    tags = client.get_run(start(root, tags=done_before_tags(run_ids)).run_id).data.tags
    assert done_before(tags) == run_ids


def test_where_shows_the_run(root, client, monkeypatch):
    tracker = start(root)
    experiment = client.get_experiment_by_name("kvlab").experiment_id
    url = f"http://127.0.0.1:5000/#/experiments/{experiment}/runs/{tracker.run_id}?workflowType=machine_learning"
    command = f"mlflow ui --backend-store-uri 'sqlite:///{root}/mlflow.db'"
    assert tracker.where() == f"{command}\n{url}"
    monkeypatch.chdir(root)
    assert tracker.where() == f"mlflow ui --backend-store-uri sqlite:///mlflow.db\n{url}"


def test_off_records_nothing(tmp_path):
    config = TrackingConfig(backend="off", uri="http://127.0.0.1:9")
    tracker = start_run(config, root=tmp_path, run_name="a", params={}, tags={})
    assert type(tracker) is Tracker
    assert tracker.run_id is None
    tracker.log_metrics({"%": math.nan})
    tracker.log_series({"x": [(0, 0.0, 0.0)]})
    tracker.log_artifacts(tmp_path / "missing")
    tracker.finish(RunStatus.FAILED, "error")
    assert "off" in tracker.where()
    assert list(tmp_path.iterdir()) == []


# Which store


def test_the_setting_wins_over_the_environment_over_the_default(tmp_path, monkeypatch):
    assert resolve_uri(TrackingConfig(), tmp_path) == f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")
    assert resolve_uri(TrackingConfig(), tmp_path) == f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://elsewhere")
    assert resolve_uri(TrackingConfig(), tmp_path) == "http://elsewhere"
    assert resolve_uri(TrackingConfig(uri="http://here"), tmp_path) == "http://here"


def test_the_environment_is_obeyed(root, client, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{root}/mlflow.db")
    tracker = start(tmp_path)
    assert client.get_run(tracker.run_id).info.status == "RUNNING"
    assert list(tmp_path.iterdir()) == []


def test_mlflow_is_imported_only_when_a_run_starts():
    code = "import sys, kvlab.lab.tracking; sys.exit('mlflow' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_names_that_mlflow_refuses(root, client):
    tracker = start(root)
    with pytest.raises(TrackingError, match="kv/50%"):
        tracker.log_metrics({"kv/50%": 1.0})
    with pytest.raises(TrackingError, match=r"model\.arch@1"):
        start(root, params={"model.arch@1": 1}, tags={"marker": "bad params"})
    experiment = client.get_experiment_by_name("kvlab").experiment_id
    (run,) = client.search_runs([experiment], "tags.marker = 'bad params'")
    assert run.info.status == "FAILED"  # not left running for ever
