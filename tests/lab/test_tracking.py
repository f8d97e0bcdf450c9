import contextlib
import itertools
import json
import math
import os
import re
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from kvlab.config import TrackingConfig
from kvlab.errors import TrackingError
from kvlab.lab.provenance import provenance
from kvlab.lab.tracking import SERIES_POINTS, MlflowTracker, NullTracker, RunStatus, access, resolve_uri, start_run

SLACK_S = 6.0  # a busy machine's share of a deadline


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_TRUNCATE_LONG_VALUES", "false")  # what is cut, the tracker cuts
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setenv("no_proxy", "*")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """The one directory whose store most tests share: making a store takes seconds."""
    return tmp_path_factory.mktemp("root with space")


@pytest.fixture(scope="module")
def client(root):
    from mlflow.tracking import MlflowClient

    start(root).finish(RunStatus.FINISHED)  # the tracker makes the store, as in life
    return MlflowClient(tracking_uri=f"sqlite:///{root / 'mlflow.db'}")


def start(root, *, uri=None, experiment="kvlab", timeout_s=10.0, params=None, tags=None, parent=None):
    config = TrackingConfig(uri=uri, experiment=experiment, timeout_s=timeout_s)
    return start_run(
        config, root=root, run_name="a run", params=params or {}, tags=tags or {}, parent_run_id=parent
    )


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


def test_tags_say_who_what_and_where(root, client):
    tracker = start(root, tags={"sweep": "block size", "long": "x" * 9000})
    run = client.get_run(tracker.run_id)
    assert run.info.run_name == "a run"
    assert run.data.tags["sweep"] == "block size"
    assert run.data.tags["long"] == "x" * 8000
    assert run.data.tags["host.cpus"] == str(os.cpu_count())
    assert {"host.name", "version.python", "version.torch", "mlflow.source.name"} <= run.data.tags.keys()
    assert "git.commit" not in run.data.tags  # the store's root is in no repository


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
def test_how_a_run_ended(root, client, status, theirs):
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
    assert isinstance(tracker, NullTracker)
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


