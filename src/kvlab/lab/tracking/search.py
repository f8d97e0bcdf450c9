"""Finding runs that a store has, and continuing one."""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvlab.lab.files import writing
from kvlab.lab.tracking.base import RunStatus
from kvlab.lab.tracking.mlflow_tracker import TAG_CHARS, MlflowTracker
from kvlab.lab.tracking.store import Store

_PAGE = 1000
_NOT_FIGURES = ("series/", "system/")
_DONE_BEFORE, _IDS_IN_A_TAG = "kvlab.done_before", 200  # of 33 characters each


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """A run as the store has it."""

    run_id: str
    name: str
    state: str  # MLflow's: RUNNING, FINISHED, FAILED or KILLED
    seconds: float | None  # None while it runs
    params: Mapping[str, str]
    metrics: Mapping[str, float]  # final figures alone
    tags: Mapping[str, str]

    @property
    def choices(self) -> dict[str, str]:
        """What was chosen in each group of settings."""
        return {key.removeprefix("choice."): text for key, text in self.tags.items() if key.startswith("choice.")}

    @property
    def finished(self) -> bool:
        """Whether it ran to its end."""
        return self.state == "FINISHED" and self.tags.get("kvlab.status") == RunStatus.FINISHED


def find_runs(store: Store, experiment: str, query: str, *, limit: int | None = None) -> list[TrackedRun]:
    """Runs of an experiment that match an MLflow filter, the latest first; none where there is no experiment.

    `limit` is at most 1000. Raises TrackingError for a store that fails or a filter it does not understand.
    """
    entry = store.call("get_experiment_by_name", experiment)
    runs: list[TrackedRun] = []
    token = None
    while entry is not None:
        page = store.call(
            "search_runs",
            [entry.experiment_id],
            filter_string=query,
            max_results=limit or _PAGE,
            order_by=["attributes.start_time DESC"],
            page_token=token,
        )
        runs += map(_run, page)
        token = page.token
        if limit or not token:
            break
    return runs


def mark_interrupted(store: Store, run_id: str, reason: str) -> None:
    """Close a run that its process left open."""
    MlflowTracker(store, "", run_id, 0).finish(RunStatus.INTERRUPTED, reason)


def continue_run(store: Store, run_id: str, tags: Mapping[str, str]) -> MlflowTracker:
    """Continue a run that ended, or was left open."""
    run = store.call("get_run", run_id)
    store.call("update_run", run_id, status="RUNNING")
    for key, value in tags.items():
        store.call("set_tag", run_id, key, value[:TAG_CHARS])
    return MlflowTracker(store, run.info.experiment_id, run_id, run.info.start_time)


def done_before_tags(run_ids: Sequence[str]) -> dict[str, str]:
    """Tags of a sweep that name the runs of its points that others made, as many as are needed."""
    chunks = [run_ids[first : first + _IDS_IN_A_TAG] for first in range(0, len(run_ids), _IDS_IN_A_TAG)]
    return {f"{_DONE_BEFORE}{f'.{number}' if number else ''}": " ".join(ids) for number, ids in enumerate(chunks)}


def done_before(tags: Mapping[str, str]) -> list[str]:
    """The runs that `done_before_tags` named."""
    keys = [key for key in tags if key.startswith(_DONE_BEFORE)]
    return [run_id for key in sorted(keys, key=lambda key: (len(key), key)) for run_id in tags[key].split()]


def fetch_files(store: Store, run_id: str, directory: Path) -> None:
    """Copy the files that are stored with a run into `directory`, which is made: each whole or not at all.

    Raises a KvlabError.
    """
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".", dir=directory, ignore_cleanup_errors=True) as folder:
            for entry in store.call("list_artifacts", run_id):
                store.call("download_artifacts", run_id, entry.path, folder, bulk=True)
            for file in [path for path in Path(folder).rglob("*") if path.is_file()]:
                target = directory / file.relative_to(folder)
                target.parent.mkdir(parents=True, exist_ok=True)
                file.replace(target)


def _run(run: Any) -> TrackedRun:
    info, data = run.info, run.data
    return TrackedRun(
        run_id=info.run_id,
        name=info.run_name or "",
        state=info.status,
        seconds=None if info.end_time is None else (info.end_time - info.start_time) / 1000,
        params=dict(data.params),
        metrics={key: value for key, value in data.metrics.items() if not key.startswith(_NOT_FIGURES)},
        tags=dict(data.tags),
    )
