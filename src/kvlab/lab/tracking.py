"""Where runs are recorded: an MLflow store, or nowhere.

The only module that knows MLflow. It is imported when a run starts, not before (it takes a second), and
used through a client of its own: no active run, no global URI, so several runs can be tracked in one
process. Whatever goes wrong with a store is a `TrackingError` that names it.
"""

from __future__ import annotations

import logging
import math
import os
import re
import shlex
import sqlite3
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from threading import Thread
from typing import Any

import filelock

from kvlab.config import TrackingConfig
from kvlab.errors import TrackingError
from kvlab.lab.provenance import provenance

SERIES_POINTS = 320  # what MLflow's page shows of a metric with steps

_PARAM_CHARS, _TAG_CHARS = 6000, 8000
_LOCK_S = 120.0  # many processes may queue for a fresh store; each after the first is there in a moment
_SQLITE_BUSY_S = 20.0

Point = tuple[int, float, float]  # step, seconds since the run started, value


class RunStatus(StrEnum):
    """How a run ended."""

    FINISHED = "finished"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    OUT_OF_MEMORY = "out_of_memory"


_MLFLOW_STATUS = {
    RunStatus.FINISHED: "FINISHED",
    RunStatus.FAILED: "FAILED",
    RunStatus.INTERRUPTED: "KILLED",
    RunStatus.OUT_OF_MEMORY: "FAILED",
}
_MLFLOW_NAMES = {
    "user": "mlflow.user",
    "program": "mlflow.source.name",
    "git.commit": "mlflow.source.git.commit",
}


class Tracker:
    """One run's record: the contract, each call of which does nothing here.

    A store that does not take what it is given raises TrackingError, and nothing else.
    """

    run_id: str | None = None  # in the store; None where nothing is recorded

    def log_metrics(self, metrics: Mapping[str, float]) -> None:
        """Record final figures, each name once; values that are not finite are left out."""

    def log_series(self, series: Mapping[str, Sequence[Point]]) -> None:
        """Record each sequence of points as `series/<name>`; values that are not finite are left out.

        More than SERIES_POINTS points are sampled evenly, first and last included.
        """

    def log_artifacts(self, directory: Path) -> None:
        """Store what is in a directory with the run."""

    def finish(self, status: RunStatus, error: str | None = None) -> None:
        """Close the run: MLflow's own status, ours as tag `kvlab.status`, `error` as tag `kvlab.error`."""

    def where(self) -> str:
        """Tell how to look at the run: the command that opens the store and a URL, on two lines.

        For a tracking server the URL alone.
        """
        return "not tracked (tracking=off)"


class NullTracker(Tracker):
    """Records nothing."""


class MlflowTracker(Tracker):
    """A run in an MLflow store; `start_run` makes one. Tracker says what the methods do."""

    def __init__(self, store: _Store, experiment_id: str, run_id: str, started_ms: int) -> None:
        self.run_id = run_id
        self._store = store
        self._started_ms = started_ms
        self._fragment = f"/#/experiments/{experiment_id}/runs/{run_id}"

    def log_params(self, params: Mapping[str, object]) -> None:
        """Record flat keys; values are written as text, cut to what MLflow takes."""
        from mlflow.entities import Param

        self._log_batch(params=[Param(key, str(value)[:_PARAM_CHARS]) for key, value in params.items()])

    def log_metrics(self, metrics: Mapping[str, float]) -> None:
        """Record final figures."""
        # All at step 0: a name logged with steps in any run turns MLflow's bar charts into lines.
        now = time.time_ns() // 1_000_000
        self._log_points((name, value, now, 0) for name, value in metrics.items() if math.isfinite(value))

    def log_series(self, series: Mapping[str, Sequence[Point]]) -> None:
        """Record sampled series."""
        self._log_points(
            (f"series/{name}", value, self._started_ms + round(seconds * 1000), step)
            for name, points in series.items()
            for step, seconds, value in _sample([point for point in points if math.isfinite(point[2])])
        )

    def log_artifacts(self, directory: Path) -> None:
        """Store a directory's files."""
        if not directory.is_dir():
            raise TrackingError(f"artifacts in {directory}: there is no such directory")
        self._store.call("log_artifacts", self.run_id, str(directory), bulk=True)

    def finish(self, status: RunStatus, error: str | None = None) -> None:
        """Close the run."""
        from mlflow.entities import RunTag

        tags = {"kvlab.status": status.value} | ({} if error is None else {"kvlab.error": error})
        self._log_batch(tags=[RunTag(key, value[:_TAG_CHARS]) for key, value in tags.items()])
        self._store.call("set_terminated", self.run_id, _MLFLOW_STATUS[status])

    def where(self) -> str:
        """Tell how to look at the run."""
        if self._store.is_server:
            return self._store.shown.rstrip("/") + self._fragment
        uri, path = self._store.shown, self._store.path
        if path is not None and path.parent == Path.cwd():
            uri = f"sqlite:///{path.name}"
        return f"mlflow ui --backend-store-uri {shlex.quote(uri)}\nhttp://127.0.0.1:5000{self._fragment}"

    def _log_points(self, points: Iterator[tuple[str, float, int, int]]) -> None:
        from mlflow.entities import Metric

        self._log_batch(metrics=[Metric(name, float(value), at_ms, step) for name, value, at_ms, step in points])

    def _log_batch(self, **entities: Any) -> None:
        # The client splits it into what one request may hold.
        self._store.call("log_batch", self.run_id, synchronous=True, **entities)


