"""What is done before MLflow touches a store: see that it is there, and make sure that one process creates it.

MLflow tries to open a hopeless store ten times, for a minute and a half, and processes that start on a fresh one at
once break each other's migration.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import filelock

from kvlab.errors import TrackingError

LOCK_S = 120.0  # many processes may queue for a fresh store; each after the first is there in a moment
SQLITE_BUSY_S = 20.0
_ADVISORY_KEY = 0x6B766C6162  # "kvlab": the same number in every process


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Hold the lock of a store that is a file, which is seen to be writable."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no directory {path.parent}")
    try:
        held = filelock.FileLock(f"{path}.lock").acquire(timeout=LOCK_S)
    except filelock.Timeout as error:
        raise TrackingError(f"another process has held {path}.lock for {LOCK_S:g} s") from error
    with held:
        with closing(sqlite3.connect(path, timeout=SQLITE_BUSY_S)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("CREATE TABLE kvlab_may_write (x)")  # and never commit it
        yield


@contextmanager
def database_lock(uri: str, timeout_s: float) -> Iterator[None]:
    """Connect to a database server once, and where it is PostgreSQL hold a lock that other machines see too."""
    from sqlalchemy import create_engine, text
    from sqlalchemy.engine import make_url
    from sqlalchemy.pool import NullPool

    url = make_url(uri)
    postgres = url.drivername.startswith("postgresql")
    try:
        # Rounded up to two: below that libpq counts differently.
        patience = {"connect_timeout": max(2, math.ceil(timeout_s))} if postgres else {}
        engine = create_engine(url, poolclass=NullPool, connect_args=patience)
    except ModuleNotFoundError as error:
        extra = "; pip install 'kvlab[postgres]' brings it" if postgres else ""
        raise TrackingError(f"the database's driver {error.name} is not installed{extra}") from error
    with engine.connect() as connection:
        if postgres:
            connection.execute(text(f"SET lock_timeout = {round(LOCK_S * 1000)}"))
            connection.execute(text(f"SELECT pg_advisory_lock({_ADVISORY_KEY})"))
        yield  # closing the connection gives the lock back
