"""Tracking: where runs are recorded."""

from dataclasses import dataclass

from kvlab.config.values import MOST_SECONDS, at_least, one_of
from kvlab.errors import ConfigError
from kvlab.secrets import has_password, redact

TRACKING_BACKENDS = ("mlflow", "off")


@dataclass
class TrackingConfig:
    """Where runs are recorded."""

    backend: str = "mlflow"  # mlflow, or off
    uri: str | None = None  # of the store; null: MLFLOW_TRACKING_URI, else mlflow.db in the working directory
    experiment: str = "kvlab"  # name of the MLflow experiment
    artifacts: str | None = None  # where a new experiment keeps files; null: beside the store, or by its server
    timeout_s: float = 10.0  # seconds that a server may take to answer
    system_metrics: bool = False  # sample the machine's load each second, also while requests run

    def __post_init__(self) -> None:
        one_of("tracking.backend", self.backend, TRACKING_BACKENDS)
        if self.artifacts is not None and has_password(self.artifacts):
            text = "has a password in it, which the store would show to all its readers; leave it out, and set what"
            variables = "MLflow takes from the environment, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            raise ConfigError("tracking.artifacts", redact(self.artifacts), f"{text} {variables}")
        if not self.timeout_s > 0:
            raise ConfigError("tracking.timeout_s", self.timeout_s, "must be more than 0")
        at_least("tracking.timeout_s", self.timeout_s, 0, MOST_SECONDS)
