"""How a sweep begins: what of it is done, where the rest goes, its parent run, its plan, what it says of itself."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from omegaconf import DictConfig, OmegaConf

from kvlab.cli.points import Composed, bare_key
from kvlab.cli.resuming import done_before, earlier_runs
from kvlab.config import TrackingConfig
from kvlab.errors import ConfigError, TrackingError

if TYPE_CHECKING:
    from kvlab.lab.sweep.earlier import Earlier
    from kvlab.lab.sweep.plan import Point, SweepPlan
    from kvlab.lab.sweep.status import SweepProgress
    from kvlab.lab.tracking import Tracker
    from kvlab.lab.tracking.search import TrackedRun


@dataclass(slots=True)
class Sweep:
    """A sweep in progress."""

    directory: Path
    plan: SweepPlan
    first_job: int  # its number, and the name of its directory
    tracker: Tracker
    tracking: TrackingConfig
    tracking_error: str | None
    progress: SweepProgress
    figures: bool
    problems: list[str] = field(default_factory=list)  # of the launcher
    interrupted: bool = False


def open_sweep(config: DictConfig, points: list[Composed], varied: dict[str, str]) -> Sweep:
    """Look at what is done, open the parent run, keep the plan, announce it.

    Raises a KvlabError for a sweep that cannot begin.
    """
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
    earlier, problem = earlier_runs(tracking, resume=config.resume)
    parent = earlier.parent("sweep", plan.digest) if earlier and config.resume else None
    done: list[TrackedRun | None] = [None] * len(points)
    if earlier and config.resume:
        done = done_before(earlier, parent, points, console)
    planned, first = _place(directory, points, done)
    plan = replace(plan, points=planned)
    estimates = _estimates(earlier, [p for p, run in zip(points, done, strict=True) if run is None])
    tracker: Tracker = NullTracker()
    if earlier is not None:
        try:
            tracker = _parent_run(tracking, plan, earlier, parent, done, number_of_repeats(config))
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
        console.print(announcement(plan, number_of_repeats(config), estimates), highlight=False, soft_wrap=True)
        for point in plan.done_before:
            console.print(f"done before: {point.name} (run {point.done_before})", highlight=False, soft_wrap=True)
    if note := uncommitted(provenance()):
        console.print(f"[yellow]note:[/] {note}", highlight=False, soft_wrap=True)
    progress = SweepProgress(directory, plan, console)
    return Sweep(directory, plan, first, tracker, tracking, problem, progress, config.figures)


def number_of_repeats(config: DictConfig) -> int:
    """How often each point is run. Raises ConfigError for less than once."""
    repeats = OmegaConf.select(config, "repeats")
    if not isinstance(repeats, int) or repeats < 1:
        raise ConfigError("repeats", repeats, "must be a number, at least 1")
    return repeats


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
    return start_run(tracking, root=Path(), run_name=plan.name, params=params, tags=tags)


def _name(config: DictConfig, varied: dict[str, str]) -> str:
    choices = config.hydra.runtime.choices
    named = config.run_name or choices.get("experiment") or choices.get("sweep")
    return str(named or " ".join(["sweep", *varied] if varied else ["repeats"]))


def _parallel(config: DictConfig) -> int:
    """Jobs at once, as far as the launcher tells; 0: all."""
    launcher = config.hydra.launcher
    if str(launcher.get("_target_")).endswith(".BasicLauncher"):
        return 1
    jobs = launcher.get("n_jobs")
    if jobs is not None:
        return int(jobs) if jobs > 0 else os.cpu_count() or 1
    return int(config.hydra.sweeper.get("max_batch_size") or 0)
