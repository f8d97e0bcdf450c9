"""The one way to MLflow: opens a store, calls it, and says in a sentence what went wrong and what would help."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from kvlab.config import TrackingConfig
from kvlab.errors import TrackingError
from kvlab.lab.tracking.access import LOCK_S, database_lock, file_lock, import_client, in_background, probe
from kvlab.lab.tracking.creation import make_if_needed
from kvlab.lab.tracking.uri import is_database, is_server, is_sqlite, resolve_uri, sqlite_path
from kvlab.secrets import redact

_KIND = {"mlflow.experimentKind": "custom_model_development"}  # or the page shows what is for chats
_REASON_CHARS = 400
_OTHER_STORES = "tracking.uri=sqlite:///<file>, tracking.uri=http://<host>:<port> or tracking=off"
_ADVICE = {  # for what a store says, of which the first holds that is found in it
    r"error code 40[13]\b": "the server requires a login: set MLFLOW_TRACKING_USERNAME and "
    "MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN, to an account that may write there, or use tracking=off",
    "password authentication failed|no password supplied": "put the right user and password into "
    "tracking.uri=postgresql://<user>:<password>@<host>/<database>",
    "malformed|not a database": f"bring back a copy of the file from before, or use {_OTHER_STORES}",
    "already exists|duplicate column|no such (table|column)": "MLflow may have been killed while it made this "
    f"store; move the file away, or use {_OTHER_STORES}",
    "disk is full": f"free some space there, or use {_OTHER_STORES}",
    "": f"use {_OTHER_STORES}",
}
_DISK = re.compile("disk|readonly|unable to open")  # what SQLite says of a file that it cannot write or read
_SCHEMA = re.compile(r"out-of-date database schema \(found version (\w+), but expected (\w+)\)")


def open_store(config: TrackingConfig, root: Path, *, create: bool = False) -> Store:
    """Open the configured store, to read it or to write; `create` makes a file that is not there.

    Raises TrackingError for a store that cannot be used, or does not answer within `tracking.timeout_s`.
    """
    store = Store(resolve_uri(config, root), config.timeout_s)
    store.connect(create=create)
    store.deadline = None
    return store


class Store:
    """An MLflow store, used through a client of its own: no global URI, no active run. `connect` first.

    Every failure is a TrackingError that names the store, without its password.
    """

    def __init__(self, uri: str, timeout_s: float) -> None:
        self.uri = uri
        self.shown = redact(uri)
        self.is_default = uri == resolve_uri(TrackingConfig(), Path())
        self.timeout_s = timeout_s
        self.deadline: float | None = None  # of all calls together; None: each has timeout_s of its own
        self.is_server = is_server(uri)
        self.path: Path | None = None  # of a store that is a local file, once it is open
        self._client: Any = None
        self._gone: TrackingError | None = None  # what it did not answer once; it is not asked again

    def connect(self, *, create: bool = True) -> None:
        """Reach the store; without `create`, one that is a local file has to be there."""
        with self._errors(opening=True):
            if is_sqlite(self.uri):
                self.path = sqlite_path(self.uri)
                if not create and not self.path.exists():
                    raise FileNotFoundError("nothing has been tracked there yet: there is no such file")
            make_client = partial(import_client(self.timeout_s), tracking_uri=self.uri)
            self.deadline = time.monotonic() + self.timeout_s  # an import is not the store's delay
            if is_database(self.uri):  # a fresh one takes seconds to fill, and others may come first
                self._client = in_background(partial(self._open_database, make_client)).result(
                    self.timeout_s + LOCK_S
                )
                self.deadline = time.monotonic() + self.timeout_s
                return
            if self.is_server:
                self._bounded(partial(probe, self.uri, self.timeout_s))
            with nullcontext() if self.path is None else file_lock(self.path):
                if self.path is not None:
                    make_if_needed(self.path.resolve())
                self._client = self._bounded(make_client)

    def experiment_id(self, name: str, artifacts: str | None = None) -> str:
        """The id of an experiment, created on demand with its files at the URI `artifacts` (None: the server's)."""
        find = partial(self._client.get_experiment_by_name, name)
        create = partial(self._client.create_experiment, name, artifact_location=artifacts, tags=_KIND)
        with self._errors(opening=True), nullcontext() if self.path is None else file_lock(self.path):
            entry = self._bounded(find)
            if entry is None:
                try:
                    return str(self._bounded(create))
                except Exception:  # on a server another client may have been faster
                    entry = self._bounded(find)
                    if entry is None:
                        raise
            if entry.lifecycle_stage == "deleted":
                raise TrackingError(
                    f"tracking.experiment={name}: was deleted in {self.shown}; choose another name, or bring it "
                    f"back: MLFLOW_TRACKING_URI={self.shown} mlflow experiments restore -x {entry.experiment_id}"
                )
            return str(entry.experiment_id)

    def call(self, method: str, *args: Any, bulk: bool = False, **kwargs: Any) -> Any:
        """Call a method of MlflowClient; `bulk` transfers are bounded request by request, not as a whole."""
        if self._gone is not None:
            raise self._gone
        with self._errors():
            function = partial(getattr(self._client, method), *args, **kwargs)
            return function() if bulk else self._bounded(function)

    def _bounded(self, function: Callable[[], Any]) -> Any:
        """What a function returns; TimeoutError at the deadline, wherever it hangs (resolving a name too)."""
        if self.path is not None:
            return function()
        left = self.timeout_s if self.deadline is None else self.deadline - time.monotonic()
        return in_background(function).result(max(left, 0.0))

    def _open_database(self, make_client: Callable[[], Any]) -> Any:
        with database_lock(self.uri, self.timeout_s):
            return make_client()

    @contextmanager
    def _errors(self, *, opening: bool = False) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # MLflow's, SQLAlchemy's, requests', sqlite3's, the operating system's
            if isinstance(error, TrackingError) and str(error).startswith("tracking."):
                raise
            reason = _reason(error, self.uri)
            if isinstance(error, TimeoutError):
                reason = f"no answer within {self.timeout_s:g} s (tracking.timeout_s)"
            if self.path is not None and not opening and not self.path.exists():
                reason = "the file was removed from its disk"
            advice = f"; {_advice(str(error), self.shown)}" if opening or _DISK.search(reason) else ""
            problem = TrackingError(f"tracking.uri={self.shown}: {reason}{advice}")
            if isinstance(error, TimeoutError) and not opening:
                self._gone = problem
            raise problem from None  # a cause may quote the address


def _reason(error: Exception, uri: str) -> str:
    """One line of what went wrong, without secrets, library names and stack traces."""
    text = " ".join(str(error).split())
    text = re.sub(r"\(Background on this error at: \S+\)", "", text)
    text = re.sub(r"\[SQL: .*", "", text)
    text = re.sub(r"^(\(raised as a result of [^)]*\) )?\((?:psycopg2|sqlite3|pymysql)\.\w+\) ", "", text)
    return redact(text, uri).strip()[:_REASON_CHARS]


def _advice(problem: str, shown: str) -> str:
    if versions := _SCHEMA.search(problem):
        import mlflow.store.db_migrations

        (package,) = mlflow.store.db_migrations.__path__
        if any(Path(package, "versions").glob(f"{versions[1]}_*.py")):
            return f"after a backup, mlflow db upgrade {shown} brings it up to date; or move the file away"
        return f"a newer MLflow made it: install that one, or take another store: {_OTHER_STORES}"
    return next(advice for pattern, advice in _ADVICE.items() if re.search(pattern, problem))