def resolve_uri(config: TrackingConfig, root: Path) -> str:
    """Return the store's URI: `tracking.uri`, else MLFLOW_TRACKING_URI, else an SQLite file in `root`."""
    default = f"sqlite:///{root.resolve() / 'mlflow.db'}"
    return config.uri or os.environ.get("MLFLOW_TRACKING_URI") or default


def start_run(
    config: TrackingConfig,
    *,
    root: Path,
    run_name: str,
    params: Mapping[str, object],
    tags: Mapping[str, str],
    parent_run_id: str | None = None,
) -> Tracker:
    """Open a run in the configured store; a local store and the experiment are created on demand.

    `params` is the whole configuration under flat dotted keys. `tags` are added to those that say who and
    what made the run, from which commit in `root`. Raises TrackingError for a store that cannot be used; one
    that does not answer is given up after `tracking.timeout_s` in all.
    """
    if config.backend == "off":
        return NullTracker()
    store = _Store(resolve_uri(config, root), config.timeout_s)
    facts = provenance(root).items()
    all_tags = {_MLFLOW_NAMES.get(key, key): value for key, value in facts} | dict(tags)
    if parent_run_id is not None:
        all_tags["mlflow.parentRunId"] = parent_run_id
    experiment_id = store.open(config.experiment)
    cut_tags = {key: str(value)[:_TAG_CHARS] for key, value in all_tags.items()}
    run = store.call("create_run", experiment_id, tags=cut_tags, run_name=run_name)
    tracker = MlflowTracker(store, experiment_id, run.info.run_id, run.info.start_time)
    try:
        tracker.log_params(params)
    except TrackingError as error:
        with suppress(TrackingError):
            tracker.finish(RunStatus.FAILED, str(error))
        raise
    store.deadline = None
    return tracker


