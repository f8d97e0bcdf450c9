"""How a store is reached: MLflow imported late, one process at a time, never waiting longer than agreed.

MLflow tries to open an unreachable store ten times, for a minute and a half, and processes that start on a fresh
store at once break each other's migration.
"""

import logging
import math
import os
import sqlite3
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

import filelock

from kvlab.errors import TrackingError
from kvlab.extras import install_command
from kvlab.secrets import without_credentials

LOCK_S = 120.0  # many processes may wait for a fresh store; the first takes seconds, each other a moment
SQLITE_BUSY_S = 20.0
_ADVISORY_KEY = 0x6B766C6162  # "kvlab": the same number in every process
T = TypeVar("T")


def import_client(timeout_s: float) -> Any:
    """MlflowClient, imported without telemetry, messages and minutes of retries; the user's environment wins."""
    keep_logging = "MLFLOW_LOGGING_LEVEL" in os.environ
    os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] = str(max(1, math.ceil(timeout_s)))
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")  # for a connection that the server closed
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    from mlflow.tracking import MlflowClient

    if not keep_logging:  # errors too: each comes back as an exception
        for name in ("mlflow", "alembic", "urllib3.connectionpool"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    return MlflowClient


def in_background(function: Callable[[], T]) -> Future[T]:
    """Call a function in a thread that does not keep the process alive."""
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=work, name="tracking", daemon=True).start()
    return future


def probe(uri: str, timeout_s: float) -> None:
    """Check that something at `uri` answers over HTTP, with any status. Raises OSError if not."""
    try:
        with suppress(urllib.error.HTTPError):
            urllib.request.urlopen(f"{without_credentials(uri).rstrip('/')}/health", timeout=timeout_s).close()
    except urllib.error.URLError as error:
        if not isinstance(error.reason, ssl.SSLError):  # MLflow has settings of its own for certificates
            raise error.reason if isinstance(error.reason, OSError) else error from None


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Hold the lock of a store that is a file, once the file, if there is one, is known to be writable."""
    path = path.resolve()  # one lock, whatever link leads there
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no directory {path.parent}")
    try:
        held = filelock.FileLock(f"{path}.lock").acquire(timeout=LOCK_S)
    except filelock.Timeout as error:
        raise TrackingError(f"another process has held {path}.lock for {LOCK_S:g} s") from error
    with held:
        if path.exists():
            with closing(sqlite3.connect(path, timeout=SQLITE_BUSY_S)) as connection:
                connection.execute("BEGIN IMMEDIATE")
                connection.execute("CREATE TABLE kvlab_may_write (x)")  # never committed
        yield


@contextmanager
def database_lock(uri: str, timeout_s: float) -> Iterator[None]:
    """Connect to a database server once; on PostgreSQL hold a lock that other machines see too."""
    from sqlalchemy import create_engine, text
    from sqlalchemy.engine import make_url
    from sqlalchemy.pool import NullPool

    url = make_url(uri)
    postgres = url.drivername.startswith("postgresql")
    try:
        # At least two: libpq takes one second as two.
        timeout = {"connect_timeout": max(2, math.ceil(timeout_s))} if postgres else {}
        engine = create_engine(url, poolclass=NullPool, connect_args=timeout)
    except ModuleNotFoundError as error:
        extra = f"; {install_command('postgres')} brings it" if postgres else ""
        raise TrackingError(f"the database's driver {error.name} is not installed{extra}") from error
    with engine.connect() as connection:
        if postgres:
            connection.execute(text(f"SET lock_timeout = {round(LOCK_S * 1000)}"))
            connection.execute(text(f"SELECT pg_advisory_lock({_ADVISORY_KEY})"))
        yield  # closing the connection releases the lock
