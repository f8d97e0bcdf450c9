"""A multirun as one experiment: planned, run by whichever launcher Hydra is given, summed up at the end.

Hydra's part of it: what a sweep is, says and keeps is in kvlab.lab.sweep. Here is the sweep that this process
launches, and what a job of one asks, in whichever process it runs; how one begins and ends is in sweep_opening.py
and sweep_summary.py.
"""

from __future__ import annotations

import signal
import sys
import threading
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from kvlab.cli.points import combinations, compose_points
from kvlab.cli.sweep_opening import Sweep, number_of_repeats, open_sweep
from kvlab.cli.sweep_summary import sum_up
from kvlab.errors import CapacityError, KvlabError

if TYPE_CHECKING:
    from hydra_plugins.kvlab_sweeper import KvlabSweeper
    from kvlab.lab.execute import RunResult
    from kvlab.lab.sweep.status import SweepProgress

_current: Sweep | None = None


class SweepCallback(Callback):
    """Opens the parent run of a sweep whose points another sweeper decides, one by one."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Told by Hydra that a multirun begins."""
        global _current
        if not str(config.hydra.sweeper.get("_target_")).endswith(".KvlabSweeper"):
            varied = {key: str(value) for key, value in (config.hydra.sweeper.get("params") or {}).items()}
            _current = open_sweep(config, [], varied)


def run(sweeper: KvlabSweeper, arguments: list[str]) -> list[Any]:
    """Plan a sweep and run what of it is not done yet. Called by Hydra, through its sweeper."""
    global _current
    config, loader = sweeper.master, sweeper.context.config_loader
    texts = [f"{key}={value}" for key, value in sweeper.params.items()] + arguments
    try:
        values, varied = combinations(loader, texts, number_of_repeats(config))
        points = compose_points(loader, config, values, varied)
        _current = sweep = open_sweep(config, points, varied)
    except KvlabError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    overrides = [p.overrides for p, done in zip(points, sweep.plan.points, strict=True) if not done.done_before]
    first, size = sweep.first_job, sweeper.max_batch_size or max(len(overrides), 1)
    returns: list[Any] = []
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, _on_signal)
    with nullcontext() if sweep.plan.parallel == 1 else _watch(sweep.progress):
        for start in range(0, len(overrides), size):
            try:
                done = sweeper.launcher.launch(overrides[start : start + size], initial_job_idx=first + start)
                returns += [job.return_value for job in done]
            except Exception as error:  # a worker that was killed, a queue that is gone
                reason = next(iter(str(error).strip().splitlines()), "")
                sweep.problems.append(f"{type(error).__name__}: {reason}")
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
    sweep, _current = _current, None
    if code := sum_up(sweep):
        sys.exit(code)


def _watch(progress: SweepProgress) -> Any:
    from kvlab.lab.sweep.status import Watch

    return Watch(progress)


def _on_signal(_number: int, _frame: FrameType | None) -> NoReturn:
    """Ctrl-C between two runs. It is noted too: raised while an object is deleted, an exception would be lost."""
    interrupt()
    raise KeyboardInterrupt
