"""Hydra's part of a sweep: the sweeper that plans and launches it. What a sweep prints and keeps is in
kvlab.lab.campaigns.sweep.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from hydra.core.config_loader import ConfigLoader
from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from kvlab.cli.settings import fail
from kvlab.config.run import MOST_REPEATS
from kvlab.config.values import at_least
from kvlab.errors import ConfigError, KvlabError
from kvlab.secrets import redact

if TYPE_CHECKING:
    from kvlab.config import RunConfig, TrackingConfig
    from kvlab.lab.campaigns.sweep.sweep import Sweep


_COUNT = "workload.num_requests"
_MOST_KEPT = 256  # composed points, of a third of a megabyte each


class _Points:
    """Hydra's config loader for a launcher in this process: a point that was composed for the plan is not composed
    again for its run, which would take a tenth of a second.
    """

    def __init__(self, loader: ConfigLoader) -> None:
        self._loader = loader
        self._kept: dict[tuple[str, ...], DictConfig] = {}

    def plan(self, master: DictConfig, overrides: list[str]) -> DictConfig:
        """Compose a point, and keep it for its run."""
        composed = self._loader.load_sweep_config(master, overrides)
        if len(self._kept) < _MOST_KEPT:
            self._kept[tuple(overrides)] = composed
        return composed

    def load_sweep_config(self, master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        """See ConfigLoader."""
        composed = self._kept.pop(tuple(sweep_overrides), None)
        if composed is None:
            return self._loader.load_sweep_config(master_config, sweep_overrides)
        OmegaConf.copy_cache(from_config=master_config, to_config=composed)  # ${now:...} was resolved meanwhile
        return composed


class PlanningSweeper(Sweeper):
    """Every combination, like Hydra's own sweeper, but all composed before the first runs, and as one experiment.

    max_batch_size  jobs that a parallel launcher is given at once; None: all
    params          what is swept: key to values, in Hydra's sweep syntax
    within_s        seconds of computing that all runs should take here: where they take longer, each serves fewer
                    requests; None, or where the command line says how many: as many as the workload has
    """

    def __init__(
        self, max_batch_size: int | None, params: dict[str, str] | None, within_s: float | None = None
    ) -> None:
        self._max_batch_size, self._within_s = max_batch_size, within_s
        self._params = dict(params or {})

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Keep what Hydra offers."""
        self._master = config
        self._loader: ConfigLoader = hydra_context.config_loader
        self._compose: Callable[[DictConfig, list[str]], DictConfig] = self._loader.load_sweep_config
        if self._parallel() == 1:
            points = _Points(self._loader)
            self._compose = points.plan
            hydra_context = HydraContext(cast("ConfigLoader", points), hydra_context.callbacks)
        self._launcher: Launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> list[Any]:
        """Plan all points, run those that are not done yet, close. Exits with the sweep's code unless that is 0.

        `arguments` are the overrides of the command line.
        """
        texts = [f"{key}={value}" for key, value in self._params.items()] + arguments
        with ExitStack() as claim:  # of the sweep's directory
            try:
                sweep, jobs = self._open(texts, claim)
            except KvlabError as error:
                fail(str(error))
            return self._run(sweep, jobs)

    def _run(self, sweep: Sweep, jobs: list[list[str]]) -> list[Any]:
        """See `sweep`: launch the jobs, close the sweep."""
        first = int(sweep.plan.jobs[0].directory) if jobs else 0
        # In this process one by one, to report and to stop in between.
        size = 1 if sweep.plan.parallel == 1 else self._max_batch_size or max(len(jobs), 1)
        with sweep.running():
            for start in range(0, len(jobs), size):
                try:
                    done = self._launcher.launch(jobs[start : start + size], initial_job_idx=first + start)
                    for number, ended in enumerate(done, first + start):
                        sweep.returned[str(number)] = ended.return_value
                except Exception as error:  # a worker that was killed, a queue that is gone
                    reason = next(iter(str(error).strip().splitlines()), "")
                    kind = "" if isinstance(error, KvlabError) else f"{type(error).__name__}: "
                    sweep.problems.append(kind + reason)
                if sweep.interrupted:
                    break
                sweep.progress.report()
        if code := sweep.close(figures=self._master.figures):
            sys.exit(code)
        return list(sweep.returned.values())

    def _open(self, texts: list[str], claim: ExitStack) -> tuple[Sweep, list[list[str]]]:
        """Compose the points and open the sweep, in a directory that `claim` keeps for it alone. Returns it and the
        overrides of each job. Raises a KvlabError.
        """
        from kvlab.cli.sweep_points import compose_points, replaced
        from kvlab.lab.campaigns.sweep.plan import SweepPlan
        from kvlab.lab.campaigns.sweep.sweep import open_sweep
        from kvlab.lab.files import claimed
        from kvlab.lab.results.provenance import sweep_digest
        from kvlab.lab.terminal import warn

        config = self._master
        repeats = OmegaConf.select(config, "repeats")
        if not isinstance(repeats, int):
            raise ConfigError("repeats", repeats, "must be a number, at least 1")
        at_least("repeats", repeats, 1, MOST_REPEATS)
        if self._within_s is not None and not self._within_s > 0:
            text = "must be more than 0 seconds; null sets no limit"
            raise ConfigError("hydra.sweeper.within_s", f"{self._within_s:g}", text)
        warn(*replaced(self._loader, config, texts))
        composed, varied = compose_points(self._loader, self._compose, config, texts, repeats)
        if any(made.config is not None and made.config.dry_run for made in composed):
            text = "shows the workload of one run; leave out -m, sweep= and repeats="
            raise ConfigError("dry_run", "true", text)
        if fewer := self._fewer_requests([made.config for made in composed], texts):
            composed, varied = compose_points(self._loader, self._compose, config, [*texts, fewer], repeats)
        choices = config.hydra.runtime.choices
        plan = SweepPlan(
            name=str(
                redact(config.run_name or "")
                or choices.get("experiment")
                or choices.get("sweep")
                or " ".join(["sweep", *varied] if varied else ["repeats"])
            ),
            digest=sweep_digest(made.point.digest for made in composed),
            varied=varied,
            optimize=config.optimize,
            parallel=self._parallel(),
            repeats=repeats,
            points=[made.point for made in composed],
        )
        tracking = cast("TrackingConfig", OmegaConf.to_object(config.tracking))
        directory = Path(config.hydra.sweep.dir).resolve()
        claim.enter_context(claimed("hydra.sweep.dir", directory))
        sweep = open_sweep(plan, [made.config for made in composed], directory, tracking, resume=config.resume)
        planned = zip(composed, sweep.plan.points, strict=True)
        return sweep, [made.overrides for made, point in planned if point.done_before is None]

    def _fewer_requests(self, configs: list[RunConfig | None], texts: list[str]) -> str | None:
        """The setting with which the runs take as long as they should here, which is said; None: they do."""
        runs = [config for config in configs if config is not None]
        if self._within_s is None or runs != configs or any(text.startswith(f"{_COUNT}=") for text in texts):
            return None
        from kvlab.lab.run.estimate import in_words, requests_within
        from kvlab.lab.terminal import Terminal, print_note

        if (within := requests_within(runs, self._within_s)) is None:
            return None
        count, needed = within
        every = runs[0].workload.num_requests
        text = f"{count} requests in place of {every}: at this machine's measured rates {every} would take about "
        text += (
            f"{in_words(needed)}, more than hydra.sweeper.within_s={self._within_s:g}; {_COUNT}={every} serves all"
        )
        print_note(Terminal(), text, "note")
        return f"{_COUNT}={count}"

    def _parallel(self) -> int:
        """Jobs at once, as far as the launcher's settings say; 0: all."""
        launcher = self._master.hydra.launcher
        if str(launcher.get("_target_")).endswith(".BasicLauncher"):
            return 1
        jobs = launcher.get("n_jobs")
        if jobs is not None:
            return int(jobs) if jobs > 0 else os.cpu_count() or 1
        return self._max_batch_size or 0
