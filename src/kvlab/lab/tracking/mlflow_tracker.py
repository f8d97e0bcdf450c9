"""A run in an MLflow store."""

from __future__ import annotations

import json
import math
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvlab.errors import TrackingError
from kvlab.lab.tracking.base import Point, RunStatus, Tracker
from kvlab.lab.tracking.sampling import sample
from kvlab.lab.tracking.store import Store
from kvlab.lab.tracking.system import SystemMetrics
from kvlab.workloads.describe import WorkloadFacts

PARAM_CHARS, TAG_CHARS = 6000, 8000  # what MLflow takes

_MLFLOW_STATUS = {
    RunStatus.FINISHED: "FINISHED",
    RunStatus.FAILED: "FAILED",
    RunStatus.INTERRUPTED: "KILLED",
    RunStatus.OUT_OF_MEMORY: "FAILED",
}


_DATASET_NAME_CHARS = 500
_COLUMNS = [
    {"type": kind, "name": name, "required": True}
    for name, kind in (("arrival_s", "double"), ("prompt_token_ids", "array"), ("max_tokens", "long"))
]


class MlflowTracker(Tracker):
    """A run in an MLflow store; `start_run` makes one. Tracker says what the methods do."""

    def __init__(
        self, store: Store, experiment_id: str, run_id: str, started_ms: int, system_metrics: bool = False
    ) -> None:
        self.run_id = run_id
        self._store = store
        self._started_ms = started_ms
        self._system = SystemMetrics() if system_metrics else None
        # Without the last part the page shows what is for chats.
        self._fragment = f"/#/experiments/{experiment_id}/runs/{run_id}?workflowType=machine_learning"

    def log_params(self, params: Mapping[str, object]) -> None:
        """Record flat keys; values are written as text, cut to what MLflow takes."""
        from mlflow.entities import Param

        self._log_batch(params=[Param(key, str(value)[:PARAM_CHARS]) for key, value in params.items()])

    def log_input(self, workload: WorkloadFacts) -> None:
        """Record the workload as the dataset that the run used."""
        from mlflow.entities import Dataset, DatasetInput, InputTag
        from mlflow.utils.mlflow_tags import MLFLOW_DATASET_CONTEXT

        dataset = Dataset(
            workload.name[:_DATASET_NAME_CHARS],
            workload.digest,
            workload.source_type,
            json.dumps(workload.source),
            json.dumps({"mlflow_colspec": _COLUMNS}),
            json.dumps(workload.profile),
        )
        tags = [InputTag(MLFLOW_DATASET_CONTEXT, "workload")]
        self._store.call("log_inputs", self.run_id, [DatasetInput(dataset, tags)])

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
            for step, seconds, value in sample([point for point in points if math.isfinite(point[2])])
        )

    def watch_system(self) -> None:
        """Start sampling."""
        if self._system is not None:
            self._system.start()

    def log_artifacts(self, directory: Path) -> None:
        """Store a directory's files."""
        if not directory.is_dir():
            raise TrackingError(f"artifacts in {directory}: there is no such directory")
        for entry in sorted(directory.iterdir()):
            if not entry.name.startswith("."):  # Hydra's folder repeats config.yaml, passwords included
                self._store.call("log_artifact", self.run_id, str(entry), bulk=True)

    def finish(self, status: RunStatus, error: str | None = None) -> None:
        """Close the run."""
        from mlflow.entities import RunTag

        if self._system is not None:
            self._log_points(iter(self._system.stop()))
        tags = {"kvlab.status": status.value} | ({} if error is None else {"kvlab.error": error})
        self._log_batch(tags=[RunTag(key, value[:TAG_CHARS]) for key, value in tags.items()])
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