class _Store:
    """The one door to MLflow: it opens a store, calls it, and words what goes wrong."""

    def __init__(self, uri: str, timeout_s: float) -> None:
        self.uri = uri
        self.shown = _without_password(uri)
        self.timeout_s = timeout_s
        self.deadline: float | None = None  # of all calls together; None: each has timeout_s of its own
        self.is_server = uri.startswith(("http://", "https://"))
        self.path: Path | None = None  # of a store that is a local file, once it is open
        self._client: Any = None

    def open(self, experiment: str) -> str:
        """Connect, creating what is missing; return the experiment's id."""
        started = time.monotonic()
        with self._errors(opening=True):
            if self.uri.startswith(("sqlite:", "sqlite+")):
                self.path = _sqlite_path(self.uri)
            if self.is_server:
                _within(self.timeout_s, lambda: _probe(self.uri, self.timeout_s))
            spent = time.monotonic() - started
            make_client = _import_client(self.timeout_s)
            self.deadline = time.monotonic() + self.timeout_s - spent  # an import is not the store's delay
            with self._exclusive():
                self._client = self._bounded(lambda: make_client(tracking_uri=self.uri))
                return self._experiment_id(experiment)

    def call(self, method: str, *args: Any, bulk: bool = False, **kwargs: Any) -> Any:
        """Call a method of MlflowClient; `bulk` transfers are bounded request by request, not as a whole."""
        with self._errors():
            function = getattr(self._client, method)
            return function(*args, **kwargs) if bulk else self._bounded(lambda: function(*args, **kwargs))

    def _bounded(self, function: Callable[[], Any]) -> Any:
        if self.path is not None:
            return function()
        left = self.timeout_s if self.deadline is None else self.deadline - time.monotonic()
        return _within(max(left, 0.0), function)

    def _experiment_id(self, name: str) -> str:
        client = self._client
        found = self._bounded(lambda: client.get_experiment_by_name(name))
        if found is None:
            # MLflow's default is relative to the working directory.
            artifacts = (self.path.parent / "mlartifacts").as_uri() if self.path else None
            try:
                return str(self._bounded(lambda: client.create_experiment(name, artifact_location=artifacts)))
            except Exception:  # on a server another client may have been faster
                found = self._bounded(lambda: client.get_experiment_by_name(name))
                if found is None:
                    raise
        if found.lifecycle_stage == "deleted":
            raise TrackingError(
                f"tracking.experiment={name}: was deleted in {self.shown}; choose another name, or bring it "
                f"back: MLFLOW_TRACKING_URI={self.shown} mlflow experiments restore -x {found.experiment_id}"
            )
        return str(found.experiment_id)

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Hold the lock of a local store: processes that start on a fresh one at once break its migration."""
        if self.path is None:
            yield
            return
        if not self.path.parent.is_dir():
            raise FileNotFoundError(f"there is no directory {self.path.parent}")
        with filelock.FileLock(f"{self.path}.lock", timeout=_LOCK_S):
            # MLflow tries to open a hopeless file ten times, for a minute and a half; one try will do.
            with closing(sqlite3.connect(self.path, timeout=_SQLITE_BUSY_S)) as connection:
                connection.execute("BEGIN IMMEDIATE")
                connection.execute("CREATE TABLE kvlab_may_write (x)")  # and never commit it
            yield

    @contextmanager
    def _errors(self, *, opening: bool = False) -> Iterator[None]:
        try:
            yield
        except TrackingError:
            raise
        except filelock.Timeout as error:
            held = f"another process has held {error.lock_file} for {_LOCK_S:g} s"
            raise self._error(held, opening=opening) from error
        except TimeoutError as error:
            late = f"no answer within {self.timeout_s:g} s (tracking.timeout_s)"
            raise self._error(late, opening=opening) from error
        except Exception as error:  # MLflow's, SQLAlchemy's, requests', sqlite3's, the operating system's
            raise self._error(error, opening=opening) from error

    def _error(self, reason: object, *, opening: bool) -> TrackingError:
        text = _without_password(" ".join(str(reason).split()))[:400]
        remedy = "; use tracking.uri=sqlite:///<file>, tracking.uri=http://<host>:<port> or tracking=off"
        return TrackingError(f"tracking.uri={self.shown}: {text}{remedy if opening else ''}")


def _sqlite_path(uri: str) -> Path:
    from sqlalchemy.engine import make_url  # its versions differ in how they read escapes

    database = make_url(uri).database
    if database in (None, "", ":memory:"):
        raise ValueError("a store in memory is lost when the process ends")
    return Path(database).absolute()


def _import_client(timeout_s: float) -> Any:
    """Import MLflow without its telemetry, its messages and its minutes of retrying; the user's wish wins."""
    wanted = "MLFLOW_LOGGING_LEVEL" in os.environ
    os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] = str(max(1, math.ceil(timeout_s)))
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")  # one, for a connection gone stale
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    from mlflow.tracking import MlflowClient

    if not wanted:  # errors too: each comes back as an exception
        for name in ("mlflow", "alembic", "urllib3.connectionpool"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    return MlflowClient


def _within(seconds: float, function: Callable[[], Any]) -> Any:
    """Return what `function` returns; TimeoutError after `seconds`, wherever it hangs (resolving a name too)."""
    future: Future[Any] = Future()

    def work() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=work, daemon=True).start()
    return future.result(timeout=seconds)


def _probe(uri: str, timeout_s: float) -> None:
    """See that something at `uri` speaks HTTP; raises OSError if not. Any status will do."""
    try:
        urllib.request.urlopen(f"{_without_password(uri).rstrip('/')}/health", timeout=timeout_s).close()
    except urllib.error.HTTPError:
        return
    except urllib.error.URLError as error:
        if isinstance(error.reason, ssl.SSLError):
            return  # MLflow has settings of its own for certificates
        raise error.reason if isinstance(error.reason, OSError) else error from None


def _sample(points: Sequence[Point]) -> Sequence[Point]:
    if len(points) <= SERIES_POINTS:
        return points
    last = len(points) - 1
    return [points[round(index * last / (SERIES_POINTS - 1))] for index in range(SERIES_POINTS)]


def _without_password(text: str) -> str:
    return re.sub(r"(?<=://)[^/\s]*@", "", text)
