"""The one way to MLflow: it opens a store, calls it, and words what goes wrong."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from kvlab.config import TrackingConfig
from kvlab.errors import TrackingError
from kvlab.lab.settings import without_password
from kvlab.lab.tracking.client import import_client
from kvlab.lab.tracking.locks import LOCK_S, database_lock, file_lock
from kvlab.lab.tracking.reasons import reason, remedy
from kvlab.lab.tracking.timeouts import probe, within
from kvlab.lab.tracking.uri import is_database, is_server, is_sqlite, resolve_uri, sqlite_path

_KIND = {"mlflow.experimentKind": "custom_model_development"}  # or the page shows what is for chats


def open_store(config: TrackingConfig, root: Path, *, create: bool = False) -> Store:
    """Open the configured store, to read it or to write; `create` makes a file that is not there.

    Raises TrackingError for a store that cannot be used; one that does not answer is given up after
    `tracking.timeout_s`.
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
        self.is_server = is_server(uri)
        self.path: Path | None = None  # of a store that is a local file, once it is open
        self._client: Any = None

    def connect(self, *, create: bool = True) -> None:
        """Reach the store; without `create`, one that is a local file has to be there."""
        started = time.monotonic()
        with self._errors(opening=True):
            if is_sqlite(self.uri):
                self.path = sqlite_path(self.uri)
                if not create and not self.path.exists():
                    raise FileNotFoundError("nothing has been tracked there yet: there is no such file")
            if self.is_server:
                within(self.timeout_s, lambda: probe(self.uri, self.timeout_s))
            spent = time.monotonic() - started
            make_client = import_client(self.timeout_s)
            # An import is not the store's delay.
            self.deadline = time.monotonic() + self.timeout_s - spent
            if is_database(self.uri):
                within(self.timeout_s + LOCK_S, lambda: self._open_database(make_client))
                self.deadline = time.monotonic() + self.timeout_s
                return
            with self._door():
                self._client = self._bounded(lambda: make_client(tracking_uri=self.uri))

    def experiment_id(self, name: str, artifacts: str | None = None) -> str:
        """The id of the experiment of that name. Where there is none, it is created and keeps files at the URI
        `artifacts`; None: where the server says.
        """
        with self._errors(opening=True), self._door():
            return self._experiment_id(name, artifacts)

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

    def _door(self) -> AbstractContextManager[None]:
        return nullcontext() if self.path is None else file_lock(self.path)

    def _open_database(self, make_client: Callable[..., Any]) -> None:
        """A fresh database takes seconds to fill, and others may be before us."""
        with database_lock(self.uri, self.timeout_s):
            self._client = make_client(tracking_uri=self.uri)

    def _experiment_id(self, name: str, artifacts: str | None) -> str:
        client = self._client
        found = self._bounded(lambda: client.get_experiment_by_name(name))
        if found is None:
            try:
                make = partial(client.create_experiment, name, artifact_location=artifacts, tags=_KIND)
                return str(self._bounded(make))
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
    def _errors(self, *, opening: bool = False) -> Iterator[None]:
        try:
            yield
        except TrackingError as error:
            if str(error).startswith("tracking."):
                raise
            raise self._error(error, opening=opening) from error
        except TimeoutError as error:
            late = f"no answer within {self.timeout_s:g} s (tracking.timeout_s)"
            raise self._error(late, opening=opening) from error
        except Exception as error:  # MLflow's, SQLAlchemy's, requests', sqlite3's, the operating system's
            raise self._error(error, opening=opening) from error

    def _error(self, problem: object, *, opening: bool) -> TrackingError:
        help_ = remedy(problem, self.shown) if opening else ""
        return TrackingError(f"tracking.uri={self.shown}: {reason(problem)}{help_}")
