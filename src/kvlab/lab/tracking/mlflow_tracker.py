"""A run in an MLflow store: opening it, and what is recorded in it."""

import json
import math
import re
import shlex
import shutil
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np

from kvlab.config import TrackingConfig
from kvlab.errors import OutputError, TrackingError
from kvlab.lab.files import attempt, replacing, sentences
from kvlab.lab.results.provenance import provenance
from kvlab.lab.tracking.base import Point, RunStatus, Tracker
from kvlab.lab.tracking.store import Store
from kvlab.lab.tracking.uri import resolve_artifacts, resolve_uri
from kvlab.secrets import redact, without_credentials
from kvlab.workloads.describe import WorkloadFacts

PARAM_CHARS, TAG_CHARS, _DATASET_NAME_CHARS = 6000, 8000, 500  # what MLflow takes
SERIES_POINTS = 320  # what MLflow's page shows of a metric with steps
_NOTE_CHARS = 72
_MLFLOW_STATUS = {RunStatus.FINISHED: "FINISHED", RunStatus.INTERRUPTED: "KILLED"}  # any other: FAILED
_MLFLOW_NAMES = {"user": "mlflow.user", "program": "mlflow.source.name", "git.commit": "mlflow.source.git.commit"}
_COLUMNS = [
    {"type": kind, "name": name, "required": True}
    for name, kind in (("arrival_s", "double"), ("prompt_token_ids", "array"), ("max_tokens", "long"))
]
_EVERY_S = 1.0  # MLflow's own ten seconds leave short runs without any


def start_run(
    config: TrackingConfig,
    *,
    root: Path,
    run_name: str,
    params: Mapping[str, object],
    tags: Mapping[str, str],
    parent_run_id: str | None = None,
    workload: WorkloadFacts | None = None,
    facts: Mapping[str, str] | None = None,
) -> Tracker:
    """Open a run in the configured store; a local store and the experiment are created on demand.

    `params` is the whole configuration under flat dotted keys. `tags` are added to `facts`, those of `provenance`
    by default. `workload` becomes the run's input. Raises TrackingError for a store that cannot be used, or has
    not done all this within `tracking.timeout_s`.
    """
    if config.backend == "off":
        return Tracker()
    all_tags = _all_tags(tags, provenance() if facts is None else facts)
    if parent_run_id is not None:
        all_tags["mlflow.parentRunId"] = parent_run_id
    store = Store(resolve_uri(config, root), config.timeout_s)
    store.connect()
    experiment_id = store.experiment_id(config.experiment, resolve_artifacts(config, root, store.uri))
    run = store.call("create_run", experiment_id, tags=all_tags, run_name=run_name)
    tracker = MlflowTracker(store, experiment_id, run.info.run_id, run.info.start_time, config.system_metrics)
    try:
        tracker.log_params(params)
        if workload is not None:
            tracker.log_input(workload)
    except TrackingError as error:
        with suppress(TrackingError):
            tracker.finish(RunStatus.FAILED, str(error))
        raise
    store.deadline = None
    return tracker


