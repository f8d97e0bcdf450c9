"""A team's store: PostgreSQL, with an MLflow server before it and without."""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest

from kvlab.config import TrackingConfig
from kvlab.errors import TrackingError
from kvlab.lab.tracking import RunStatus, open_store, start_run
from tests.support.commands import TIMEOUT_S, Lab
from tests.support.postgres import PASSWORD, binaries, free_port, postgres

BIN = binaries()

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.skipif(BIN is None, reason="PostgreSQL is not installed (apt-get install postgresql)"),
]


@pytest.fixture(scope="module")
def database():
    pytest.importorskip("psycopg2", reason="pip install 'kvlab[postgres]'")
    assert BIN is not None
    with postgres(BIN) as server:
        yield server


@contextlib.contextmanager
def mlflow_server(backend, artifacts):
    """The command of docs/tracking.md, on another port."""
    port = free_port()
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", backend]
    command += ["--artifacts-destination", str(artifacts), "--host", "127.0.0.1", "--port", str(port)]
    log = artifacts.with_suffix(".log")
    # Eight processes that import MLflow would wait for jobs, which kvlab has none of.
    environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with log.open("wb") as out:
        server = subprocess.Popen(
            [*command, "--workers", "1"],
            stdout=out,
            stderr=out,
            cwd=artifacts.parent,
            env=environment,
            start_new_session=True,
        )
    uri = f"http://127.0.0.1:{port}"
    try:
        for _ in range(1200):
            if server.poll() is not None:
                break
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{uri}/health", timeout=5):
                break
            time.sleep(0.1)
        assert server.poll() is None, log.read_text()
        yield uri
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, 15)  # the group is its own: workers and job runners too
        server.wait(60)


def test_a_run_and_sweeps_at_once_on_a_server_with_postgresql(database, tmp_path):
    from mlflow.tracking import MlflowClient

    with mlflow_server(database.create("served").replace("://", "+psycopg2://"), tmp_path / "files") as uri:
        lab = Lab(tmp_path)
        lab.uri = uri
        done = lab.here("tracking.timeout_s=120", directory="one")
        assert done.code == 0, done.output
        assert f"{uri}/#/experiments/" in done.output
        blocks = ("64", "128")
        sweeps = [lab.start("-m", "tracking.timeout_s=120", f"kv.num_blocks={n}", directory=n) for n in blocks]
        outputs = [sweep.finish(TIMEOUT_S) for sweep in sweeps]
        assert [sweep.returncode for sweep in sweeps] == [0, 0], "\n".join(outputs)

        client = MlflowClient(tracking_uri=uri)
        experiment = client.get_experiment_by_name("kvlab").experiment_id
        runs = client.search_runs([experiment])
        assert [run.info.status for run in runs] == ["FINISHED"] * 5
        children = [run for run in runs if "mlflow.parentRunId" in run.data.tags]
        assert {run.data.params["kv.num_blocks"] for run in children} == set(blocks)
        single = json.loads((tmp_path / "one" / "summary.json").read_text())
        run = client.get_run(single["run_id"])
        finals = {name: value for name, value in run.data.metrics.items() if not name.startswith("series/")}
        assert finals == pytest.approx(single["metrics"])
        (given,) = run.inputs.dataset_inputs
        assert (given.dataset.name, given.dataset.digest) == ("burst16", single["workload_digest"])
        files = client.download_artifacts(single["run_id"], "", str(tmp_path))
        assert json.loads((Path(files) / "summary.json").read_text()) == single
        assert list((tmp_path / "files").rglob("summary.json")), "the server keeps the files"


def test_processes_may_start_on_a_fresh_database_at_once(database, tmp_path):
    config = TrackingConfig(uri=database.create("fresh"), artifacts=str(tmp_path / "files"))
    ids, problems = [], []

    def work():
        try:
            tracker = start_run(config, root=tmp_path, run_name="a", params={"a": 1}, tags={})
            (tmp_path / "out").mkdir(exist_ok=True)
            tracker.log_metrics({"x": 1.0})
            tracker.finish(RunStatus.FINISHED)
            ids.append(tracker.run_id)
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert (problems, len(set(ids))) == ([], 3)
    store = open_store(config, tmp_path)
    assert [store.call("get_run", run_id).data.metrics for run_id in ids] == [{"x": 1.0}] * 3
    experiment = store.call("get_experiment_by_name", "kvlab")
    assert experiment.artifact_location == (tmp_path / "files").as_uri()


def fails(tmp_path, uri):
    with pytest.raises(TrackingError) as raised:
        start_run(TrackingConfig(uri=uri), root=tmp_path, run_name="a", params={}, tags={})
    message = str(raised.value)
    assert PASSWORD not in message
    assert "\n" not in message
    return message


def test_a_wrong_password_is_reported_at_once(database, tmp_path):
    uri = database.create("closed").replace(PASSWORD, "guessed")
    message = fails(tmp_path, uri)
    assert message.startswith(
        f"tracking.uri=postgresql+psycopg2://***@127.0.0.1:{database.port}/closed: connection to server"
    )
    assert 'password authentication failed for user "kvlab"' in message
    assert "put the right user and password into tracking.uri" in message
    assert "guessed" not in message


def test_a_database_that_is_not_there(database, tmp_path):
    uri = database.create("there").replace("/there", "/elsewhere")
    assert 'database "elsewhere" does not exist' in fails(tmp_path, uri)