@pytest.mark.slow
def test_processes_may_start_on_a_fresh_store_at_once(tmp_path):
    code = """
import sys, pathlib
from kvlab.config import TrackingConfig
from kvlab.lab.tracking import RunStatus, start_run
import mlflow.tracking  # so that all get to the store together
print("ready", flush=True)
sys.stdin.readline()
root = pathlib.Path(sys.argv[1])
tracker = start_run(TrackingConfig(), root=root, run_name="a", params={"a": 1}, tags={})
tracker.finish(RunStatus.FINISHED)
print(tracker.run_id)
"""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for process in started:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in started:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    said = [process.communicate(timeout=400) for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    assert len({out for out, _ in said}) == 2
    assert [err for _, err in said] == ["", ""]  # MLflow announces each step of making a store


# What can go wrong


def test_names_that_mlflow_refuses(root, client):
    tracker = start(root)
    with pytest.raises(TrackingError, match="kv/50%"):
        tracker.log_metrics({"kv/50%": 1.0})
    with pytest.raises(TrackingError, match=r"model\.arch@1"):
        start(root, params={"model.arch@1": 1}, tags={"marker": "bad params"})
    experiment = client.get_experiment_by_name("kvlab").experiment_id
    (run,) = client.search_runs([experiment], "tags.marker = 'bad params'")
    assert run.info.status == "FAILED"  # not left running for ever


def test_a_deleted_experiment_is_named(root, client):
    start(root, experiment="gone")
    client.delete_experiment(client.get_experiment_by_name("gone").experiment_id)
    with pytest.raises(TrackingError, match=r"tracking\.experiment=gone: was deleted .* restore -x \d"):
        start(root, experiment="gone")


@pytest.mark.parametrize(
    ("uri", "reason"),
    [
        ("sqlite:///{tmp}/missing/mlflow.db", "there is no directory {tmp}/missing"),
        ("sqlite:///{tmp}", "unable to open database file"),
        ("sqlite:///{tmp}/notes.txt", "file is not a database"),
        ("sqlite://", "in memory"),
        ("sqlite:///:memory:", "in memory"),
        ("sqlite:nonsense", "parse"),
        ("{tmp}/mlruns", "filesystem tracking backend"),
        ("ftp://host", "unsupported URI"),
        ("http://", "no host"),
    ],
)
def test_stores_that_cannot_be_opened(tmp_path, uri, reason):
    (tmp_path / "notes.txt").write_text("not a database " * 100)
    uri, reason = uri.format(tmp=tmp_path), reason.format(tmp=tmp_path)
    began = time.monotonic()
    with pytest.raises(TrackingError) as raised:
        start(tmp_path, uri=uri)
    assert f"tracking.uri={uri}: " in str(raised.value)
    assert reason in str(raised.value)
    assert "tracking=off" in str(raised.value)
    assert time.monotonic() - began < 15  # MLflow by itself tries for a minute and a half
    assert not (tmp_path / "missing").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_store_without_permission(tmp_path):
    database = tmp_path / "mlflow.db"
    database.touch(mode=0o400)
    with pytest.raises(TrackingError, match="readonly database"):
        start(tmp_path)
    database.unlink()
    (tmp_path / "mlflow.db.lock").unlink()
    tmp_path.chmod(0o500)
    with pytest.raises(TrackingError, match="Permission denied"):
        start(tmp_path)


def test_a_lock_that_is_never_released(root, client, monkeypatch):
    monkeypatch.setattr(access, "LOCK_S", 0.1)
    with FileLock(root / "mlflow.db.lock"), pytest.raises(TrackingError, match=r"has held .*mlflow\.db\.lock"):
        start(root)


def test_a_store_that_another_program_has_locked(root, client, monkeypatch):
    monkeypatch.setattr(access, "SQLITE_BUSY_S", 0.1)
    began = time.monotonic()
    with contextlib.closing(sqlite3.connect(root / "mlflow.db")) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(TrackingError, match="database is locked"):
            start(root)
    assert time.monotonic() - began < 15  # MLflow by itself waits for 20 s


@contextlib.contextmanager
def listening(*, backlog):
    """A port that takes connections and never answers; without `backlog`, one that refuses them."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        if backlog:
            taken.listen(backlog)
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


def fails_in_time(tmp_path, uri, match):
    began = time.monotonic()
    with pytest.raises(TrackingError, match=match) as raised:
        start(tmp_path, uri=uri, timeout_s=1.0)
    assert time.monotonic() - began < 1.0 + SLACK_S
    return str(raised.value)


def test_a_server_that_refuses(tmp_path):
    with listening(backlog=0) as uri:
        assert f"tracking.uri={uri}: " in fails_in_time(tmp_path, uri, "Connection refused")


def test_a_server_that_never_answers(tmp_path):
    with listening(backlog=5) as uri:
        fails_in_time(tmp_path, uri, r"no answer within 1 s \(tracking\.timeout_s\)")


def test_a_host_that_cannot_be_found(tmp_path, monkeypatch):
    def unknown(*args, **kwargs):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    message = fails_in_time(tmp_path, "http://user:secret@tracking.invalid", "Name or service not known")
    assert "secret" not in message
    assert "tracking.uri=http://tracking.invalid: " in message


def test_a_name_server_that_never_answers(tmp_path, monkeypatch):
    over = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: over.wait(30))
    try:
        fails_in_time(tmp_path, "http://tracking.invalid", "no answer within 1 s")
    finally:
        over.set()


class StandIn(ThreadingHTTPServer):
    """As much of a tracking server as a run needs. `faults` make it misbehave."""

    daemon_threads = True

    def __init__(self, *faults):
        super().__init__(("127.0.0.1", 0), StandInHandler)
        self.faults = set(faults)
        self.over = threading.Event()
        self.batches = []
        self.uri = f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self):
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.stop()

    def stop(self):
        self.over.set()
        self.shutdown()
        self.server_close()


class StandInHandler(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def do_GET(self):
        self.answer()

    def do_POST(self):
        self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def answer(self, body: Any = None) -> None:
        path = self.path.partition("?")[0]
        server: Any = self.server
        if "hang" in server.faults and path != "/health":
            server.over.wait(30)
        status = 200
        reply: Any = {}
        if "not mlflow" in server.faults or (path == "/health" and "no health" in server.faults):
            status, reply = 404, "no such page"
        elif path.endswith("experiments/get-by-name"):
            if "race" in server.faults:
                status, reply = 404, {"error_code": "RESOURCE_DOES_NOT_EXIST", "message": "none"}
            else:
                reply = {"experiment": {"experiment_id": "7", "name": "kvlab", "lifecycle_stage": "active"}}
        elif path.endswith("experiments/create"):
            server.faults.discard("race")
            status, reply = 400, {"error_code": "RESOURCE_ALREADY_EXISTS", "message": "exists"}
        elif path.endswith("runs/create"):
            info = {"run_id": "abc", "run_uuid": "abc", "experiment_id": "7", "status": "RUNNING"}
            reply = {"run": {"info": info | {"start_time": body["start_time"]}, "data": {}}}
        elif path.endswith("runs/log-batch"):
            server.batches.append(body)
        text = json.dumps(reply).encode()
        with contextlib.suppress(OSError):  # the client may have gone
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)


@pytest.mark.parametrize("fault", ["none", "race", "no health"])
def test_a_server_is_used_and_shown_without_its_password(client, tmp_path, capfd, fault):
    with StandIn(fault) as server:
        tracker = start(tmp_path, uri=server.uri.replace("://", "://user:secret@") + "/", params={"a": 1})
        assert isinstance(tracker, MlflowTracker)
        assert tracker.where() == f"{server.uri}/#/experiments/7/runs/abc?workflowType=machine_learning"
        tracker.log_metrics({"x": 2.0})
        tracker.finish(RunStatus.FINISHED)
    kinds = ["params", "metrics", "tags"]
    assert [list(batch) for batch in server.batches] == [["run_id", kind] for kind in kinds]
    assert capfd.readouterr() == ("", "")  # MLflow would print the URL at the end


def test_a_server_that_hangs_once_it_is_asked_for_something(client, tmp_path):
    with StandIn("hang") as server:
        fails_in_time(tmp_path, server.uri, "no answer within 1 s")


def test_a_server_that_hangs_or_dies_in_the_middle_of_a_run(client, tmp_path, capfd, caplog):
    (tmp_path / "summary.json").touch()
    with StandIn() as server:
        tracker = start(tmp_path, uri=server.uri, timeout_s=1.0)
        server.faults.add("hang")
        began = time.monotonic()
        with pytest.raises(TrackingError, match="no answer within 1 s"):
            tracker.log_metrics({"x": 1.0})
        assert 1.0 <= time.monotonic() - began < 1.0 + SLACK_S  # a second of its own
        server.stop()
        for call in (
            lambda: tracker.log_metrics({"x": 1.0}),
            lambda: tracker.log_series({"x": [(0, 0.0, 1.0)]}),
            lambda: tracker.log_artifacts(tmp_path),
            lambda: tracker.finish(RunStatus.FINISHED),
        ):
            with pytest.raises(TrackingError, match=re.escape(server.uri)):
                call()
        assert time.monotonic() - began < 2 * (1.0 + SLACK_S)
    assert capfd.readouterr() == ("", "")  # the exception says it all
    assert caplog.text == ""


def test_a_server_that_is_something_else(client, tmp_path):
    with StandIn("not mlflow") as server:
        fails_in_time(tmp_path, server.uri, "404 .* tracking=off")


# Provenance


def test_provenance_knows_the_commit_and_whether_the_tree_was_dirty(tmp_path, monkeypatch):
    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    assert "git.commit" not in provenance(tmp_path)
    git("init")
    assert "git.commit" not in provenance(tmp_path)  # a repository without a commit
    git("commit", "--allow-empty", "-m", "first")
    facts = provenance(tmp_path)
    assert (facts["git.commit"], facts["git.dirty"]) == (git("rev-parse", "HEAD"), "false")
    (tmp_path / "new.py").touch()
    assert provenance(tmp_path)["git.dirty"] == "true"
    monkeypatch.setenv("PATH", "")
    assert "git.commit" not in provenance(tmp_path)
    assert provenance(tmp_path)["version.torch"]


def test_provenance_names_the_program_without_this_machines_folders(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "src" / "run.py")])
    assert provenance(tmp_path)["program"] == str(Path("src", "run.py"))
    assert provenance(tmp_path / "other")["program"] == "run.py"
