"""Opening a run in the configured store."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from kvlab.config import TrackingConfig
from kvlab.errors import TrackingError
from kvlab.lab.provenance import provenance
from kvlab.lab.tracking.base import NullTracker, RunStatus, Tracker
from kvlab.lab.tracking.mlflow_tracker import TAG_CHARS, MlflowTracker
from kvlab.lab.tracking.store import Store
from kvlab.lab.tracking.uri import resolve_uri

_MLFLOW_NAMES = {
    "user": "mlflow.user",
    "program": "mlflow.source.name",
    "git.commit": "mlflow.source.git.commit",
}


def start_run(
    config: TrackingConfig,
    *,
    root: Path,
    run_name: str,
    params: Mapping[str, object],
    tags: Mapping[str, str],
    parent_run_id: str | None = None,
) -> Tracker:
    """Open a run in the configured store; a local store and the experiment are created on demand.

    `params` is the whole configuration under flat dotted keys. `tags` are added to those that say who and
    what made the run, from which commit in `root`. Raises TrackingError for a store that cannot be used; one
    that does not answer is given up after `tracking.timeout_s` in all.
    """
    if config.backend == "off":
        return NullTracker()
    store = Store(resolve_uri(config, root), config.timeout_s)
    facts = provenance(root).items()
    all_tags = {_MLFLOW_NAMES.get(key, key): value for key, value in facts} | dict(tags)
    if parent_run_id is not None:
        all_tags["mlflow.parentRunId"] = parent_run_id
    store.connect()
    experiment_id = store.experiment_id(config.experiment)
    cut_tags = {key: str(value)[:TAG_CHARS] for key, value in all_tags.items()}
    run = store.call("create_run", experiment_id, tags=cut_tags, run_name=run_name)
    tracker = MlflowTracker(store, experiment_id, run.info.run_id, run.info.start_time)
    try:
        tracker.log_params(params)
    except TrackingError as error:
        with suppress(TrackingError):
            tracker.finish(RunStatus.FAILED, str(error))
        raise
    store.deadline = None
    return tracker