class MlflowTracker(Tracker):
    """A run in an MLflow store; `start_run` makes one. Tracker says what the methods do."""

    def __init__(
        self, store: Store, experiment_id: str, run_id: str, started_ms: int, system_metrics: bool = False
    ) -> None:
        self.run_id = run_id
        self._store = store
        self._started_ms = started_ms
        self._watches_system = system_metrics
        self._system: SystemMetrics | None = None
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
        # All at step 0: a name logged with steps in any run turns MLflow's bar charts into lines.
        now = time.time_ns() // 1_000_000
        self._log_points((name, value, now, 0) for name, value in metrics.items() if math.isfinite(value))

    def log_series(self, series: Mapping[str, Sequence[Point]]) -> None:
        self._log_points(
            (f"series/{name}", value, self._started_ms + round(seconds * 1000), step)
            for name, points in series.items()
            for step, seconds, value in _sample([point for point in points if math.isfinite(point[2])])
        )

    def watch_system(self) -> None:
        if self._watches_system:
            self._system = SystemMetrics()

    def log_artifacts(self, directory: Path) -> None:
        """Store a directory's files: on this machine each whole or not at all, whatever became of others."""
        if not directory.is_dir():
            raise TrackingError(f"artifacts in {directory}: there is no such directory")
        from mlflow.utils.file_utils import local_file_uri_to_path

        # Hydra's folder, hidden, repeats config.yaml, passwords included.
        entries = [entry for entry in sorted(directory.iterdir()) if not entry.name.startswith(".")]
        uri = str(self._store.call("get_run", self.run_id).info.artifact_uri)
        if not uri.startswith("file:"):
            for entry in entries:
                self._store.call("log_artifact", self.run_id, str(entry), bulk=True)
            return
        folder, errors = Path(local_file_uri_to_path(uri)), list[OutputError]()
        for entry in entries:
            for file in sorted(entry.rglob("*")) if entry.is_dir() else [entry]:
                if file.is_file():
                    with attempt(errors), replacing(folder / file.relative_to(directory)) as own:
                        shutil.copyfile(file, own)
        if errors:
            raise TrackingError(f"tracking.artifacts: {'; '.join(sentences(errors))}")

    def finish(self, status: RunStatus, error: str | None = None) -> None:
        from mlflow.entities import RunTag

        if self._system is not None:
            self._log_points(iter(self._system.stop()))
        tags = {"kvlab.status": status.value} | ({} if error is None else {"kvlab.error": error})
        self._log_batch(tags=[RunTag(key, value[:TAG_CHARS]) for key, value in tags.items()])
        self._store.call("set_terminated", self.run_id, _MLFLOW_STATUS.get(status, "FAILED"))

    def where(self) -> str:
        store = self._store
        if store.is_server:
            return redact(without_credentials(store.uri)).rstrip("/") + self._fragment
        uri, path = store.shown, store.path
        if uri != store.uri:  # kvlab ui hands it on where nobody else can read it
            shown = re.sub(r"\$\{oc\.env:(\w+)\}", r"$\1", uri)
            command = "kvlab ui" if store.is_default else f'MLFLOW_TRACKING_URI="{shown}" kvlab ui'
            return f"{command}\nhttp://127.0.0.1:5000{self._fragment}"
        with suppress(FileNotFoundError):  # the working directory was removed
            if path is not None and path.parent == Path.cwd():
                uri = f"sqlite:///{path.name}"
        return f"mlflow ui --backend-store-uri {shlex.quote(uri)}\nhttp://127.0.0.1:5000{self._fragment}"

    def _log_points(self, points: Iterator[tuple[str, float, int, int]]) -> None:
        from mlflow.entities import Metric

        self._log_batch(metrics=[Metric(name, float(value), at_ms, step) for name, value, at_ms, step in points])

    def _log_batch(self, **entities: Any) -> None:
        # The client splits it into what one request may hold.
        self._store.call("log_batch", self.run_id, synchronous=True, **entities)


def _sample(points: Sequence[Point]) -> Sequence[Point]:
    return [points[index] for index in spread(len(points))]


def spread(count: int) -> list[int]:
    """At most SERIES_POINTS numbers below `count`, evenly spread, the first and the last among them."""
    return [round(index) for index in np.linspace(0, count - 1, min(count, SERIES_POINTS)).tolist()]


def _all_tags(tags: Mapping[str, str], facts: Mapping[str, str]) -> dict[str, str]:
    """All tags of a run, its own first: MLflow's page keeps the order."""
    known = {_MLFLOW_NAMES.get(key, key): value for key, value in facts.items()}
    known["mlflow.source.type"] = "LOCAL"  # or the page shows no source
    if "command" in facts:
        # The page's description, which makes the page as wide as its longest line.
        wrapper = textwrap.TextWrapper(
            _NOTE_CHARS, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )
        known["mlflow.note.content"] = "```\n" + " \\\n".join(wrapper.wrap(facts["command"])) + "\n```"
    return {key: str(value)[:TAG_CHARS] for key, value in {**tags, **known, **tags}.items()}


class SystemMetrics:
    """Samples processor, memory, disk, network and GPU once a second until `stop`, through MLflow's monitors. The
    samples are kept: MLflow's own thread writes to the store at each.
    """

    def __init__(self) -> None:
        from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
        from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
        from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor

        self._monitors: list[Any] = [CPUMonitor(), DiskMonitor(), NetworkMonitor()]
        with suppress(Exception):  # no such GPU, or no library to ask it
            from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor

            self._monitors.append(GPUMonitor())
        self._points: list[tuple[str, float, int, int]] = []
        self._over = Event()
        self._thread = Thread(target=self._watch, name="system metrics", daemon=True)
        self._thread.start()

    def stop(self) -> list[tuple[str, float, int, int]]:
        """Name, value, Unix time in milliseconds and step of each sample."""
        self._over.set()
        self._thread.join()
        return self._points

    def _watch(self) -> None:
        step = 0
        while True:
            now = time.time_ns() // 1_000_000
            for monitor in self._monitors:
                with suppress(Exception):  # a counter that this machine does not have
                    monitor.collect_metrics()
                    sample = monitor.aggregate_metrics()
                    self._points += [(f"system/{name}", float(value), now, step) for name, value in sample.items()]
                monitor.clear_metrics()
            step += 1
            if self._over.wait(_EVERY_S):
                return
