"""A multirun as one experiment: planned, run by whichever launcher Hydra is given, summed up at the end.

Hydra's part of it: what a sweep is, says and keeps is in kvlab.lab.sweep.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, cast

from hydra.core.config_store import ConfigStore
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from kvlab.config import RunConfig, TrackingConfig
from kvlab.errors import CapacityError, ConfigError, KvlabError, TrackingError
from src.points import Composed, bare_key, combinations, compose_points

if TYPE_CHECKING:
    from hydra_plugins.kvlab_sweeper import KvlabSweeper
    from kvlab.lab.execute import RunResult
    from kvlab.lab.sweep.earlier import Earlier
    from kvlab.lab.sweep.plan import Point, SweepPlan
    from kvlab.lab.sweep.status import SweepProgress
    from kvlab.lab.tracking import Tracker
    from kvlab.lab.tracking.search import TrackedRun

ROOT = Path(__file__).resolve().parents[1]
_EXTRAS = {"joblib": ("hydra_joblib_launcher", "joblib"), "submitit": ("hydra_submitit_launcher", "slurm")}


@dataclass(slots=True)
class _Sweep:
    directory: Path
    plan: SweepPlan
    tracker: Tracker
    tracking: TrackingConfig
    tracking_error: str | None
    progress: SweepProgress
    figures: bool
    problems: list[str] = field(default_factory=list)  # of the launcher
    interrupted: bool = False


_current: _Sweep | None = None


class SweepCallback(Callback):
    """Opens the parent run of a sweep whose points another sweeper decides, one by one."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Told by Hydra that a multirun begins."""
        if not str(config.hydra.sweeper.get("_target_")).endswith(".KvlabSweeper"):
            _open(
                config, [], {key: str(value) for key, value in (config.hydra.sweeper.get("params") or {}).items()}
            )


def register_callback() -> None:
    """Offer Hydra what conf/run.yaml names: the callback `kvlab`, so that no YAML names a Python object, and the
    mode of a run: with `repeats` it is a sweep.
    """
    target = f"{SweepCallback.__module__}.{SweepCallback.__qualname__}"
    ConfigStore.instance().store(group="hydra/callbacks", name="kvlab", node={"kvlab": {"_target_": target}})
    OmegaConf.register_new_resolver("kvlab_mode", _mode, replace=True)


def refuse_missing_launcher(arguments: list[str]) -> None:
    """End with a sentence where the command line names a launcher whose package is not installed."""
    for text in arguments:
        key, _, value = text.partition("=")
        for name, (module, extra) in _EXTRAS.items():
            if key == "hydra/launcher" and value.startswith(name) and find_spec(f"hydra_plugins.{module}") is None:
                _refuse(f"{text}: needs a package that is not installed: pip install 'kvlab[{extra}]'")


def run(sweeper: KvlabSweeper, arguments: list[str]) -> list[Any]:
    """Plan a sweep and run what of it is not done yet. Called by Hydra, through its sweeper."""
    config, loader = sweeper.master, sweeper.context.config_loader
    texts = [f"{key}={value}" for key, value in sweeper.params.items()] + arguments
    try:
        values, varied = combinations(loader, texts, _repeats(config))
        points = compose_points(loader, config, values, varied)
        first = _open(config, points, varied)
    except KvlabError as error:
        _refuse(str(error))
    assert _current is not None
    overrides = [p.overrides for p, done in zip(points, _current.plan.points, strict=True) if not done.done_before]
    size = sweeper.max_batch_size or max(len(overrides), 1)
    serial = _parallel(config) == 1
    returns: list[Any] = []
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, _on_signal)
    with nullcontext() if serial else _watch(_current.progress):
        for start in range(0, len(overrides), size):
            try:
                done = sweeper.launcher.launch(overrides[start : start + size], initial_job_idx=first + start)
                returns += [job.return_value for job in done]
            except Exception as error:  # a worker that was killed, a queue that is gone
                reason = next(iter(str(error).strip().splitlines()), "")
                _current.problems.append(f"{type(error).__name__}: {reason}")
    return returns


@dataclass(frozen=True, slots=True)
class Job:
    """What a job of a sweep has to know, in whichever process it runs."""

    name: str
    heading: str
    parent_run_id: str | None


