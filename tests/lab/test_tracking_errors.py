"""Stores that cannot be opened: one sentence that names the setting and what would do."""

import contextlib
import os
import sqlite3
import sys
import time

import pytest
from filelock import FileLock
from mlflow.tracking import MlflowClient

from kvlab.config import TrackingConfig
from kvlab.errors import TrackingError
from kvlab.lab.tracking import RunStatus, access, open_store
from tests.support.tracking import empty_store, start


@pytest.fixture
def root(tmp_path):
    """A directory with a store in it."""
    (tmp_path / "mlflow.db").write_bytes(empty_store())
    return tmp_path


def refusal(root, uri=None):
    """The message of a store that a run cannot use."""
    with pytest.raises(TrackingError) as raised:
        start(root, uri=uri)
    message = str(raised.value)
    assert "\n" not in message
    return message


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
    message = refusal(tmp_path, uri)
    assert message.startswith(f"tracking.uri={uri}: ")
    assert reason in message
    assert "tracking=off" in message
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


def test_a_lock_that_is_never_released(root, monkeypatch):
    monkeypatch.setattr(access, "LOCK_S", 0.1)
    with FileLock(root / "mlflow.db.lock"), pytest.raises(TrackingError, match=r"has held .*mlflow\.db\.lock"):
        start(root)


def test_a_store_that_another_program_has_locked(root, monkeypatch):
    monkeypatch.setattr(access, "SQLITE_BUSY_S", 0.1)
    began = time.monotonic()
    with contextlib.closing(sqlite3.connect(root / "mlflow.db")) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(TrackingError, match="database is locked"):
            start(root)
    assert time.monotonic() - began < 15  # MLflow by itself waits for 20 s


def test_a_deleted_experiment_is_named(root):
    client = MlflowClient(tracking_uri=f"sqlite:///{root / 'mlflow.db'}")
    start(root, experiment="gone")
    client.delete_experiment(client.get_experiment_by_name("gone").experiment_id)
    with pytest.raises(TrackingError, match=r"tracking\.experiment=gone: was deleted .* restore -x \d"):
        start(root, experiment="gone")


@pytest.mark.parametrize(
    ("revision", "advice"),
    [
        ("ffffffffffff", "a newer MLflow made it: install that one, or take another store"),
        ("df50e92ffc5e", "after a backup, mlflow db upgrade sqlite:///"),
    ],
)
def test_a_database_of_another_mlflow(root, revision, advice):
    with contextlib.closing(sqlite3.connect(root / "mlflow.db")) as database:
        database.execute("UPDATE alembic_version SET version_num = ?", [revision])
        database.commit()
    message = refusal(root)
    assert message.startswith(f"tracking.uri=sqlite:///{root}/mlflow.db: ")
    assert f"found version {revision}" in message
    assert advice in message


def test_postgresql_without_its_driver(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "psycopg2", None)
    message = refusal(tmp_path, "postgresql://user:secret@127.0.0.1:9/runs")
    assert "the database's driver psycopg2 is not installed; pip install 'psycopg2-binary" in message
    assert "secret" not in message


def test_postgresql_that_is_not_there(tmp_path):
    pytest.importorskip("psycopg2")
    message = refusal(tmp_path, "postgresql://user:secret@127.0.0.1:9/runs")
    assert message.startswith("tracking.uri=postgresql+psycopg2://***@127.0.0.1:9/runs: connection to server")
    assert "Connection refused" in message
    assert "sqlalche.me" not in message


def test_reading_does_not_make_a_store(tmp_path):
    with pytest.raises(TrackingError, match="nothing has been tracked there yet"):
        open_store(TrackingConfig(), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_reading_a_store(root):
    start(root).finish(RunStatus.FINISHED)
    store = open_store(TrackingConfig(), root)
    experiment = store.call("get_experiment_by_name", "kvlab").experiment_id
    (run,) = store.call("search_runs", [experiment])
    assert run.data.tags["kvlab.status"] == "finished"
