"""Composing a run's configuration outside of `hydra.main`: for commands that make many runs of one command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from kvlab.cli import sweep
from kvlab.cli.points import task_config
from kvlab.config import RunConfig
from kvlab.errors import ConfigError, KvlabError

ROOT = Path(__file__).resolve().parents[3]
CONF = ROOT / "conf"
GROUPS = ("model", "kv", "scheduler", "attention", "executor", "workload", "tracking")


@dataclass(frozen=True, slots=True)
class Composition:
    """A checked configuration, its text, and what was chosen in each group."""

    config: RunConfig
    yaml: str
    choices: dict[str, str]


def compose_run(overrides: Sequence[str]) -> Composition:
    """Compose a run from overrides as on its command line. Raises ConfigError with Hydra's reason."""
    ConfigStore.instance().store(name="schema", node=RunConfig)
    sweep.register_callback()
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            composed = compose("run", list(overrides), return_hydra_config=True)
        chosen = composed.hydra.runtime.choices
        config = task_config(composed)
        with read_write(composed), open_dict(composed):
            del composed["hydra"]
        return Composition(
            config, OmegaConf.to_yaml(composed, resolve=True), {group: str(chosen[group]) for group in GROUPS}
        )
    except (HydraException, OmegaConfBaseException) as error:
        reason: BaseException = error
        while reason.__cause__ is not None and not isinstance(reason, KvlabError):
            reason = reason.__cause__
        if isinstance(reason, KvlabError):
            raise reason from error
        text = " ".join(str(error).split()).partition(" Config search path:")[0]
        raise ConfigError("settings", " ".join(overrides), text) from error
