"""Making an SQLite store: a killed process leaves a complete one or none."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import count
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient
from sqlalchemy import event
from sqlalchemy.engine import Engine

from kvlab.errors import TrackingError
from kvlab.lab.tracking import RunStatus, creation
from kvlab.lab.tracking.creation import make_if_needed
from tests.support.tracking import empty_store, start

OLD = "2d6e25af4d3e"  # a revision of MLflow's tables that it has long left behind


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.fixture
def fill(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Where stores were made, by a copy in place of MLflow."""
    made: list[Path] = []
    store = empty_store()

    def copy(path: Path) -> None:
        path.write_bytes(store)
        made.append(path)

    monkeypatch.setattr(creation, "_fill", copy)
    return made


def write(path: Path, *statements: str) -> bytes:
    with closing(sqlite3.connect(path)) as database:
        for statement in statements:
            database.execute(statement)
        database.commit()
    return path.read_bytes()


def tables(*names: str) -> list[str]:
    return [f"CREATE TABLE {name} (x TEXT)" for name in names]


def version(revision: str) -> list[str]:
    return [
        "CREATE TABLE IF NOT EXISTS alembic_version (version_num TEXT)",
        "DELETE FROM alembic_version",
        f"INSERT INTO alembic_version VALUES ('{revision}')",
    ]


def killed(work: Callable[[], object]) -> None:
    """Do the work in a process that kills itself before it is done."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def cut_off(path: Path) -> None:
    write(path, *tables("experiments", "runs", "_alembic_tmp_params"))
    die()


def die_renamed(path: Path, target: Path) -> None:
    os.replace(path, target)
    die()


@pytest.mark.parametrize(
    ("patched", "fatal", "there"),
    [("_fill", cut_off, False), ("os.fsync", die, False), ("Path.replace", die_renamed, True)],
    ids=["filling", "filled", "renamed"],
)
def test_killed_while_a_store_is_made_the_next_process_makes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fill: list[Path], patched: str, fatal: object, there: bool
) -> None:
    store = tmp_path / "mlflow.db"
    with monkeypatch.context() as patch:
        patch.setattr(f"kvlab.lab.tracking.creation.{patched}", fatal)
        killed(lambda: make_if_needed(store))
    assert store.exists() is there
    make_if_needed(store)
    assert store.read_bytes() == empty_store()
    assert list(tmp_path.iterdir()) == [store]
    assert len(fill) == (0 if there else 1)


def test_an_empty_file_becomes_a_store(tmp_path: Path, fill: list[Path]) -> None:
    (tmp_path / "mlflow.db").touch()
    make_if_needed(tmp_path / "mlflow.db")
    assert [path.name for path in tmp_path.iterdir()] == ["mlflow.db"]


@pytest.mark.parametrize(
    "there",
    [
        [*tables("experiments"), *version(OLD), "INSERT INTO experiments VALUES ('0')"],
        [*tables("experiments"), *version("ffffffffffff")],
        [*tables("experiments", "_alembic_tmp_params"), *version("ffffffffffff")],
        [*tables("experiments"), "INSERT INTO experiments VALUES ('mine')"],
        tables("studies", "trials"),
    ],
    ids=["older", "newer", "newer and half-made", "without version", "another program's"],
)
def test_another_store_is_left_as_it_is(tmp_path: Path, fill: list[Path], there: list[str]) -> None:
    store = tmp_path / "mlflow.db"
    before = write(store, *there)
    make_if_needed(store)
    assert store.read_bytes() == before
    assert list(tmp_path.iterdir()) == [store]


def test_the_journal_of_a_store_that_was_deleted_is_not_applied_to_the_new_one(
    tmp_path: Path, fill: list[Path]
) -> None:
    store = tmp_path / "mlflow.db"
    for suffix in ("-journal", "-wal", "-shm"):
        (tmp_path / f"mlflow.db{suffix}").write_bytes(b"of another file")
    make_if_needed(store)
    assert list(tmp_path.iterdir()) == [store]


def test_a_link_keeps_pointing_at_its_store(tmp_path: Path, fill: list[Path]) -> None:
    (tmp_path / "shared").mkdir()
    link, target = tmp_path / "mlflow.db", tmp_path / "shared" / "store.db"
    link.symlink_to(target)
    start(tmp_path).finish(RunStatus.FINISHED)
    assert link.is_symlink()
    assert target.stat().st_size > 0
    assert {path.name for path in target.parent.iterdir()} == {"store.db", "store.db.lock"}


def test_a_store_is_synced_once_as_it_is_made_and_at_each_step_after(tmp_path: Path) -> None:
    found: set[tuple[str, int]] = set()

    def listener(connection: sqlite3.Connection, *_: object) -> None:
        _, _, file = connection.execute("PRAGMA database_list").fetchone()
        found.add((Path(file).name.partition("-")[0], *connection.execute("PRAGMA synchronous").fetchone()))

    event.listen(Engine, "checkout", listener)
    start(tmp_path).finish(RunStatus.FINISHED)
    event.remove(Engine, "checkout", listener)
    assert found == {("mlflow.db.making", 0), ("mlflow.db", 2)}


def test_a_store_that_cannot_be_made_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path) -> None:
        write(path, *tables("experiments"))
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(creation, "_fill", full)
    with pytest.raises(TrackingError, match="database or disk is full"):
        start(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mlflow.db.lock"]


@pytest.mark.parametrize("size", [50, 100, 4096, 100_000, 500_000])
def test_a_store_that_is_cut_off_is_a_sentence(tmp_path: Path, size: int) -> None:
    (tmp_path / "mlflow.db").write_bytes(empty_store()[:size])
    began = time.monotonic()
    with pytest.raises(TrackingError) as raised:
        start(tmp_path)
    message = str(raised.value)
    assert message.startswith(f"tracking.uri=sqlite:///{tmp_path}/mlflow.db: ")
    assert "bring back a copy of the file from before" in message
    assert "SELECT" not in message
    assert "\n" not in message
    assert time.monotonic() - began < 15  # MLflow by itself tries for a minute and a half


@pytest.mark.slow
def test_wherever_mlflow_is_killed_the_next_run_has_a_store(tmp_path: Path) -> None:
    """With MLflow's own tables."""
    for stage in (20, 300, 1000):
        statements = count(1)

        def listener(*_: object, stage: int = stage, statements: Iterator[int] = statements) -> None:
            if next(statements) == stage:
                die()

        event.listen(Engine, "before_cursor_execute", listener)
        killed(lambda: start(tmp_path))
        event.remove(Engine, "before_cursor_execute", listener)
        assert [path.name.partition(".making-")[0] for path in tmp_path.iterdir() if ".making-" in path.name]
        assert not (tmp_path / "mlflow.db").exists()
    start(tmp_path).finish(RunStatus.FINISHED)
    assert {path.name for path in tmp_path.iterdir()} == {"mlflow.db", "mlflow.db.lock"}


