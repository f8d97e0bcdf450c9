"""The one door to MLflow: it opens a store, calls it, and words what goes wrong."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import filelock

from kvlab.config import TrackingConfig
from kvlab.errors import TrackingError
from kvlab.lab.tracking.client import import_client
from kvlab.lab.tracking.patience import probe, within
from kvlab.lab.tracking.uri import resolve_uri, sqlite_path, without_password

_LOCK_S = 120.0  # many processes may queue for a fresh store; each after the first is there in a moment
_SQLITE_BUSY_S = 20.0


def open_store(config: TrackingConfig, root: Path, *, create: bool = False) -> Store:
    """Open the configured store, to read it or to write; `create` makes a local one that is not there.

    Raises TrackingError for a store that cannot be used, or is given up after `tracking.timeout_s`.
    """
    store = Store(resolve_uri(config, root), config.timeout_s)
    store.connect(create=create)
    store.deadline = None
    return store


class Store:
    """An MLflow store, used through a client of its own: no global URI, no active run.

    `connect` first. Every failure is a TrackingError that names the store, without its password.
    """

    def __init__(self, uri: str, timeout_s: float) -> None:
        self.uri = uri
        self.shown = without_password(uri)
        self.timeout_s = timeout_s
        self.deadline: float | None = None  # of all calls together; None: each has timeout_s of its own
        self.is_server = uri.startswith(("http://", "https://"))
        self.path: Path | None = None  # of a store that is a local file, once it is open
        self._client: Any = None

    def connect(self, *, create: bool = True) -> None:
        """Reach the store; without `create`, one that is a local file has to be there."""
        started = time.monotonic()
        with self._errors(opening=True):
            if self.uri.startswith(("sqlite:", "sqlite+")):
                self.path = sqlite_path(self.uri)
                if not create and not self.path.exists():
                    raise FileNotFoundError("nothing has been tracked there yet: there is no such file")
            if self.is_server:
                within(self.timeout_s, lambda: probe(self.uri, self.timeout_s))
            spent = time.monotonic() - started
            make_client = import_client(self.timeout_s)
            self.deadline = time.monotonic() + self.timeout_s - spent  # an import is not the store's delay
            with self._exclusive():
                self._client = self._bounded(lambda: make_client(tracking_uri=self.uri))

    def experiment_id(self, name: str) -> str:
        """The id of the experiment of that name, which is created where there is none."""
        with self._errors(opening=True), self._exclusive():
            return self._experiment_id(name)

    def call(self, method: str, *args: Any, bulk: bool = False, **kwargs: Any) -> Any:
        """Call a method of MlflowClient; `bulk` transfers are bounded request by request, not as a whole."""
        with self._errors():
            function = getattr(self._client, method)
            return function(*args, **kwargs) if bulk else self._bounded(lambda: function(*args, **kwargs))

    def _bounded(self, function: Callable[[], Any]) -> Any:
        if self.path is not None:
            return function()
        left = self.timeout_s if self.deadline is None else self.deadline - time.monotonic()
        return within(max(left, 0.0), function)

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
        text = without_password(" ".join(str(reason).split()))[:400]
        remedy = "; use tracking.uri=sqlite:///<file>, tracking.uri=http://<host>:<port> or tracking=off"
        return TrackingError(f"tracking.uri={self.shown}: {text}{remedy if opening else ''}")
