"""Making an SQLite store at once: whenever a process is killed, under the store's name is a complete one or none.

MLflow makes its tables in hundreds of steps that take effect one by one. Killed between two, it can neither use nor
complete what is there. So it works on a file beside the store's, which is renamed at the end.
"""

from __future__ import annotations

import logging
import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from uuid import uuid4

from kvlab.errors import TrackingError
from kvlab.lab.tracking.access import SQLITE_BUSY_S

_log = logging.getLogger(__name__)
_TEMPORARY = "_alembic_tmp_"  # a table that a migration makes, fills, and gives the name of the one it replaces
_ALWAYS_FILLED = {"alembic_version", "workspaces"}  # in a store that holds nothing


def make_if_needed(path: Path) -> None:
    """Make the store `path` if there is none, or one that was left half-made and holds nothing, of which a copy is
    kept. The caller holds the store's lock.

    Raises TrackingError for a store whose upgrade was cut off and that holds something, sqlite3.Error for a file
    that is no database.
    """
    if not path.exists() or not path.stat().st_size:
        _make(path)
    elif _is_half_made(path):
        copy = path.with_name(f"{path.name}.half-made")
        shutil.copy2(path, copy)
        _make(path)
        _log.warning("%s was left half-made by a process that was killed: made again; a copy is %s", path, copy)


def _make(path: Path) -> None:
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
    """Let MLflow make its tables and its first experiment in a new file."""
    from mlflow.store.tracking import DEFAULT_LOCAL_FILE_AND_ARTIFACT_PATH
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore
    from sqlalchemy.engine import URL

    uri = URL.create("sqlite", database=str(path)).render_as_string()
    SqlAlchemyStore(uri, DEFAULT_LOCAL_FILE_AND_ARTIFACT_PATH).engine.dispose()


def _is_half_made(path: Path) -> bool:
    """Whether a store was left half-made and holds nothing. Raises TrackingError if it holds something."""
    with closing(sqlite3.connect(path, timeout=SQLITE_BUSY_S)) as database:
        query = "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
        tables = {name for (name,) in database.execute(query)}

        def first(table: str) -> str | None:
            """The first value of a table, as text; None if there is no row."""
            row = database.execute(f'SELECT * FROM "{table}" LIMIT 1').fetchone() if table in tables else None
            return None if row is None else str(row[0])

        if tables and not tables & {"experiments", f"{_TEMPORARY}experiments"}:
            return False  # another program's
        left = sorted(table for table in tables if table.startswith(_TEMPORARY))
        revision = first("alembic_version")
        # MLflow makes the first experiment when all else is done.
        if revision is not None and not left and first("experiments") is not None:
            return False
        if revision is not None and not _is_older(revision):
            return False
        if not any(first(table) is not None for table in tables - _ALWAYS_FILLED):
            return True
    if left:
        repair = "; ".join(
            f"ALTER TABLE {table} RENAME TO {name}" if name not in tables else f"DROP TABLE {table}"
            for table, name in ((table, table.removeprefix(_TEMPORARY)) for table in left)
        )
        raise TrackingError(
            "MLflow was killed while it upgraded this store; keep a copy of it, then execute in it "
            f"{repair}, and run mlflow db upgrade sqlite:///{path}"
        )
    return False


def _is_older(revision: str) -> bool:
    """Whether this MLflow knows a store's revision, and has a later one."""
    import mlflow.store.db_migrations
    from alembic.script import ScriptDirectory

    scripts = ScriptDirectory(next(iter(mlflow.store.db_migrations.__path__)))
    return revision not in scripts.get_heads() and revision in {
        script.revision for script in scripts.walk_revisions()
    }
