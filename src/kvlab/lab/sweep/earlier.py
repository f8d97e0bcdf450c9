"""What the tracking store knows of earlier runs: what is done, what was left open, how long it took."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from kvlab.config import RunConfig, TrackingConfig
from kvlab.errors import ConfigError
from kvlab.lab.artifacts import write_summary
from kvlab.lab.sweep.process import is_alive
from kvlab.lab.tracking import Store, open_store
from kvlab.lab.tracking.search import TrackedRun, fetch_files, find_runs, mark_interrupted

_RECENT = 9  # runs that an estimate is made of


@dataclass(slots=True)
class Earlier:
    """Earlier runs of one experiment in one store."""

    store: Store
    experiment: str
    warnings: list[str] = field(default_factory=list)

    def parent(self, kind: str, digest: str) -> TrackedRun | None:
        """The latest sweep or search for the same thing, however it ended."""
        query = f"tags.`kvlab.kind` = '{kind}' and tags.`kvlab.sweep_digest` = '{digest}'"
        return next(iter(find_runs(self.store, self.experiment, query, limit=1)), None)

    def finished(self, digests: Sequence[str], parent: TrackedRun | None) -> list[TrackedRun | None]:
        """For each configuration a run that has finished, none of them twice; None where there is none."""
        known: dict[str, list[TrackedRun]] = {}
        for run in self._children(parent, "FINISHED"):
            known.setdefault(run.tags.get("kvlab.config_digest", ""), []).append(run)
        found: list[TrackedRun | None] = []
        for digest in digests:
            if digest not in known:
                query = f"tags.`kvlab.config_digest` = '{digest}' and attributes.status = 'FINISHED'"
                known[digest] = find_runs(self.store, self.experiment, query)
            runs = [run for run in known[digest] if run.finished]
            found.append(runs[0] if runs else None)
            known[digest] = runs[1:]
        return found

    def close_abandoned(self, parent: TrackedRun) -> int:
        """Mark as interrupted what a killed sweep left open; how many runs that were.

        Raises ConfigError where the sweep, or one of its runs, is still being made.
        """
        running = self._children(parent, "RUNNING")
        for run in [parent, *running] if parent.state == "RUNNING" else running:
            if is_alive(run.tags.get("kvlab.process")):
                host, pid, _ = run.tags["kvlab.process"].rsplit(":", 2)
                raise ConfigError(
                    "resume", "true", f"{run.name!r} of this sweep is still running, as process {pid} on {host}; "
                    "wait for it, or end it"
                )  # fmt: skip
        for run in running:
            if is_alive(run.tags.get("kvlab.process")) is None:
                self.warnings.append(
                    f"{run.name!r} was left running on another machine, {run.tags.get('host.name', 'unknown')}; "
                    "it is taken for dead and run again"
                )
            mark_interrupted(self.store, run.run_id, "its process ended before the run did")
        return len(running)

    def abandoned(self, parent: TrackedRun) -> list[TrackedRun]:
        """The runs of a parent that are open, and whose process is known to be gone."""
        running = self._children(parent, "RUNNING")
        return [run for run in running if is_alive(run.tags.get("kvlab.process")) is False]

    def seconds_per_job(self, configs: Iterable[RunConfig]) -> list[float | None]:
        """How long each is likely to take: the median of the latest runs of that model on that workload."""
        known: dict[tuple[str, str, int], float | None] = {}
        estimates = []
        for config in configs:
            workload = config.workload
            key = (config.model.name, workload.name, workload.num_requests)
            if key not in known:
                query = (
                    f"params.`model.name` = '{key[0]}' and params.`workload.name` = '{key[1]}' and "
                    f"params.`workload.num_requests` = '{key[2]}' and attributes.status = 'FINISHED'"
                )
                runs = find_runs(self.store, self.experiment, query, limit=_RECENT)
                known[key] = median(run.seconds or 0.0 for run in runs) if runs else None
            estimates.append(known[key])
        return estimates

    def fetch(self, run: TrackedRun, directory: Path, name: str) -> None:
        """Put the results of a run into a directory: its files, or where the store has lost them its figures."""
        fetch_files(self.store, run.run_id, directory)
        if not (directory / "summary.json").exists():
            choices = {k.removeprefix("choice."): v for k, v in run.tags.items() if k.startswith("choice.")}
            write_summary(
                directory,
                {
                    "name": name,
                    "run_id": run.run_id,
                    "status": "finished",
                    "error": None,
                    "metrics": dict(run.metrics),
                    "choices": choices,
                },
            )

    def _children(self, parent: TrackedRun | None, state: str) -> list[TrackedRun]:
        if parent is None:
            return []
        query = f"tags.`mlflow.parentRunId` = '{parent.run_id}' and attributes.status = '{state}'"
        return find_runs(self.store, self.experiment, query)


def look_up(config: TrackingConfig) -> Earlier:
    """Open the store to look at earlier runs. Raises TrackingError for one that cannot be used."""
    return Earlier(open_store(config, Path(), create=True), config.experiment)
