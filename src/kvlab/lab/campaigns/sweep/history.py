"""Earlier runs in the tracking store, and the parent run of a sweep or search."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from kvlab.config import RunConfig, TrackingConfig, WorkloadConfig
from kvlab.errors import ConfigError, KvlabError
from kvlab.lab.results.artifacts import write_summary
from kvlab.lab.results.provenance import config_digest
from kvlab.lab.terminal import warn
from kvlab.lab.tracking import RunStatus, Store, Tracker, open_store, send_all, start_run
from kvlab.lab.tracking.process import is_alive, this_process
from kvlab.lab.tracking.search import TrackedRun, continue_run, fetch_files, find_runs, mark_interrupted
from kvlab.run_files import SUMMARY

_RECENT = 9  # runs that an estimate is made of


@dataclass(slots=True)
class History:
    """The runs of one experiment in one store."""

    store: Store
    tracking: TrackingConfig
    warnings: list[str] = field(default_factory=list)

    def parent(self, kind: str, digest: str) -> TrackedRun | None:
        """The latest `sweep` or `tune` for the same thing, however it ended."""
        query = f"tags.`kvlab.kind` = '{kind}' and tags.`kvlab.sweep_digest` = '{digest}'"
        return next(iter(self._find(query, limit=1)), None)

    def open_parent(
        self,
        kind: str,
        digest: str,
        parent: TrackedRun | None,
        *,
        name: str,
        params: Mapping[str, object],
        tags: Mapping[str, str] | None = None,
    ) -> Tracker:
        """Continue `parent`, or open a parent run where that is None. Raises TrackingError."""
        own = {"kvlab.kind": kind, "kvlab.sweep_digest": digest, "kvlab.process": this_process(), **(tags or {})}
        if parent is not None:
            return continue_run(self.store, parent.run_id, own)
        return start_run(self.tracking, root=Path(), run_name=name, params=params, tags=own)

    def close_open_runs(self, parent: TrackedRun, *, exclusive: bool = True, ended: str | None = None) -> int:
        """Mark as interrupted the children of a parent that a killed process left open; returns their number.

        Raises ConfigError where the process of the parent or of a child is alive, unless several processes may work
        at it (not `exclusive`): then runs of those that are alive, or cannot be looked up, stay open. With `ended`,
        the process whose sweep is over, only other ones that are alive keep theirs.
        """
        running = self._children(parent, "RUNNING")
        for run in [parent, *running] if exclusive and parent.state == "RUNNING" else running:
            process = run.tags.get("kvlab.process")
            if exclusive and is_alive(process):
                host, pid, _ = str(process).rsplit(":", 2)
                text = f"of this sweep is still running, as process {pid} on {host}; wait for it, or end it"
                raise ConfigError("resume", "true", f"{run.name!r} {text}")
        if exclusive and parent.state == "RUNNING" and is_alive(parent.tags.get("kvlab.process")) is None:
            self.warnings.append(f"{_elsewhere(parent)} and continued here")
        closed = 0
        for run in running:
            process = run.tags.get("kvlab.process")
            alive = False if ended is not None and process == ended else is_alive(process)
            if not exclusive and (alive or (alive is None and ended is None)):
                continue
            if alive is None:
                self.warnings.append(f"{_elsewhere(run)} and run again")
            mark_interrupted(self.store, run.run_id, "its process ended before the run did")
            closed += 1
        return closed

    def finished(self, digests: Sequence[str], parent: TrackedRun | None = None) -> list[TrackedRun | None]:
        """For each configuration a run that has finished, none of them twice; None where there is none."""
        known: dict[str, list[TrackedRun]] = {}
        for run in self._children(parent, "FINISHED") if parent else []:
            known.setdefault(run.tags.get("kvlab.config_digest", ""), []).append(run)
        done: list[TrackedRun | None] = []
        for digest in digests:
            if digest not in known:
                known[digest] = self._find(
                    f"tags.`kvlab.config_digest` = '{digest}' and attributes.status = 'FINISHED'"
                )
            runs = [run for run in known[digest] if run.finished]
            done.append(runs[0] if runs else None)
            known[digest] = runs[1:]
        return done

    def seconds_per_job(self, configs: Iterable[RunConfig | None]) -> list[float | None]:
        """How long each is likely to take: the median of the latest runs of that model on that workload. None where
        there is no such run; a configuration that contradicts itself takes no time.
        """
        known: dict[str, float | None] = {"": 0.0}
        queries = [
            "" if config is None else _similar_runs(config.model.name, config.workload) for config in configs
        ]
        for query in {*queries} - {*known}:
            runs = self._find(query, limit=_RECENT)
            known[query] = median(run.seconds or 0.0 for run in runs) if runs else None
        return [known[query] for query in queries]

    def fetch(self, run: TrackedRun, directory: Path, name: str) -> dict[str, Any]:
        """Put the results of a run into a directory: its files, or where the store has lost them its figures.
        Returns these, which are known even where nothing can be written: then `unwritten` says why.
        """
        summary: dict[str, Any] = {"name": name, "run_id": run.run_id, "status": "finished", "error": None}
        summary |= {"metrics": dict(run.metrics), "choices": run.choices}
        try:
            fetch_files(self.store, run.run_id, directory)
            if not (directory / SUMMARY).exists():
                write_summary(directory, summary)
        except KvlabError as error:
            summary["unwritten"] = [str(error)]
        return summary

    def _find(self, query: str, limit: int | None = None) -> list[TrackedRun]:
        return find_runs(self.store, self.tracking.experiment, query, limit=limit)

    def _children(self, parent: TrackedRun, state: str) -> list[TrackedRun]:
        return self._find(f"tags.`mlflow.parentRunId` = '{parent.run_id}' and attributes.status = '{state}'")


def open_history(tracking: TrackingConfig, *, required: bool = False) -> History | None:
    """Open the store to look at its runs; None with tracking=off.

    Raises ConfigError with tracking=off where the history is `required`, TrackingError for a store that cannot be
    used.
    """
    if tracking.backend == "off":
        if required:
            text = "with tracking=off nothing is known of earlier runs; track them, or leave it out"
            raise ConfigError("resume", "true", text)
        return None
    return History(open_store(tracking, Path(), create=True), tracking)


def _elsewhere(run: TrackedRun) -> str:
    """What is said of a run whose process cannot be looked up."""
    process = run.tags.get("kvlab.process", "").rsplit(":", 2)
    where = f"{process[0]}, as process {process[1]}" if len(process) == 3 else "which is unknown"
    text = f"{run.name!r} was left running on another machine, {where}"
    return f"{text}: end it there if it still runs; it is taken for dead"


def _similar_runs(model: str, workload: WorkloadConfig) -> str:
    return (
        f"params.`model.name` = '{model}' and params.`workload.name` = '{workload.name}' and "
        f"params.`workload.num_requests` = '{workload.num_requests}' and attributes.status = 'FINISHED'"
    )


def finished_run(config: RunConfig) -> TrackedRun | None:
    """A run of this configuration that has finished. Raises a KvlabError."""
    history = open_history(config.tracking, required=True)
    return history.finished([config_digest(config)])[0] if history else None


def close_parent(
    tracker: Tracker, status: RunStatus, folder: Path, metrics: Mapping[str, float] | None = None
) -> str | None:
    """Store the files in `folder` with a parent run and close it. Returns, and warns of, what the store refused."""
    problem = send_all(
        partial(tracker.log_metrics, metrics or {}),
        partial(tracker.log_artifacts, folder),
        partial(tracker.finish, status),
    )
    if problem:
        warn(problem)
    else:
        print(tracker.where())
    return problem
