"""`hydra/sweeper=kvlab`. Hydra finds sweepers in this namespace alone; what it does is in kvlab.cli.sweep."""

# Annotations as they are: Hydra reads them while it loads the module.
from dataclasses import dataclass

from hydra.core.config_store import ConfigStore

from kvlab.cli.sweep import PlanningSweeper


@dataclass
class KvlabSweeperConfig:
    """Its settings, named as those of Hydra's own sweeper."""

    _target_: str = "hydra_plugins.kvlab_sweeper.KvlabSweeper"
    max_batch_size: int | None = None
    params: dict[str, str] | None = None
    within_s: float | None = None


ConfigStore.instance().store(group="hydra/sweeper", name="kvlab", node=KvlabSweeperConfig, provider="kvlab_sweeper")


class KvlabSweeper(PlanningSweeper):
    """The class that Hydra makes."""
