"""Tracking in a process beside: importing MLflow takes as long as importing PyTorch, and two threads of one process
cannot import at once. The process starts before the run is planned and ends with the one that started it.
"""

import os
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from kvlab.config import TrackingConfig
from kvlab.confined import end_module, start_module
from kvlab.errors import TrackingError
from kvlab.lab.tracking.access import import_client
from kvlab.lab.tracking.base import Point, RunStatus, Tracker
from kvlab.lab.tracking.mlflow_tracker import start_run
from kvlab.lab.tracking.uri import is_server, resolve_uri
from kvlab.secrets import take_from_environment, taken_from_environment


class TrackingProcess:
    """A process that has imported what the store of `config` needs. `pid` is its number."""

    def __init__(self, config: TrackingConfig) -> None:
        running, self._connection = start_module(__name__)
        self.pid = running.pid
        self._one = threading.Lock()
        weakref.finalize(self, end_module, running, self._connection, os.getpid())
        self._connection.send((config, taken_from_environment()))

    def start_run(self, config: TrackingConfig, **run: Any) -> Tracker:
        """See `kvlab.lab.tracking.start_run`."""
        return _TrackerBeside(self, *self.ask("start_run", config, **run))

    def ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """What `start_run` or a method of its tracker returns there. Raises TrackingError."""
        try:
            with self._one:
                self._connection.send((method, args, kwargs))
                error, answer = self._connection.recv()
        except (EOFError, OSError):
            raise TrackingError(f"tracking: process {self.pid}, which writes to the store, has ended") from None
        if error is not None:
            raise TrackingError(error)
        return answer


class _TrackerBeside(Tracker):
    """A run whose tracker is in another process, which is asked for each call."""

    def __init__(self, process: TrackingProcess, run_id: str | None, where: str) -> None:
        self.run_id = run_id
        self._process, self._where = process, where

    def log_metrics(self, metrics: Mapping[str, float]) -> None:
        self._process.ask("log_metrics", metrics)

    def log_series(self, series: Mapping[str, Sequence[Point]]) -> None:
        self._process.ask("log_series", series)

    def watch_system(self) -> None:
        self._process.ask("watch_system")

    def log_artifacts(self, directory: Path) -> None:
        self._process.ask("log_artifacts", directory)

    def finish(self, status: RunStatus, error: str | None = None) -> None:
        self._process.ask("finish", status, error)

    def where(self) -> str:
        return self._where


def _serve(connection: Connection) -> None:
    """Be the tracker of the process at the other end, as long as that is there."""
    config, taken = connection.recv()
    for name in taken:
        take_from_environment(name)
    import_client(config.timeout_s)
    if not is_server(resolve_uri(config, Path())):
        import mlflow.store.tracking.sqlalchemy_store  # noqa: F401

    tracker = Tracker()
    while True:
        method, args, kwargs = connection.recv()
        error = answer = None
        try:
            if method == "start_run":
                tracker = start_run(*args, **kwargs)
                answer = tracker.run_id, tracker.where()
            else:
                answer = getattr(tracker, method)(*args)
        except TrackingError as problem:
            error = str(problem)
        except Exception as problem:
            error = f"tracking: {type(problem).__name__}: {problem}"
        connection.send((error, answer))


if __name__ == "__main__":
    try:
        _serve(Connection(int(sys.argv[1])))
    except (EOFError, OSError):  # the other process has ended
        os._exit(0)