def job(directory: Path, output: Path, overrides: list[str]) -> Job:
    """Find out which job of the sweep in `directory` has its results in `output`."""
    from kvlab.lab.sweep.plan import read_plan

    plan = read_plan(directory)
    if plan is None:
        return Job("run", "run", None)
    point = plan.job(output.name)
    if point is None:
        name = " ".join(text for text in overrides if text.split("=")[0] in plan.varied) or "run"
        return Job(name, name, plan.parent_run_id)
    heading = f"job {plan.jobs.index(point) + 1} of {len(plan.jobs)}: {point.name}"
    return Job(point.name, heading, plan.parent_run_id)


def record_failure(directory: Path, name: str, error: Exception) -> None:
    """Keep a point that could not run as a result, and say so; the sweep goes on."""
    from kvlab.lab.artifacts import write_summary

    kind = "does not fit" if isinstance(error, CapacityError) else "failed"
    text = str(error) if isinstance(error, KvlabError) else f"{type(error).__name__}: {error}"
    print(f"{name}: {kind}: {text}", file=sys.stderr)
    if not (directory / "summary.json").exists():
        summary = {"name": name, "status": "failed", "error": text, "metrics": {}}
        write_summary(directory, summary)


def was_done(config: RunConfig) -> bool:
    """Whether a single run has finished before; if so, its figures are shown."""
    from rich.console import Console

    from kvlab.lab.sweep.digest import config_digest
    from kvlab.lab.tables import summary_table

    earlier, _ = _earlier(config.tracking, resume=True)
    run = earlier.finished([config_digest(config)], None)[0] if earlier else None
    if run is None:
        return False
    console = Console()
    console.print(summary_table(run.name, run.metrics))
    console.print(f"done before: run {run.run_id}", highlight=False)
    return True


def after_job(result: RunResult | None) -> None:
    """Tell how far the sweep is; end it with the job that Ctrl-C ended. In another process the parent does both."""
    if _current is None:
        return
    if result is not None:
        _current.tracking_error = _current.tracking_error or result.tracking_error
        if result.status == "interrupted":
            interrupt()
    if _current.interrupted:
        sys.exit(130)
    _current.progress.tell()


def interrupt() -> bool:
    """Note that Ctrl-C ended the sweep, if there is one."""
    if _current is not None:
        _current.interrupted = True
    return _current is not None


def finish() -> None:
    """Sum up the sweep, if there was one: a table, the parent run's record, the exit code."""
    global _current
    if _current is None:
        return
    from rich.console import Console

    from kvlab.lab.sweep.pictures import draw_sweep
    from kvlab.lab.sweep.results import metric_names, read_results, status_of, with_missing, write_csv
    from kvlab.lab.sweep.status import print_results
    from kvlab.lab.tracking import RunStatus

    sweep, _current = _current, None
    plan = sweep.plan if sweep.plan.points else None
    found = read_results(sweep.directory, plan)
    missing = RunStatus.INTERRUPTED if sweep.interrupted else RunStatus.FAILED
    results = with_missing(found, plan, missing)
    print_results(results, plan, Console())
    for problem in sweep.problems:
        print(f"the launcher failed: {problem}", file=sys.stderr)
    names, wanted = metric_names(results), sweep.plan.optimize
    unknown = f"optimize={wanted}: no run has it; there are: {', '.join(names)}" if wanted and names else ""
    if unknown and wanted not in names:
        print(f"error: {unknown}", file=sys.stderr)
    status = RunStatus.INTERRUPTED if sweep.interrupted else status_of(results)
    report = sweep.directory / "report"
    write_csv(results, report / "sweep.csv")
    if sweep.figures and plan is not None and len(found) > 1:
        warning = draw_sweep([sweep.directory / point.directory for point in plan.points], report)
        print(f"warning: {warning}" if warning else f"pictures: {report}")
    if sweep.tracking_error is None:
        try:
            sweep.tracker.log_artifacts(report)
            sweep.tracker.finish(status)
            print(sweep.tracker.where())
        except TrackingError as error:
            sweep.tracking_error = str(error)
            print(f"warning: {error}", file=sys.stderr)
    if sweep.interrupted or sweep.problems:
        _close_open_runs(sweep)
    print(f"results: {sweep.directory}")
    if status is RunStatus.INTERRUPTED:
        if sweep.tracker.run_id:
            print("the same command with resume=true runs the rest")
        sys.exit(130)
    if status is RunStatus.FAILED or sweep.tracking_error or (wanted and wanted not in names):
        sys.exit(1)


