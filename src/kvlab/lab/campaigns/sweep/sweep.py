"""A sweep in progress: opened before its first run, closed after its last, whatever ends it."""

import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from kvlab.config import RunConfig, TrackingConfig
from kvlab.errors import CapacityError, OutputError, RecordError, TrackingError
from kvlab.lab.campaigns.sweep.history import History, close_parent, open_history
from kvlab.lab.campaigns.sweep.plan import Point, SweepPlan
from kvlab.lab.campaigns.sweep.results import metric_names, read_results, status_of, table_rows
from kvlab.lab.campaigns.sweep.status import SweepProgress, announcement, print_results
from kvlab.lab.files import attempt, sentences, write_csv
from kvlab.lab.results.artifacts import write_summary
from kvlab.lab.results.provenance import other_versions, provenance, uncommitted
from kvlab.lab.results.records import read_run, read_summary
from kvlab.lab.terminal import Terminal, print_note, warn
from kvlab.lab.tracking import RunStatus, Tracker, send_all
from kvlab.lab.tracking.search import TrackedRun, done_before_tags
from kvlab.plugins import reason_of
from kvlab.run_files import SUMMARY
from kvlab.secrets import redact


class Sweep:
    """Many runs as one experiment: `open_sweep`, launch `plan.jobs` within `running`, `close`."""

    def __init__(self, plan: SweepPlan, directory: Path, tracking: TrackingConfig, tracker: Tracker | None) -> None:
        self.plan = plan
        self.interrupted = False
        self.problems: list[str] = []  # of the launcher
        self.returned: dict[str, dict[str, Any]] = {}  # what runs returned, by directory: a disk may be full
        self.progress = SweepProgress(directory, plan)
        self._directory, self._tracking = directory, tracking
        self._tracker = tracker  # of the parent run; None: the store did not take it

    @contextmanager
    def running(self) -> Iterator[None]:
        """While jobs run: Ctrl-C and SIGTERM end the sweep, and the progress of other processes is shown."""
        with ExitStack() as stack:
            if threading.current_thread() is threading.main_thread():
                for number in (signal.SIGINT, signal.SIGTERM):
                    stack.callback(signal.signal, number, signal.signal(number, self._on_signal))
            if self.plan.parallel != 1:
                stack.enter_context(self.progress.watching())
            try:
                yield
            except KeyboardInterrupt:
                self.interrupted = True

    def close(self, *, figures: bool) -> int:
        """Show and keep the results of the runs, and close the parent run. Returns the exit code."""
        plan, directory, report = self.plan, self._directory, self._directory / "report"
        missing = RunStatus.INTERRUPTED if self.interrupted else RunStatus.FAILED
        results = read_results(directory, plan, missing, self.returned)
        print_results(results, plan)
        for problem in self.problems:
            print(f"the launcher failed: {problem}", file=sys.stderr)
        names = metric_names(results)
        unknown = bool(plan.optimize) and plan.optimize not in names
        if unknown and names:
            print(f"error: optimize={plan.optimize}: no run has it; there are: {', '.join(names)}", file=sys.stderr)
        errors: list[OutputError] = []
        with attempt(errors):
            write_csv(report / "sweep.csv", table_rows(results))
        if figures:
            _draw([directory / point.directory for point in plan.points], report, errors)
        warn(*sentences(errors))
        status = RunStatus.INTERRUPTED if self.interrupted else status_of(results)
        lost = self._tracker is None or any(result.get("tracking_error") for result in self.returned.values())
        if self._tracker is not None:
            lost |= close_parent(self._tracker, status, report) is not None
        lost = lost or bool(errors) or any(result.get("unwritten") for result in self.returned.values())
        if self.interrupted or self.problems or plan.parallel != 1:
            self._close_open_runs()
        print(f"results: {directory}")
        if status is RunStatus.INTERRUPTED:
            if plan.parent_run_id:
                print("the same command with resume=true runs the rest")
            return 130
        return 1 if status is RunStatus.FAILED or lost or unknown else 0

    def _close_open_runs(self) -> None:
        """Workers that were lost, or ended with the sweep, had no time to close their runs; those at work close
        theirs.
        """
        with suppress(TrackingError):
            history = open_history(self._tracking)
            parent = history and history.parent("sweep", self.plan.digest)
            if history and parent and parent.run_id == self.plan.parent_run_id:
                history.close_open_runs(parent, exclusive=False, ended=self.plan.process)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> NoReturn:
        """Noted as well as raised: an exception that is raised while an object is deleted is lost."""
        self.interrupted = True
        raise KeyboardInterrupt


def open_sweep(
    plan: SweepPlan, configs: Sequence[RunConfig | None], directory: Path, tracking: TrackingConfig, *, resume: bool
) -> Sweep:
    """Look up what is done, open the parent run, write the plan, announce it.

    `configs` are those of the plan's points; None where one contradicts itself. `directory` is the caller's alone.
    Raises a KvlabError for a sweep that cannot begin.
    """
    history, done, tracker = _open_store(plan, tracking, resume=resume)
    points = _assign_directories(directory, plan.points, done)
    plan = replace(plan, points=points, parent_run_id=tracker.run_id if tracker else None)
    try:
        plan.write(directory)
    except OutputError as error:
        if tracker is not None:
            send_all(partial(tracker.finish, RunStatus.FAILED, str(error)))
        raise
    sweep = Sweep(plan, directory, tracking, tracker)
    for point, run in zip(points, done, strict=True):
        if history and run and not (directory / point.directory / SUMMARY).exists():
            fetched = history.fetch(run, directory / point.directory, point.name)
            sweep.returned[point.directory] = fetched
            warn(*fetched.get("unwritten", ()))
    _announce(plan, history, [config for config, run in zip(configs, done, strict=True) if run is None])
    return sweep


