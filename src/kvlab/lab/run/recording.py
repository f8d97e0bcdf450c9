"""A run's record, on disk and in the tracking store.

The store is opened in a thread while the engine is built, that of a command's run in a process beside.
`wait_until_open` waits for it, so that nothing of it happens while requests are served.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from kvlab.errors import OutputError, TrackingError
from kvlab.lab.files import sentences
from kvlab.lab.machine import peak_memory
from kvlab.lab.results.artifacts import write_artifacts
from kvlab.lab.results.catalogue import SERIES, SHARES
from kvlab.lab.results.columns import step_table
from kvlab.lab.results.fleet import of_all
from kvlab.lab.results.log import FleetLog, RunLog
from kvlab.lab.results.provenance import config_digest, provenance, uncommitted
from kvlab.lab.results.records import RunRecord, make_run
from kvlab.lab.results.roofline import run_costs
from kvlab.lab.results.sureness import ACCURACY, Predicted
from kvlab.lab.run.peer_plan import Plan
from kvlab.lab.settings import Composition, as_recorded, flatten
from kvlab.lab.terminal import Terminal, print_note
from kvlab.lab.tracking import RunStatus, Tracker, send_all, start_run
from kvlab.lab.tracking.access import in_background
from kvlab.lab.tracking.beside import TrackingProcess
from kvlab.lab.tracking.mlflow_tracker import spread
from kvlab.lab.tracking.process import this_process
from kvlab.plugins import loaded_plugins, plugin_code
from kvlab.secrets import redact, redacted
from kvlab.workloads.describe import WorkloadFacts, describe_workload

#: Series of what is there at one time, and where a step has them.
_LEVELS = {
    **{name: name for name in ("running", "waiting")},
    **{name: f"pool.{name}" for name in ("blocks_in_use", "blocks_cached", "shared_blocks")},
    "tokens_in_use": "pool.tokens_stored",
}


@dataclass(frozen=True, slots=True)
class RunContext:
    """What is run and where it lives: its output directory, its name, its sweep."""

    made: Composition
    directory: Path
    console: Terminal
    name: str
    in_sweep: bool = False
    parent_run_id: str | None = None
    heading: str | None = None  # of a run in a sweep: which of how many it is; None: its name
    beside: TrackingProcess | None = None  # which tracks the run; None: this process does
    said: set[str] = field(default_factory=set)  # by runs of the sweep before it, which is not said again


class Recording:
    """A run's record; `plan` is None for a configuration that cannot work.

    A store or a disk that fails ends nothing: each file and each call is tried, `error` is the first of the store,
    `unwritten` has the files that are missing.
    """

    def __init__(self, context: RunContext, plan: Plan | None = None) -> None:
        config = self._config = context.made.config
        self._context, self._plan = context, plan
        self._params = flatten(as_recorded(dataclasses.asdict(config), context.made.written()))
        self.error: str | None = None
        self.unwritten: list[OutputError] = []
        self.tracker = Tracker()
        self._started = time.time()  # seconds since 1970
        self._workload: WorkloadFacts | None = None
        if plan is not None:
            described = describe_workload(
                config.workload, plan.requests, vocab_size=plan.model.vocab_size, seed=config.seed
            )
            source = redacted("source", described.source)
            self._workload = dataclasses.replace(described, name=redact(described.name), source=source)
        self._facts: dict[str, str] = {}
        self._settled = False
        self._opening = in_background(self._open)

    def wait_until_open(self) -> None:
        """Wait until the run is in the store, or cannot be; print what the user should know. From here to
        `finish` tracking does nothing, unless `tracking.system_metrics` asks it to.
        """
        if self._settled:
            return
        self._opening.exception()  # only waits
        self._settled = True
        try:
            self.tracker = self._opening.result()
        except TrackingError as problem:
            self._failed(str(problem))
        warning = uncommitted(self._facts)
        if warning and not self._context.in_sweep:
            print_note(self._context.console, warning, "note")
        self.tracker.watch_system()

    def finish(
        self,
        log: RunLog,
        metrics: dict[str, float],
        status: RunStatus,
        error: str | None = None,
        sure: Predicted | None = None,
    ) -> None:
        """Write the run's files, then hand them to the store. `sure`: how far off its latencies may be."""
        self.wait_until_open()
        error = error and redact(error)
        directory, console = self._context.directory, self._context.console
        summary = self._summary(metrics, status, error)
        if sure is not None:
            summary[ACCURACY] = sure.as_dict()
        if (report := log.engine_report) is not None:
            summary["engine"] = {**report.facts, "invalid": report.invalid, "notes": list(report.notes)}
        self.unwritten += write_artifacts(directory, log, summary, self._context.made.yaml())
        if self._config.figures and log.records:
            record = make_run(directory, summary, log)
            self.unwritten += draw_figures(record, console, hover=not self._context.in_sweep)
        for sentence in sentences(self.unwritten):
            print_note(console, sentence)
        problem = send_all(
            partial(self.tracker.log_metrics, metrics),
            lambda: self.tracker.log_series({} if self.tracker.run_id is None else _series(log)),
            partial(self.tracker.log_artifacts, directory),
            partial(self.tracker.finish, status, error),
        )
        if problem:
            self._failed(problem)

    def _open(self) -> Tracker:
        self._facts = provenance()
        beside = self._context.beside
        return (start_run if beside is None else beside.start_run)(
            self._config.tracking,
            root=Path(),
            run_name=self._context.name,
            params=self._params,
            tags=self._tags(),
            parent_run_id=self._context.parent_run_id,
            workload=self._workload,
            facts=self._facts,
        )

    def _tags(self) -> dict[str, str]:
        """What distinguishes runs in the store's page: every run has all of it, whatever was swept."""
        tags = {f"choice.{group}": choice for group, choice in self._context.made.choices.items()} | {
            "kvlab.config_digest": config_digest(self._config),
            "kvlab.repeat": str(self._config.repeat),
            "kvlab.process": this_process(),
        }
        if plugins := loaded_plugins():
            tags["kvlab.plugins"] = ", ".join(plugins)
        if self._plan is not None and self._workload is not None:
            tags |= {f"resolved.{name}": str(value) for name, value in self._plan.chosen.items()}
            tags["workload.digest"] = self._workload.digest
        return tags | {key[5:]: str(value) for key, value in self._params.items() if key.startswith("tags.")}

    def _summary(self, metrics: dict[str, float], status: RunStatus, error: str | None) -> dict[str, Any]:
        summary: dict[str, Any] = {
            "name": self._context.name,
            "run_id": self.tracker.run_id,
            "status": status,
            "error": error,
            "metrics": metrics,
            "choices": dict(self._context.made.choices),
            "config": self._params,
            "started": self._started,
            "peak_memory_bytes": peak_memory(),
            "environment": self._facts,
            "config_digest": config_digest(self._config),
            "settings_digest": config_digest(self._config, any_repeat=True),
            "repeat": self._config.repeat,
        }
        if code := plugin_code(self._config.plugins):
            summary["plugins"] = code
        plan = self._plan
        if plan is not None and self._workload is not None:
            summary |= plan.chosen | {
                "machine": plan.machine,
                "workload_digest": self._workload.digest,
                "workload": self._workload.profile,
            }
        if plan is not None and (own := plan.own) is not None:
            summary |= {
                "weight_bytes": own.weights.parameters,
                "bytes_per_weight": run_costs(own).bytes_per_weight,
                "kv_bytes_per_token": own.pool.bytes_per_token,
            }
            if own.pool.groups:
                summary["kv_groups"] = [[len(group.layers), group.window] for group in own.pool.groups]
        return summary

    def _failed(self, problem: str) -> None:
        self.error = problem
        self.tracker = Tracker()
        print_note(self._context.console, problem)
        if not self.unwritten:
            self._context.console.print(f"the run's results are kept in {self._context.directory}")


