"""Hydra's part of a sweep: the sweeper that plans and launches it, and what stands in where another one does.

What a sweep is, prints and keeps is in kvlab.lab.sweep.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from hydra.core.config_loader import ConfigLoader
from hydra.core.plugins import Plugins
from hydra.experimental.callback import Callback
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from kvlab.errors import ConfigError, KvlabError

if TYPE_CHECKING:
    from kvlab.cli.points import ComposedPoint
    from kvlab.config import TrackingConfig
    from kvlab.lab.sweep.sweep import Sweep


class PlanningSweeper(Sweeper):
    """Every combination, like Hydra's own sweeper, but all composed before the first runs, and as one experiment.

    max_batch_size  jobs that a parallel launcher is given at once; None: all
    params          what is swept: key to values, in Hydra's sweep syntax
    """

    def __init__(self, max_batch_size: int | None, params: dict[str, str] | None) -> None:
        self._max_batch_size = max_batch_size
        self._params = dict(params or {})

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Keep what Hydra offers."""
        self._master = config
        self._loader: ConfigLoader = hydra_context.config_loader
        self._launcher: Launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> list[Any]:
        """Plan all points, run those that are not done yet, close. Exits with the sweep's code unless that is 0.

        `arguments` are the overrides of the command line. Returns what the jobs returned.
        """
        texts = [f"{key}={value}" for key, value in self._params.items()] + arguments
        points, sweep = _open(self._master, self._loader, texts)
        jobs = [c.overrides for c, p in zip(points, sweep.plan.points, strict=True) if not p.done_before]
        # In this process one by one, to report and to stop in between.
        size = 1 if sweep.plan.parallel == 1 else self._max_batch_size or max(len(jobs), 1)
        returned: list[Any] = []
        with sweep.running():
            for start in range(0, len(jobs), size):
                try:
                    done = self._launcher.launch(
                        jobs[start : start + size], initial_job_idx=sweep.first_job + start
                    )
                    returned += [job.return_value for job in done]
                except Exception as error:  # a worker that was killed, a queue that is gone
                    reason = next(iter(str(error).strip().splitlines()), "")
                    sweep.problems.append(f"{type(error).__name__}: {reason}")
                if sweep.interrupted:
                    break
                sweep.report()
        if code := sweep.close():
            sys.exit(code)
        return returned


class SweepCallback(Callback):
    """Opens and closes the parent run of a sweep whose points another sweeper chooses one by one."""

    _sweep: Sweep | None = None

    def __reduce__(self) -> tuple[type[SweepCallback], tuple[()]]:
        """A worker gets one without the sweep."""
        return SweepCallback, ()

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Open the parent run."""
        if not str(config.hydra.sweeper.get("_target_")).endswith(".KvlabSweeper"):
            _, self._sweep = _open(config, None, [])
            atexit.register(self._sweep.close)  # Hydra does not report the end of a sweep that Ctrl-C ended

    def on_job_end(self, config: DictConfig, job_return: Any, **kwargs: Any) -> None:
        """Report the progress."""
        if self._sweep is not None:
            self._sweep.report()

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Close the parent run, and exit with the sweep's code unless that is 0."""
        if self._sweep is not None:
            atexit.unregister(self._sweep.close)
            if code := self._sweep.close():
                sys.exit(code)


def _open(
    config: DictConfig, loader: ConfigLoader | None, texts: list[str]
) -> tuple[Sequence[ComposedPoint], Sweep]:
    """Compose the points, if there is a `loader`, and open the sweep. One that cannot begin ends the process."""
    from kvlab.cli.points import compose_points, swept_keys
    from kvlab.lab.sweep.sweep import SweepSettings, open_sweep

    try:
        repeats = _number_of_repeats(config)
        points: list[ComposedPoint] = []
        varied = swept_keys(config)
        if loader is not None:
            points, varied = compose_points(loader, config, texts, repeats)
        settings = SweepSettings(
            name=_name(config, varied),
            directory=Path(config.hydra.sweep.dir).resolve(),
            varied=varied,
            tracking=cast("TrackingConfig", OmegaConf.to_object(config.tracking)),
            optimize=config.optimize,
            resume=config.resume,
            repeats=repeats,
            figures=config.figures,
            parallel=_parallel(config),
        )
        return points, open_sweep(settings, [p.point for p in points], [p.config for p in points])
    except KvlabError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def _number_of_repeats(config: DictConfig) -> int:
    """How often each point is run. Raises ConfigError for less than once."""
    repeats = OmegaConf.select(config, "repeats")
    if not isinstance(repeats, int) or repeats < 1:
        raise ConfigError("repeats", repeats, "must be a number, at least 1")
    return repeats


def _name(config: DictConfig, varied: dict[str, str]) -> str:
    choices = config.hydra.runtime.choices
    named = config.run_name or choices.get("experiment") or choices.get("sweep")
    return str(named or " ".join(["sweep", *varied] if varied else ["repeats"]))


def _parallel(config: DictConfig) -> int:
    """Jobs at once, as far as the launcher's settings say; 0: all."""
    launcher = config.hydra.launcher
    if str(launcher.get("_target_")).endswith(".BasicLauncher"):
        return 1
    jobs = launcher.get("n_jobs")
    if jobs is not None:
        return int(jobs) if jobs > 0 else os.cpu_count() or 1
    return int(config.hydra.sweeper.get("max_batch_size") or 0)
