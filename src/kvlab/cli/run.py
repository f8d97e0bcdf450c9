"""kvlab run: one run, or with -m, a sweep= or repeats= one run per point.

Hydra composes the configuration and calls `job` for each run.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from kvlab.cli.compose import composition, group_choices
from kvlab.cli.launchers import check_installed
from kvlab.cli.mistakes import mistake
from kvlab.cli.output import lasting_output
from kvlab.cli.overrides import written_out
from kvlab.cli.settings import fail, warn_of_repeats
from kvlab.config import RunConfig
from kvlab.errors import ConfigError, KvlabError
from kvlab.lab.campaigns.sweep.plan import Job, read_plan
from kvlab.lab.settings import Composition
from kvlab.paths import CONF
from kvlab.plugins import FULL_ERROR, SET_HERE, asks_for_traceback, told
from kvlab.run_files import SUMMARY
from kvlab.secrets import redacted_output

if TYPE_CHECKING:
    from kvlab.lab.run.reporter import RunResult

_said: dict[str, set[str]] = {}  # by runs of a sweep in this process, by its directory


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="run")
def job(cfg: DictConfig) -> dict[str, Any] | None:
    """One run, alone or as a point of a sweep. Returns a point's summary, and what of it was kept nowhere else."""
    with redacted_output():  # here too: a launcher may call this in another process
        return _run(cfg)


def _run(cfg: DictConfig) -> dict[str, Any] | None:
    settings = HydraConfig.get()
    directory, sweep, point = Path(settings.runtime.output_dir), None, None
    if settings.mode is RunMode.MULTIRUN:
        if (sweeper := settings.runtime.choices["hydra/sweeper"]) != "kvlab":
            fail(f"hydra/sweeper={sweeper}: a sweep needs kvlab's own; leave it out, or search with kvlab tune")
        directory = directory / str(settings.job.num)
        sweep = read_plan(Path(settings.sweep.dir))
        point = sweep.job(directory.name)
        if not point.in_sweep_process:
            _end_with_sweep(sweep.process)
    try:
        made = composition(cfg, group_choices(settings.runtime.choices))
        result = _executed(made, directory, point, settings)
    except Exception as error:
        if point is not None:
            from kvlab.lab.campaigns.sweep.sweep import record_failure

            return record_failure(directory, point.name, error)
        if isinstance(error, KvlabError):
            if not any("hydra.run.dir" in word for word in settings.overrides.hydra):
                with suppress(OSError):
                    directory.rmdir()  # Hydra's own and empty: a report on all runs would stumble over it
            fail(str(error))
        if not asks_for_traceback() and (text := told(error)):
            fail(text)
        raise
    if result is None:
        return None
    if sweep is not None and point is not None:
        if not point.in_sweep_process:
            _end_with_sweep(sweep.process)  # a first signal stopped the run alone
        elif result.status == "interrupted":
            raise KeyboardInterrupt  # it was meant for the sweep
        return {**dataclasses.asdict(result), "choices": made.choices}
    if result.status != "finished" or result.tracking_error or result.unwritten:
        sys.exit(130 if result.status == "interrupted" else 1)
    return None


def _executed(made: Composition, directory: Path, point: Job | None, settings: HydraConf) -> RunResult | None:
    """The run, alone or as this point of a sweep; None where none was made: it was done before, or is a dry one."""
    config = made.config
    if config.resume and point is None and _was_done(config):
        return None
    # Imported this late so that --help and a mistyped option answer at once.
    from kvlab.lab.terminal import Terminal

    if config.dry_run:
        from kvlab.lab.run.dry_run import dry_run

        dry_run(config, directory, Terminal())
        return None
    if point is None and (directory / SUMMARY).exists():
        text = "holds a run; name another directory, or move that one away"
        raise ConfigError("hydra.run.dir", directory, text)
    beside = None
    if point is None and config.tracking.backend != "off" and "mlflow" not in sys.modules:
        from kvlab.lab.tracking.beside import TrackingProcess

        beside = TrackingProcess(config.tracking)  # which imports MLflow while this process imports the rest
    from kvlab.lab.run.execute import RunContext, execute

    name = made.name_after(settings.overrides.task) if point is None else point.name
    context = RunContext(made, directory, Terminal(), name, beside=beside)
    if point is not None:
        said, parent = _said.setdefault(settings.sweep.dir, set()), point.parent_run_id
        context = dataclasses.replace(
            context, in_sweep=True, parent_run_id=parent, heading=point.heading, said=said
        )
    return execute(context)


def _end_with_sweep(process: str) -> None:
    """Do not outlive the sweep whose point this process is to run, which may be killed: what is queued is left to
    the sweep that resumes it, and a run in progress is interrupted.
    """
    from kvlab.lab.processes import end_with
    from kvlab.lab.tracking.process import is_alive, number_here

    if is_alive(process) is False:
        sys.stdout.flush()
        print(f"the sweep of this run has ended: {process} is gone", file=sys.stderr, flush=True)
        os._exit(1)  # where SystemExit is taken for a failed job
    if (number := number_here(process)) == os.getppid():
        end_with(number)


def _was_done(config: RunConfig) -> bool:
    """Whether a single run has finished before; if so, its figures are shown. Raises a KvlabError."""
    from kvlab.lab.campaigns.sweep.history import finished_run
    from kvlab.lab.results.provenance import other_versions
    from kvlab.lab.results.tables import comparison_table
    from kvlab.lab.terminal import Terminal, warn

    run = finished_run(config)
    if run is None:
        return False
    warn(*other_versions([run.tags]))
    console = Terminal()
    console.print(comparison_table([(run.name, run.metrics)]))
    console.print(f"done before: run {run.run_id}")
    return True


@lasting_output()
@redacted_output()
def main() -> None:
    """Run the command line. A launcher whose package is not installed is refused with a sentence."""
    try:
        check_installed(sys.argv[1:])
        if not {"-sc", "--shell-completion"} & set(sys.argv):
            warn_of_repeats(sys.argv[1:], ("sweep", "experiment"))
            sys.argv[1:] = written_out(sys.argv[1:])
    except KvlabError as error:
        fail(str(error))
    ours = {} if FULL_ERROR in os.environ else {FULL_ERROR: "1", SET_HERE: "1"}
    os.environ.update(ours)  # else Hydra prints a part of the traceback and exits
    try:
        job()
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        mistaken = mistake(error, [text for text in sys.argv[1:] if not text.startswith("-")])
        if mistaken is None or asks_for_traceback():
            raise
        fail(str(mistaken))
    finally:
        for name in ours:
            os.environ.pop(name, None)
