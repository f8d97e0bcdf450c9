"""A sweep in progress: opened before its first run, closed after its last, whatever ends it."""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import NoReturn

from rich.console import Console

from kvlab.config import RunConfig, TrackingConfig
from kvlab.errors import CapacityError, KvlabError, RecordError, TrackingError
from kvlab.lab.artifacts import write_summary
from kvlab.lab.provenance import provenance, uncommitted
from kvlab.lab.sweep.digest import sweep_digest
from kvlab.lab.sweep.history import History, close_parent, open_history
from kvlab.lab.sweep.plan import Point, SweepPlan
from kvlab.lab.sweep.process import this_process
from kvlab.lab.sweep.results import metric_names, read_results, status_of, with_missing, write_csv
from kvlab.lab.sweep.status import SweepProgress, Watch, announcement, print_results
from kvlab.lab.tracking import NullTracker, RunStatus, Tracker
from kvlab.lab.tracking.search import TrackedRun

_TRACKING_ERROR = "tracking_error.txt"  # in the directory of a run that the store did not take


@dataclass(frozen=True, slots=True)
class SweepSettings:
    """What holds for all points. `varied` are the swept keys with their values as they were written."""

    name: str
    directory: Path
    varied: dict[str, str]
    tracking: TrackingConfig
    optimize: str | None
    resume: bool
    repeats: int
    figures: bool
    parallel: int  # jobs at once; 0: all


class Sweep:
    """Many runs as one experiment: `open_sweep`, launch `plan.jobs` within `running`, `close`."""

    def __init__(
        self, settings: SweepSettings, plan: SweepPlan, first_job: int, tracker: Tracker, problem: str | None
    ) -> None:
        self.plan = plan
        self.first_job = first_job  # its number, and the name of its directory
        self.interrupted = False
        self.problems: list[str] = []  # of the launcher
        self._settings, self._tracker, self._tracking_error = settings, tracker, problem
        self._progress = SweepProgress(settings.directory, plan, Console())

    @contextmanager
    def running(self) -> Iterator[None]:
        """While jobs run: Ctrl-C and SIGTERM end the sweep, and the progress of other processes is shown."""
        with ExitStack() as stack:
            if threading.current_thread() is threading.main_thread():
                for number in (signal.SIGINT, signal.SIGTERM):
                    stack.callback(signal.signal, number, signal.signal(number, self._on_signal))
            if self.plan.parallel != 1:
                stack.enter_context(Watch(self._progress))
            try:
                yield
            except KeyboardInterrupt:
                self.interrupted = True

    def report(self) -> None:
        """Show the progress, if a job was done since it was last shown."""
        self._progress.report()

    def close(self) -> int:
        """Show and keep the results of the runs, and close the parent run. Returns the exit code."""
        plan, directory = self.plan if self.plan.points else None, self._settings.directory
        found = read_results(directory, plan)
        missing = RunStatus.INTERRUPTED if self.interrupted else RunStatus.FAILED
        results = with_missing(found, plan, missing)
        print_results(results, plan, Console())
        for problem in self.problems:
            print(f"the launcher failed: {problem}", file=sys.stderr)
        names, wanted = metric_names(results), self.plan.optimize
        unknown = bool(wanted) and wanted not in names
        if unknown and names:
            print(f"error: optimize={wanted}: no run has it; there are: {', '.join(names)}", file=sys.stderr)
        status = RunStatus.INTERRUPTED if self.interrupted else status_of(results)
        report = directory / "report"
        write_csv(results, report / "sweep.csv")
        if self._settings.figures and plan is not None and len(found) > 1:
            for line in _draw([directory / point.directory for point in plan.points], report):
                print(line)
            print(f"figures of each run: {directory}/*/figures")
        lost = self._tracking_error is not None or any(directory.glob(f"*/{_TRACKING_ERROR}"))
        if not lost:
            lost = close_parent(self._tracker, status, report) is not None
        if self.interrupted or self.problems:
            self._close_open_runs()
        print(f"results: {directory}")
        if status is RunStatus.INTERRUPTED:
            if self._tracker.run_id:
                print("the same command with resume=true runs the rest")
            return 130
        return 1 if status is RunStatus.FAILED or lost or unknown else 0

    def _close_open_runs(self) -> None:
        """Workers that were ended with the sweep had no time to close their runs."""
        if self._tracker.run_id is None:
            return
        with suppress(KvlabError):
            history = open_history(self._settings.tracking)
            parent = history and history.parent("sweep", self.plan.digest)
            if history and parent and parent.run_id == self._tracker.run_id:
                history.close_open_runs(parent)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> NoReturn:
        """Noted as well as raised: an exception that is raised while an object is deleted is lost."""
        self.interrupted = True
        raise KeyboardInterrupt


