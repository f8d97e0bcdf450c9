"""The address of the tracking store: from the settings, the environment, or the working directory."""

import os
import re
from pathlib import Path

from kvlab.config import TrackingConfig


def resolve_uri(config: TrackingConfig, root: Path) -> str:
    """Return the store's URI: `tracking.uri`, else MLFLOW_TRACKING_URI, else an SQLite file in `root`.

    PostgreSQL's has the driver that kvlab's extra installs: SQLAlchemy's own choice differs by version.
    """
    uri = config.uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{root.resolve() / 'mlflow.db'}"
    return re.sub("^postgres(ql)?://", "postgresql+psycopg2://", uri)


def resolve_artifacts(config: TrackingConfig, root: Path, uri: str) -> str | None:
    """Where an experiment created in the store at `uri` keeps files; None: where its server says. (MLflow's own
    default is a folder in the working directory.)
    """
    if config.artifacts:
        is_uri = "://" in config.artifacts
        return config.artifacts if is_uri else Path(config.artifacts).expanduser().absolute().as_uri()
    if is_server(uri):
        return None
    folder = sqlite_path(uri).parent if is_sqlite(uri) else root.resolve()
    return (folder / "mlartifacts").as_uri()


def is_server(uri: str) -> bool:
    """Whether an MLflow server is meant."""
    return uri.startswith(("http://", "https://"))


def is_sqlite(uri: str) -> bool:
    """Whether a file on this machine is meant."""
    return uri.startswith(("sqlite:", "sqlite+"))


def is_database(uri: str) -> bool:
    """Whether a database server is meant, without an MLflow server before it."""
    return uri.startswith(("postgresql", "mysql", "mssql"))


def sqlite_path(uri: str) -> Path:
    """The file of an SQLite store. Raises ValueError for a store in memory, which ends with the process."""
    from sqlalchemy.engine import make_url  # its versions differ in how they read escapes

    database = make_url(uri).database
    if database in (None, "", ":memory:"):
        raise ValueError("a store in memory is lost when the process ends")
    return Path(database).absolute()