def _series(log: RunLog) -> dict[str, list[tuple[int, float, float]]]:
    """`series/<name>` of a run: the columns of steps.parquet that its steps have, at the ends of the steps."""
    if log.engine_report is not None:
        series = log.engine_report.series
        return {
            name: list(zip(range(len(values)), series.times_s, map(float, values), strict=True))
            for name, values in series.columns.items()
        }
    table = step_table(log.steps).take(pa.array(spread(len(log.steps)), pa.int64()))  # no more is kept of them
    points = [table[name].to_pylist() for name in ("index", "end_s")]
    columns = {
        name: table[name].cast(pa.float64()).to_pylist() for name in SERIES if not table[name].null_count
    } | (_shares(log) if log.fleet is None else _of_replicas(log, log.fleet))
    return {name: list(zip(*points, values, strict=True)) for name, values in columns.items()}


def _of_replicas(log: RunLog, fleet: FleetLog) -> dict[str, list[float]]:
    """What is there at one time, of all replicas together: a step is of one of them."""
    steps, rows = log.steps, spread(len(log.steps))

    def together(values: NDArray[Any]) -> NDArray[np.float64]:
        return of_all(values, steps, fleet.gone)[rows]

    sums = {name: together(steps.column(field)) for name, field in _LEVELS.items()}
    if not (steps.column("has_pool") > 0).all():
        return {name: sums[name].tolist() for name in ("running", "waiting")}
    total = together(steps.column("pool.blocks_total"))
    slots = together(steps.column("pool.blocks_in_use") * steps.column("pool.block_size"))
    usage, fragmentation = SHARES
    sums[usage] = 100 * sums["blocks_in_use"] / np.maximum(total, 1)
    sums[fragmentation] = 100 * np.where(slots > 0, 1 - sums["tokens_in_use"] / np.maximum(slots, 1), 0.0)
    return {name: values.tolist() for name, values in sums.items()}


def _shares(log: RunLog) -> dict[str, list[float]]:
    """How full the pool was after these steps, in percent, and how much of what was in use held no token."""
    pools = [log.steps[index].pool for index in spread(len(log.steps))]
    known = [pool for pool in pools if pool is not None]
    if not known or len(known) < len(pools):
        return {}
    usage, fragmentation = SHARES
    return {
        usage: [100 * pool.block_utilization for pool in known],
        fragmentation: [100 * pool.internal_fragmentation for pool in known],
    }


def draw_figures(record: RunRecord, console: Terminal, *, hover: bool) -> list[OutputError]:
    """Draw a run into `figures/` of its directory; with `hover` its HTML page too. Returns why some could not be
    written. A figure that cannot be drawn costs a warning, never a run.
    """
    errors: list[OutputError] = []
    try:
        from kvlab.lab.figures import save_run_figures  # Matplotlib takes half a second to import

        save_run_figures(record, hover=hover, errors=errors)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        print_note(console, f"the run's figures could not be drawn, its results are complete: {reason}")
    return errors
