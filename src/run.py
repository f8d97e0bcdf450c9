"""python -m src.run: one run, or with -m (or a sweep=) one run per point.

Everything else is in the package; here Hydra composes the configuration and its mistakes become sentences.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NoReturn, cast

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from kvlab.config import RunConfig
from kvlab.errors import KvlabError
from src import sweep

ROOT = Path(__file__).resolve().parents[1]
GROUPS = ("model", "kv", "scheduler", "attention", "executor", "workload", "tracking")

ConfigStore.instance().store(name="schema", node=RunConfig)
sweep.register_callback()


@hydra.main(version_base="1.3", config_path=str(ROOT / "conf"), config_name="run")
def job(cfg: DictConfig) -> float | None:
    """One run. Returns the metric that `optimize` names, NaN where the run has none."""
    hydra_config = HydraConfig.get()
    in_sweep = hydra_config.mode is RunMode.MULTIRUN
    directory = Path(hydra_config.runtime.output_dir)
    point = sweep.point_name(list(hydra_config.overrides.task)) if in_sweep else ""
    try:
        config = cast(RunConfig, OmegaConf.to_object(cfg))
        # Imported this late so that --help and a mistyped option answer at once.
        from rich.console import Console

        from kvlab.lab.execute import RunContext, execute

        context = RunContext(
            directory=directory,
            root=ROOT,
            config_yaml=OmegaConf.to_yaml(cfg, resolve=True),
            choices={group: hydra_config.runtime.choices[group] for group in GROUPS},
            console=Console(),
            name=point or config.run_name or _name(config),
            in_sweep=in_sweep,
            parent_run_id=sweep.parent_run_id() if in_sweep else None,
        )
        result = execute(config, context)
    except KvlabError as error:
        if not in_sweep:
            _fail(str(error), code=2)
        sweep.record_failure(directory, point, error)
        return float("nan")
    if in_sweep:
        sweep.stop_if_interrupted(result)
    elif result.status != "finished":
        sys.exit(130 if result.status == "interrupted" else 1)
    elif result.tracking_error:
        sys.exit(1)
    return result.metrics.get(config.optimize, float("nan")) if config.optimize else None


def _name(config: RunConfig) -> str:
    return f"{config.model.name} {config.kv.backend} {config.workload.name}"


def _fail(message: str, code: int) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(code)


def main() -> None:
    """Run the command line; a sweep is summed up when its last point is done."""
    try:
        job()
    finally:
        sweep.finish()


if __name__ == "__main__":
    main()
