"""Opening a run in the configured store."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from kvlab.config import TrackingConfig
from kvlab.errors import TrackingError
from kvlab.lab.provenance import provenance
from kvlab.lab.tracking.base import NullTracker, RunStatus, Tracker
from kvlab.lab.tracking.mlflow_tracker import TAG_CHARS, MlflowTracker
from kvlab.lab.tracking.store import Store
from kvlab.lab.tracking.uri import resolve_artifacts, resolve_uri
from kvlab.workloads.describe import WorkloadFacts

_NOTE_CHARS = 72
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
    workload: WorkloadFacts | None = None,
    facts: Mapping[str, str] | None = None,
) -> Tracker:
    """Open a run in the configured store; a local store and the experiment are created on demand.

    `params` is the whole configuration under flat dotted keys. `tags` are added to `facts`, which say who and
    what made the run, from which commit; without, they are found out. `workload` becomes the run's
    input. Raises TrackingError for a store that cannot be used; one that does not answer is given up after
    `tracking.timeout_s` in all.
    """
    if config.backend == "off":
        return NullTracker()
    store = Store(resolve_uri(config, root), config.timeout_s)
    all_tags = _tags(tags, provenance() if facts is None else facts)
    if parent_run_id is not None:
        all_tags["mlflow.parentRunId"] = parent_run_id
    store.connect()
    experiment_id = store.experiment_id(config.experiment, resolve_artifacts(config, root, store.uri))
    cut_tags = {key: str(value)[:TAG_CHARS] for key, value in all_tags.items()}
    run = store.call("create_run", experiment_id, tags=cut_tags, run_name=run_name)
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


def _tags(tags: Mapping[str, str], facts: Mapping[str, str]) -> dict[str, str]:
    """All tags of a run, its own first: MLflow's page keeps the order."""
    known = {_MLFLOW_NAMES.get(key, key): value for key, value in facts.items()}
    known["mlflow.source.type"] = "LOCAL"  # or the page shows no source
    if "command" in facts:
        lines = textwrap.wrap(
            facts["command"], _NOTE_CHARS, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )
        # The page's description, which makes the page as wide as its longest line.
        known["mlflow.note.content"] = "```\n" + " \\\n".join(lines) + "\n```"
    return {**tags, **{key: value for key, value in known.items() if key not in tags}}
