"""`hydra/sweeper=kvlab`: every combination, like Hydra's own sweeper, but planned as one experiment.

Hydra finds it by its place in the namespace `hydra_plugins`; what it does is in src/sweep.py.
"""

# Annotations as they are: Hydra loads plugins before Python could look up what a string means.
from dataclasses import dataclass
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


@dataclass
class KvlabSweeperConfig:
    """Its settings, named as those of Hydra's own sweeper."""

    _target_: str = "hydra_plugins.kvlab_sweeper.KvlabSweeper"
    max_batch_size: int | None = None  # jobs that a parallel launcher is given at once; None: all
    params: dict[str, str] | None = None  # what is swept: key to values, in Hydra's sweep syntax


ConfigStore.instance().store(group="hydra/sweeper", name="kvlab", node=KvlabSweeperConfig, provider="kvlab_sweeper")


class KvlabSweeper(Sweeper):
    """Hands what Hydra knows of a sweep to `kvlab.cli.sweep`."""

    def __init__(self, max_batch_size: int | None, params: dict[str, str] | None) -> None:
        self.max_batch_size = max_batch_size
        self.params = dict(params or {})

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Take what Hydra offers."""
        from hydra.core.plugins import Plugins

        self.master = config
        self.context = hydra_context
        self.launcher: Launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> Any:
        """Run every point. `arguments` are the overrides of the command line."""
        from kvlab.cli import sweep

        return sweep.run(self, arguments)
