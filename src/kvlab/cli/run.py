"""python -m src.run: one run, or with -m, a sweep= or repeats= one run per point.

Everything else is in the package; here Hydra composes the configuration and its mistakes become sentences.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from kvlab.cli import sweep
from kvlab.cli.compose import GROUPS, run_config, run_title
from kvlab.cli.resuming import was_done
from kvlab.errors import KvlabError
from kvlab.paths import CONF

_EXTRAS = {"joblib": ("hydra_joblib_launcher", "joblib"), "submitit": ("hydra_submitit_launcher", "slurm")}


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="run")
def job(cfg: DictConfig) -> float | None:
    """One run. Returns the metric that `optimize` names, NaN where the run has none."""
    hydra_config = HydraConfig.get()
    in_sweep = hydra_config.mode is RunMode.MULTIRUN
    directory = Path(hydra_config.runtime.output_dir)
    point = sweep.Job("", "", None)
    if in_sweep:
        point = sweep.job(Path(hydra_config.sweep.dir), directory, list(hydra_config.overrides.task))
    try:
        config = run_config(cfg)
        if config.resume and not in_sweep and was_done(config):
            return None
        # Imported this late so that --help and a mistyped option answer at once.
        from rich.console import Console

        from kvlab.lab.execute import RunContext, execute

        context = RunContext(
            directory=directory,
            root=Path(),
            config_yaml=OmegaConf.to_yaml(cfg, resolve=True),
            choices={group: hydra_config.runtime.choices[group] for group in GROUPS},
            console=Console(),
            name=point.name or config.run_name or run_title(config),
            in_sweep=in_sweep,
            parent_run_id=point.parent_run_id,
            heading=point.heading or None,
        )
        result = execute(config, context)
    except Exception as error:
        if not in_sweep:
            if isinstance(error, KvlabError):
                _fail(str(error), code=2)
            raise
        sweep.record_failure(directory, point.name, error)
        sweep.after_job(None)
        return float("nan")
    if in_sweep:
        sweep.after_job(result)
    elif result.status != "finished":
        sys.exit(130 if result.status == "interrupted" else 1)
    elif result.tracking_error:
        sys.exit(1)
    return result.metrics.get(config.optimize, float("nan")) if config.optimize else None


def _fail(message: str, code: int) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(code)


def _refuse_missing_launcher(arguments: list[str]) -> None:
    """End with a sentence where the command line names a launcher whose package is not installed."""
    for text in arguments:
        key, _, value = text.partition("=")
        for name, (module, extra) in _EXTRAS.items():
            if key == "hydra/launcher" and value.startswith(name) and find_spec(f"hydra_plugins.{module}") is None:
                _fail(f"{text}: needs a package that is not installed: pip install 'kvlab[{extra}]'", code=2)


def main() -> None:
    """Run the command line; a sweep is summed up when its last point is done."""
    _refuse_missing_launcher(sys.argv[1:])
    try:
        job()
    except KeyboardInterrupt:
        if not sweep.interrupt():
            raise
    finally:
        sweep.finish()


if __name__ == "__main__":
    main()