def open_sweep(settings: SweepSettings, points: Sequence[Point], configs: Sequence[RunConfig | None]) -> Sweep:
    """Look up what is done, open the parent run, write the plan, announce it.

    `configs` are those of the points; None where one contradicts itself. No points: another sweeper chooses them.
    Raises a KvlabError for a sweep that cannot begin.
    """
    console, directory = Console(), settings.directory
    plan = SweepPlan(
        name=settings.name,
        digest=sweep_digest(point.digest for point in points),
        varied=settings.varied,
        optimize=settings.optimize,
        process=this_process(),
        started=time.time(),
        parallel=settings.parallel,
    )
    history, problem = None, None
    try:
        history = open_history(settings.tracking, required=settings.resume)
    except TrackingError as error:
        if settings.resume:
            raise
        problem = str(error)
    parent: TrackedRun | None = None
    done: list[TrackedRun | None] = [None] * len(points)
    if history and settings.resume:
        parent = history.parent("sweep", plan.digest)
        done = _done_before(history, parent, points, console)
    planned, first_job = _assign_directories(directory, points, done)
    plan = replace(plan, points=planned)
    tracker: Tracker = NullTracker()
    if history is not None:
        try:
            tracker = _open_parent(history, plan, parent, done, settings.repeats)
        except TrackingError as error:
            problem = str(error)
    if problem:
        print(f"warning: {problem}", file=sys.stderr)
    plan = replace(plan, parent_run_id=tracker.run_id)
    plan.write(directory)
    if history:
        for point, run in zip(planned, done, strict=True):
            if run is not None and not (directory / point.directory / "summary.json").exists():
                history.fetch(run, directory / point.directory, point.name)
    if points:
        estimates = _estimates(history, [c for c, run in zip(configs, done, strict=True) if run is None])
        console.print(
            announcement(plan, settings.repeats, estimates), highlight=False, soft_wrap=True, markup=False
        )
        for point in plan.done_before:
            text = f"done before: {point.name} (run {point.done_before})"
            console.print(text, highlight=False, soft_wrap=True, markup=False)
    if note := uncommitted(provenance()):
        console.print(f"[yellow]note:[/] {note}", highlight=False, soft_wrap=True)
    return Sweep(settings, plan, first_job, tracker, problem)


def record_failure(directory: Path, name: str, error: Exception) -> None:
    """Keep a point that could not run as a result, and print why; the sweep goes on."""
    kind = "does not fit" if isinstance(error, CapacityError) else "failed"
    text = str(error) if isinstance(error, KvlabError) else f"{type(error).__name__}: {error}"
    print(f"{name}: {kind}: {text}", file=sys.stderr)
    if not (directory / "summary.json").exists():
        write_summary(directory, {"name": name, "status": "failed", "error": text, "metrics": {}})


def record_tracking_error(directory: Path, text: str) -> None:
    """Keep, for the process that closes the sweep, that the store did not take a run."""
    (directory / _TRACKING_ERROR).write_text(text + "\n", encoding="utf-8")


def _done_before(
    history: History, parent: TrackedRun | None, points: Sequence[Point], console: Console
) -> list[TrackedRun | None]:
    """Each point's finished run, if any; what an earlier sweep left open is closed. Raises a KvlabError."""
    if parent is not None and (closed := history.close_open_runs(parent)):
        console.print(f"{closed} unfinished run(s) of the earlier sweep marked as interrupted", highlight=False)
    for warning in history.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    return history.finished([point.digest for point in points], parent)


def _assign_directories(
    directory: Path, points: Sequence[Point], done: Sequence[TrackedRun | None]
) -> tuple[list[Point], int]:
    """Give every point a directory: jobs get the numbers after those in use, points done before the next ones.

    Returns the points and the number of the first job.
    """
    there: dict[str, str] = {}
    for file in directory.glob("*/summary.json"):
        with suppress(OSError, ValueError):
            there[str(json.loads(file.read_text(encoding="utf-8")).get("run_id"))] = file.parent.name
    first_job = max((int(path.name) for path in directory.glob("*") if path.name.isdigit()), default=-1) + 1
    job, other = first_job, first_job + sum(run is None for run in done)
    planned = []
    for point, run in zip(points, done, strict=True):
        if run is None:
            name, job = str(job), job + 1
        elif run.run_id in there:
            name = there[run.run_id]
        else:
            name, other = str(other), other + 1
        planned.append(replace(point, directory=name, done_before=run.run_id if run else None))
    return planned, first_job


def _estimates(history: History | None, configs: Sequence[RunConfig | None]) -> list[float | None]:
    """Seconds that each job is likely to take; None where unknown."""
    if history is not None:
        with suppress(TrackingError):
            known = iter(history.seconds_per_job(config for config in configs if config))
            return [next(known) if config else 0.0 for config in configs]
    return [None] * len(configs)


def _open_parent(
    history: History,
    plan: SweepPlan,
    parent: TrackedRun | None,
    done: Sequence[TrackedRun | None],
    repeats: int,
) -> Tracker:
    tags = {"kvlab.points": str(len(plan.points)), "kvlab.repeats": str(repeats)}
    elsewhere = [
        run.run_id
        for run in done
        if run and (parent is None or run.tags.get("mlflow.parentRunId") != parent.run_id)
    ]
    if elsewhere:
        tags["kvlab.done_before"] = " ".join(elsewhere)
    params = {f"sweep.{key.lstrip('+')}": value for key, value in plan.varied.items()}
    return history.open_parent("sweep", plan.digest, parent, name=plan.name, params=params, tags=tags)


def _draw(directories: Sequence[Path], folder: Path) -> Iterator[str]:
    """Draw the finished runs in `directories` into `folder` as PNG files, and name each. Figures are no result:
    those that cannot be drawn are a warning.
    """
    try:
        from kvlab.lab.figures import sweep_figures
        from kvlab.lab.records import read_run

        records = [read_run(directory) for directory in directories if (directory / "summary.json").is_file()]
        for name, figure in sweep_figures([record for record in records if record.finished]).items():
            folder.mkdir(parents=True, exist_ok=True)
            figure.savefig(folder / f"{name}.png")
            yield f"figure: {folder / name}.png"
    except (RecordError, OSError, ValueError, KeyError, ArithmeticError) as error:
        yield f"warning: the sweep's figures could not be drawn: {error}"