def _open(config: DictConfig, points: list[Composed], varied: dict[str, str]) -> int:
    """Look at what is done, open the parent run, keep the plan, announce it. Returns the first job's number.

    Raises a KvlabError for a sweep that cannot begin.
    """
    global _current
    from rich.console import Console

    from kvlab.lab.provenance import provenance, uncommitted
    from kvlab.lab.sweep.digest import sweep_digest
    from kvlab.lab.sweep.plan import SweepPlan
    from kvlab.lab.sweep.process import this_process
    from kvlab.lab.sweep.status import SweepProgress, announcement
    from kvlab.lab.tracking import NullTracker

    directory = Path(config.hydra.sweep.dir).resolve()
    tracking = cast(TrackingConfig, OmegaConf.to_object(config.tracking))
    console = Console()
    plan = SweepPlan(
        name=_name(config, varied),
        digest=sweep_digest(point.digest for point in points),
        varied=varied,
        optimize=config.optimize,
        process=this_process(),
        started=time.time(),
        parallel=_parallel(config),
    )
    earlier, problem = _earlier(tracking, resume=config.resume)
    parent = earlier.parent("sweep", plan.digest) if earlier and config.resume else None
    done: list[TrackedRun | None] = [None] * len(points)
    if earlier and config.resume:
        done = _done(earlier, parent, points, console)
    planned, first = _place(directory, points, done)
    plan = replace(plan, points=planned)
    estimates = _estimates(earlier, [p for p, run in zip(points, done, strict=True) if run is None])
    tracker: Tracker = NullTracker()
    if earlier is not None:
        try:
            tracker = _parent_run(tracking, plan, earlier, parent, done, _repeats(config))
        except TrackingError as error:
            problem = str(error)
    if problem:
        print(f"warning: {problem}", file=sys.stderr)
    plan = replace(plan, parent_run_id=tracker.run_id)
    plan.write(directory)
    if earlier:
        for point, run in zip(planned, done, strict=True):
            if run is not None and not (directory / point.directory / "summary.json").exists():
                earlier.fetch(run, directory / point.directory, point.name)
    if points:
        console.print(announcement(plan, _repeats(config), estimates), highlight=False, soft_wrap=True)
        for point in plan.done_before:
            console.print(f"done before: {point.name} (run {point.done_before})", highlight=False, soft_wrap=True)
    if note := uncommitted(provenance(ROOT)):
        console.print(f"[yellow]note:[/] {note}", highlight=False, soft_wrap=True)
    _current = _Sweep(
        directory, plan, tracker, tracking, problem, SweepProgress(directory, plan, console), config.figures
    )
    return first


def _earlier(tracking: TrackingConfig, *, resume: bool) -> tuple[Earlier | None, str | None]:
    from kvlab.lab.sweep.earlier import look_up

    if tracking.backend == "off":
        if resume:
            raise ConfigError(
                "resume", "true", "with tracking=off nothing is known of earlier runs; track them, or leave it out"
            )
        return None, None
    try:
        return look_up(tracking, ROOT), None
    except TrackingError as error:
        if resume:
            raise
        return None, str(error)


def _done(
    earlier: Earlier, parent: TrackedRun | None, points: list[Composed], console: Any
) -> list[TrackedRun | None]:
    if parent is not None:
        closed = earlier.close_abandoned(parent)
        if closed:
            console.print(f"{closed} unfinished run(s) of the earlier sweep marked as interrupted", highlight=False)
    for warning in earlier.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    return earlier.finished([point.digest for point in points], parent)


