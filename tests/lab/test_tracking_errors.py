"""Stores that cannot be opened: one sentence that names the setting and what would do."""

import contextlib
import sqlite3
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from kvlab.config import TrackingConfig
from kvlab.errors import TrackingError
from kvlab.lab.tracking import RunStatus, open_store, start_run


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setenv("no_proxy", "*")


def refusal(root, uri=None):
    with pytest.raises(TrackingError) as raised:
        start_run(TrackingConfig(uri=uri), root=root, run_name="a", params={}, tags={})
    message = str(raised.value)
    assert "\n" not in message
    return message


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("made")
    start_run(TrackingConfig(), root=root, run_name="a", params={}, tags={}).finish(RunStatus.FINISHED)
    return (root / "mlflow.db").read_bytes()


@pytest.mark.parametrize(
    ("revision", "advice"),
    [
        ("ffffffffffff", "a newer MLflow made it: install that one, or take another store"),
        ("df50e92ffc5e", "after a backup, mlflow db upgrade sqlite:///"),
    ],
)
def test_a_database_of_another_mlflow(tmp_path, made, revision, advice):
    (tmp_path / "mlflow.db").write_bytes(made)
    with contextlib.closing(sqlite3.connect(tmp_path / "mlflow.db")) as database:
        database.execute("UPDATE alembic_version SET version_num = ?", [revision])
        database.commit()
    message = refusal(tmp_path)
    assert message.startswith(f"tracking.uri=sqlite:///{tmp_path}/mlflow.db: ")
    assert f"found version {revision}" in message
    assert advice in message


@pytest.mark.parametrize("status", [401, 403])
def test_a_server_that_wants_to_know_who_asks(tmp_path, status):
    class Refusing(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Refusing)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        uri = f"http://127.0.0.1:{server.server_address[1]}"
        message = refusal(tmp_path, uri.replace("://", "://user:secret@"))
    finally:
        server.shutdown()
        server.server_close()
    assert message.startswith(f"tracking.uri={uri}: ")
    assert str(status) in message
    assert "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD" in message
    assert "secret" not in message


def test_postgresql_without_its_driver(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "psycopg2", None)
    message = refusal(tmp_path, "postgresql://user:secret@127.0.0.1:9/runs")
    assert "the database's driver psycopg2 is not installed; pip install 'kvlab[postgres]' brings it" in message
    assert "secret" not in message


def test_postgresql_that_is_not_there(tmp_path):
    pytest.importorskip("psycopg2")
    message = refusal(tmp_path, "postgresql://user:secret@127.0.0.1:9/runs")
    assert message.startswith("tracking.uri=postgresql+psycopg2://127.0.0.1:9/runs: connection to server")
    assert "Connection refused" in message
    assert "sqlalche.me" not in message


def test_reading_does_not_make_a_store(tmp_path):
    with pytest.raises(TrackingError, match="nothing has been tracked there yet"):
        open_store(TrackingConfig(), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_reading_a_store(tmp_path, made):
    (tmp_path / "mlflow.db").write_bytes(made)
    store = open_store(TrackingConfig(), tmp_path)
    experiment = store.call("get_experiment_by_name", "kvlab").experiment_id
    (run,) = store.call("search_runs", [experiment])
    assert run.data.tags["kvlab.status"] == "finished"
