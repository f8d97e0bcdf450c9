"""Runs of the tracking store as records: their summary at once, their other files when they are asked for."""

from __future__ import annotations

import ast
import dataclasses
from functools import partial
from pathlib import Path

from kvlab.errors import KvlabError
from kvlab.lab.records import RunRecord, read_run
from kvlab.lab.tracking import Store
from kvlab.lab.tracking.search import TrackedRun, fetch_files, find_runs

_PARENT, _KIND = "mlflow.parentRunId", "kvlab.kind"


def stored_runs(store: Store, experiment: str, query: str, folder: Path) -> list[RunRecord]:
    """The runs that a filter finds, the earliest first; of a sweep its points. Their files go below `folder`."""
    records: dict[str, RunRecord] = {}
    for run in reversed(find_runs(store, experiment, query)):
        for found in _points(store, experiment, run) if run.tags.get(_KIND) == "sweep" else [run]:
            records.setdefault(found.run_id, read_stored(store, found, folder / found.run_id))
    return list(records.values())


def read_stored(store: Store, run: TrackedRun, directory: Path) -> RunRecord:
    """One run. Where its summary was not stored, for instance because it was killed, what it logged has to do."""
    directory.mkdir(parents=True, exist_ok=True)
    fetch = partial(fetch_files, store, run.run_id, directory)
    try:
        store.call("download_artifacts", run.run_id, "summary.json", str(directory), bulk=True)
        record = read_run(directory)
        if not record.config:
            fetch()
            record = read_run(directory)
    except KvlabError:
        record = _from_params(run, directory)
    return dataclasses.replace(record, run_id=run.run_id, tags=run.tags, fetch=fetch)


def _points(store: Store, experiment: str, sweep: TrackedRun) -> list[TrackedRun]:
    """A sweep's points: its children, and those that had finished before it was resumed."""
    points = list(reversed(find_runs(store, experiment, f"tags.`{_PARENT}` = '{sweep.run_id}'")))
    for run_id in sweep.tags.get("kvlab.done_before", "").split():
        points += find_runs(store, experiment, f"attributes.run_id = '{run_id}'")
    return points


def _from_params(run: TrackedRun, directory: Path) -> RunRecord:
    return RunRecord(
        name=run.name,
        run_id=run.run_id,
        status=run.tags.get("kvlab.status", run.state.lower()),
        error=run.tags.get("kvlab.error"),
        config={key: _value(text) for key, text in run.params.items()},
        choices={key.removeprefix("choice."): text for key, text in run.tags.items() if key.startswith("choice.")},
        metrics=run.metrics,
        tags=run.tags,
        directory=directory,
        facts={"workload_digest": run.tags["workload.digest"]} if "workload.digest" in run.tags else {},
    )


def _value(text: str) -> object:
    """A setting from the text that a store keeps of it."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