def _place(directory: Path, points: list[Composed], done: list[TrackedRun | None]) -> tuple[list[Point], int]:
    """Give every point a directory: jobs are numbered behind what is there, then comes what was done before."""
    import json

    from kvlab.lab.sweep.plan import Point

    there: dict[str, str] = {}
    for file in directory.glob("*/summary.json"):
        with suppress(OSError, ValueError):
            there[str(json.loads(file.read_text(encoding="utf-8")).get("run_id"))] = file.parent.name
    taken = [int(path.name) for path in directory.glob("*") if path.name.isdigit()]
    first = max(taken, default=-1) + 1
    job, other = first, first + sum(run is None for run in done)
    planned = []
    for point, run in zip(points, done, strict=True):
        if run is None:
            place, job = str(job), job + 1
        elif run.run_id in there:
            place = there[run.run_id]
        else:
            place, other = str(other), other + 1
        run_id = run.run_id if run else None
        planned.append(Point(point.name, point.group, point.digest, place, point.settings, point.repeat, run_id))
    return planned, first


def _estimates(earlier: Earlier | None, points: list[Composed]) -> list[float | None]:
    if earlier is None:
        return [None] * len(points)
    with suppress(TrackingError):
        known = iter(earlier.seconds_per_job(point.config for point in points if point.config))
        return [next(known) if point.config else 0.0 for point in points]
    return [None] * len(points)


def _parent_run(
    tracking: TrackingConfig,
    plan: SweepPlan,
    earlier: Earlier,
    parent: TrackedRun | None,
    done: list[TrackedRun | None],
    repeats: int,
) -> Tracker:
    from kvlab.lab.tracking import start_run
    from kvlab.lab.tracking.search import continue_run

    tags = {"kvlab.kind": "sweep", "kvlab.sweep_digest": plan.digest, "kvlab.process": plan.process}
    tags |= {"kvlab.points": str(len(plan.points)), "kvlab.repeats": str(repeats)}
    elsewhere = [
        run.run_id
        for run in done
        if run and (parent is None or run.tags.get("mlflow.parentRunId") != parent.run_id)
    ]
    if elsewhere:
        tags["kvlab.done_before"] = " ".join(elsewhere)
    if parent is not None:
        return continue_run(earlier.store, parent.run_id, tags)
    params = {f"sweep.{bare_key(key)}": value for key, value in plan.varied.items()}
    return start_run(tracking, root=ROOT, run_name=plan.name, params=params, tags=tags)


def _close_open_runs(sweep: _Sweep) -> None:
    """Workers that were ended with the sweep had no time to close their runs."""
    if sweep.tracker.run_id is None:
        return
    with suppress(KvlabError):
        earlier, _ = _earlier(sweep.tracking, resume=False)
        parent = earlier and earlier.parent("sweep", sweep.plan.digest)
        if earlier and parent and parent.run_id == sweep.tracker.run_id:
            earlier.close_abandoned(parent)


def _name(config: DictConfig, varied: dict[str, str]) -> str:
    choices = config.hydra.runtime.choices
    named = config.run_name or choices.get("experiment") or choices.get("sweep")
    return str(named or " ".join(["sweep", *varied] if varied else ["repeats"]))


def _repeats(config: DictConfig) -> int:
    repeats = OmegaConf.select(config, "repeats")
    if not isinstance(repeats, int) or repeats < 1:
        raise ConfigError("repeats", repeats, "must be a number, at least 1")
    return repeats


def _parallel(config: DictConfig) -> int:
    """Jobs at once, as far as the launcher tells; 0: all."""
    launcher = config.hydra.launcher
    if str(launcher.get("_target_")).endswith(".BasicLauncher"):
        return 1
    jobs = launcher.get("n_jobs")
    if jobs is not None:
        return int(jobs) if jobs > 0 else os.cpu_count() or 1
    return int(config.hydra.sweeper.get("max_batch_size") or 0)


def _watch(progress: SweepProgress) -> Any:
    from kvlab.lab.sweep.status import Watch

    return Watch(progress)


def _mode(repeats: object) -> str | None:
    return "MULTIRUN" if str(repeats).isdigit() and int(str(repeats)) > 1 else None


def _on_signal(_number: int, _frame: FrameType | None) -> NoReturn:
    """Ctrl-C between two runs. It is noted too: raised while an object is deleted, an exception would be lost."""
    interrupt()
    raise KeyboardInterrupt


def _refuse(message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)
