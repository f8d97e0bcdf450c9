"""Making an SQLite store at once: whenever a process is killed, under the store's name is a complete one or none.

MLflow makes its tables in hundreds of steps that take effect one by one. Killed between two, it can neither use nor
complete what is there. So it works on a file beside the store's, which is renamed at the end.
"""

import os
import sqlite3
from pathlib import Path
from uuid import uuid4


def make_if_needed(path: Path) -> None:
    """Make the store `path` unless there is one. The caller holds the store's lock."""
    if path.exists() and path.stat().st_size:
        return
    prefix = f"{path.name}.making-"
    # A new name each time: MLflow remembers stores by name.
    making = path.with_name(prefix + uuid4().hex[:8])
    try:
        making.touch()  # where that fails, MLflow would try for a minute and a half
        _fill(making)
        with making.open("rb+") as made:
            os.fsync(made.fileno())
        for suffix in ("-journal", "-wal", "-shm"):  # else SQLite would apply to this store what was another's
            path.with_name(path.name + suffix).unlink(missing_ok=True)
        making.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    finally:
        for left in path.parent.iterdir():  # those of killed processes too
            if left.name.startswith(prefix):
                left.unlink()


def _fill(path: Path) -> None:
    """Let MLflow make its tables and its first experiment in a new file, which the caller syncs as a whole."""
    from mlflow.store.tracking import DEFAULT_LOCAL_FILE_AND_ARTIFACT_PATH
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore
    from sqlalchemy import event
    from sqlalchemy.engine import URL, Engine

    def do_not_sync(connection: sqlite3.Connection, _: object) -> None:  # after each step, most of the time
        if any(file == str(path) for _, _, file in connection.execute("PRAGMA database_list")):
            connection.execute("PRAGMA synchronous = OFF")

    uri = URL.create("sqlite", database=str(path)).render_as_string()
    event.listen(Engine, "connect", do_not_sync)
    try:
        SqlAlchemyStore(uri, DEFAULT_LOCAL_FILE_AND_ARTIFACT_PATH).engine.dispose()
    finally:
        event.remove(Engine, "connect", do_not_sync)
