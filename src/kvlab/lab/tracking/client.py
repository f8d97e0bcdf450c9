"""MLflow itself, imported late and kept quiet."""

from __future__ import annotations

import logging
import math
import os
from typing import Any


def import_client(timeout_s: float) -> Any:
    """Return MlflowClient, imported without its telemetry, its messages and its minutes of retrying.

    What the user's environment says of these wins.
    """
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
