"""Tracking: where runs are recorded."""

from __future__ import annotations

from dataclasses import dataclass

from kvlab.config.checks import one_of
from kvlab.errors import ConfigError

TRACKING_BACKENDS = ("mlflow", "off")


@dataclass
class TrackingConfig:
    """Where runs are recorded."""

    backend: str = "mlflow"
    uri: str | None = None  # None: MLFLOW_TRACKING_URI, else mlflow.db in the working directory
    experiment: str = "kvlab"
    artifacts: str | None = None  # where a new experiment keeps files; None: by the store, or as its server says
    timeout_s: float = 10.0  # how long a server may take to answer
    system_metrics: bool = False  # sample the machine's load each second: the one thing tracked while requests run

    def __post_init__(self) -> None:
        one_of("tracking.backend", self.backend, TRACKING_BACKENDS)
        if not self.timeout_s > 0:
            raise ConfigError("tracking.timeout_s", self.timeout_s, "must be more than 0")