@pytest.mark.slow
def test_a_store_that_mlflow_alone_left_half_made_is_a_sentence(tmp_path: Path) -> None:
    """kvlab does not mend it. It says what is wrong, and what would do."""
    growing, statements = tmp_path / "growing.db", count(1)
    cut_at = (50, 250, 650)  # a column, a temporary table, another column

    def listener(*_: object) -> None:
        number = next(statements)
        if number in cut_at:
            (tmp_path / str(number)).mkdir()
            shutil.copy(growing, tmp_path / str(number) / "mlflow.db")

    def do_not_sync(connection: sqlite3.Connection, _: object) -> None:
        connection.execute("PRAGMA synchronous = OFF")

    event.listen(Engine, "connect", do_not_sync)
    event.listen(Engine, "before_cursor_execute", listener)
    MlflowClient(tracking_uri=f"sqlite:///{growing}")
    event.remove(Engine, "before_cursor_execute", listener)
    event.remove(Engine, "connect", do_not_sync)
    for number in cut_at:
        store = tmp_path / str(number) / "mlflow.db"
        with pytest.raises(TrackingError) as raised:
            start(store.parent)
        message = str(raised.value)
        assert message.startswith(f"tracking.uri=sqlite:///{store}: ")
        assert "MLflow may have been killed while it made this store; move the file away, or use " in message
        assert "\n" not in message
