"""Which store is meant, and how its name may be shown."""

from __future__ import annotations

import os
import re
from pathlib import Path

from kvlab.config import TrackingConfig


def resolve_uri(config: TrackingConfig, root: Path) -> str:
    """Return the store's URI: `tracking.uri`, else MLFLOW_TRACKING_URI, else an SQLite file in `root`."""
    default = f"sqlite:///{root.resolve() / 'mlflow.db'}"
    return config.uri or os.environ.get("MLFLOW_TRACKING_URI") or default


def sqlite_path(uri: str) -> Path:
    """The file of an SQLite store. Raises ValueError for a store in memory, which ends with the process."""
    from sqlalchemy.engine import make_url  # its versions differ in how they read escapes

    database = make_url(uri).database
    if database in (None, "", ":memory:"):
        raise ValueError("a store in memory is lost when the process ends")
    return Path(database).absolute()


def without_password(text: str) -> str:
    """The text with neither user nor password in its URIs."""
    return re.sub(r"(?<=://)[^/\s]*@", "", text)