def record_failure(directory: Path, name: str, error: Exception) -> dict[str, Any]:
    """Keep a point that could not run as a result, and print why; the sweep goes on. Returns its summary."""
    kind = "does not fit" if isinstance(error, CapacityError) else "failed"
    text = redact(reason_of(error))
    print(f"{name}: {kind}: {text}", file=sys.stderr)
    summary: dict[str, Any] = {"name": name, "status": "failed", "error": text, "metrics": {}}
    if not (directory / SUMMARY).exists():
        try:
            write_summary(directory, summary)
        except OutputError as problem:
            warn(problem)
            summary["unwritten"] = [str(problem)]
    return summary


def _open_store(
    plan: SweepPlan, tracking: TrackingConfig, *, resume: bool
) -> tuple[History | None, list[TrackedRun | None], Tracker | None]:
    """The runs in the store, each point's finished run, if the sweep resumes, and the parent run; None:
    the store does not take it, which is warned of. Raises a KvlabError where it cannot resume.
    """
    history: History | None = None
    done: list[TrackedRun | None] = [None] * len(plan.points)
    try:
        history = open_history(tracking, required=resume)
        if history is None:
            return None, done, Tracker()
        parent = history.parent("sweep", plan.digest) if resume else None
        if resume:
            done = _done_before(history, parent, plan)
        return history, done, _open_parent(history, plan, parent, done)
    except TrackingError as error:
        if resume:
            raise
        warn(error)
        return history, done, None


def _done_before(history: History, parent: TrackedRun | None, plan: SweepPlan) -> list[TrackedRun | None]:
    """Each point's finished run, if any; runs that an earlier sweep left open are closed. Raises a KvlabError."""
    if parent is not None and (closed := history.close_open_runs(parent)):
        print(f"{closed} unfinished run(s) of the earlier sweep marked as interrupted")
    warn(*history.warnings)
    done = history.finished([point.digest for point in plan.points], parent)
    warn(*other_versions(run.tags for run in done if run is not None))
    return done


def _assign_directories(directory: Path, points: Sequence[Point], done: Sequence[TrackedRun | None]) -> list[Point]:
    """Give every point a directory: jobs get the numbers after those in use, points done before the next ones,
    unless the directory has their results already.
    """
    summaries = {file.parent.name: read_summary(file.parent) or {} for file in directory.glob(f"*/{SUMMARY}")}
    there = {summary.get("run_id"): name for name, summary in summaries.items()}
    job = max((int(path.name) for path in directory.glob("*") if path.name.isdigit()), default=-1) + 1
    other = job + sum(run is None for run in done)
    assigned = []
    for point, run in zip(points, done, strict=True):
        if run is None:
            name, job = str(job), job + 1
        elif run.run_id in there:
            name = there[run.run_id]
        else:
            name, other = str(other), other + 1
        assigned.append(replace(point, directory=name, done_before=run.run_id if run else None))
    return assigned


def _announce(plan: SweepPlan, history: History | None, configs: Sequence[RunConfig | None]) -> None:
    """Print what is to run, for how long by earlier runs of the jobs' `configs`, and what was done before."""
    seconds: list[float | None] = [None] * len(configs)
    with suppress(TrackingError):
        if history is not None:
            seconds = history.seconds_per_job(configs)
    print(announcement(plan, seconds), flush=True)
    for point in plan.done_before:
        print(f"done before: {point.name} (run {point.done_before})", flush=True)
    if plan.repeats > 1 and configs and all(own and own.executor.kind == "simulated" for own in configs):
        text = "repeats of a simulation are the same to the last digit; seed=0,1,2,3,4 simulates other requests"
        print_note(Terminal(), text, "note")
    if note := uncommitted(provenance()):
        print_note(Terminal(), note, "note")


def _open_parent(
    history: History, plan: SweepPlan, parent: TrackedRun | None, done: Sequence[TrackedRun | None]
) -> Tracker:
    """Continue the parent run of an earlier sweep, or open one."""
    tags = {"kvlab.points": str(len(plan.points)), "kvlab.repeats": str(plan.repeats)}
    own = parent.run_id if parent else ""
    tags |= done_before_tags([run.run_id for run in done if run and run.tags.get("mlflow.parentRunId") != own])
    params = {f"sweep.{key.lstrip('+')}": value for key, value in plan.varied.items()}
    return history.open_parent("sweep", plan.digest, parent, name=plan.name, params=params, tags=tags)


def _draw(directories: Sequence[Path], folder: Path, errors: list[OutputError]) -> None:
    """Draw the finished runs in `directories` into `folder`. What cannot be drawn is a warning; what cannot be
    written is kept in `errors`.
    """
    ended = [directory for directory in directories if (directory / SUMMARY).is_file()]
    if len(ended) < 2:
        return
    try:
        from kvlab.lab.figures import save_figures, sweep_figures

        drawn = sweep_figures([run for run in map(read_run, ended) if run.finished])
        for file in save_figures(drawn, folder, errors):
            print(f"figure: {file}")
    except (RecordError, OSError, ValueError, KeyError, ArithmeticError) as error:
        print(f"warning: the sweep's figures could not be drawn: {error}")
    print(f"figures of each run: {folder.parent}/*/figures")
