"""`hydra/launcher=ray`: the runs of a sweep on a Ray cluster. Ray itself is imported as a sweep begins."""

# Annotations as they are: Hydra reads them while it loads the module.
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


@dataclass
class RayLauncherConfig:
    """Where the cluster is, and what each run takes of it.

    address  "auto" or host:port of a cluster that runs; None: RAY_ADDRESS, else one that is started here
    cpus     cores that a run takes of its node
    gpus     GPUs that it takes
    retries  times that a run begins again whose process or node was lost
    """

    _target_: str = "hydra_plugins.kvlab_ray_launcher.RayLauncher"
    address: str | None = None
    cpus: float = 1.0
    gpus: float = 0.0
    retries: int = 2


ConfigStore.instance().store(
    group="hydra/launcher", name="ray", node=RayLauncherConfig, provider="kvlab_ray_launcher"
)


class RayLauncher(Launcher):
    """Each run is a task in a process of its own, on whichever node has room for it."""

    def __init__(self, address: str | None, cpus: float, gpus: float, retries: int) -> None:
        self._address, self._retries = address, retries
        self._takes = {"num_cpus": cpus, "num_gpus": gpus}

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """See Launcher."""
        self._context, self._task, self._config = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """See Launcher. Raises a ConfigError for a cluster that does not answer."""
        from kvlab.cli.on_ray import launch

        Path(str(self._config.hydra.sweep.dir)).mkdir(parents=True, exist_ok=True)
        jobs = dict(enumerate(job_overrides, initial_job_idx))
        return launch(self._context, self._config, self._task, jobs, self._address, self._takes, self._retries)
