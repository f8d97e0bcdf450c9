"""Composing a run's configuration: what all commands that take the settings of a run share."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import cast

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from kvlab.config import RunConfig
from kvlab.errors import ConfigError, KvlabError
from kvlab.paths import CONF
from kvlab.plugins import load_plugins
from kvlab.registry import KEYS, registry

GROUPS = ("model", "kv", "scheduler", "attention", "executor", "workload", "tracking")


def _mode(repeats: object) -> str | None:
    """The mode of a run: with `repeats` it is a sweep."""
    return "MULTIRUN" if str(repeats).isdigit() and int(str(repeats)) > 1 else None


def _names(plugins: Sequence[str]) -> str:
    """The settings that take the name of an implementation, with what there is for each."""
    load_plugins(plugins)
    return "\n".join(f"{key}: {', '.join(registry(key).names())}" for key in KEYS)


# What conf/run.yaml refers to, so that no YAML names a Python object.
ConfigStore.instance().store(name="schema", node=RunConfig)
OmegaConf.register_new_resolver("kvlab_mode", _mode, replace=True)
OmegaConf.register_new_resolver("kvlab_names", _names, replace=True)


@dataclass(frozen=True, slots=True)
class Composition:
    """A checked configuration, its text, and what was chosen in each group."""

    config: RunConfig
    yaml: str
    choices: dict[str, str]


def run_config(composed: DictConfig) -> RunConfig:
    """The run's part of what Hydra composed, its plugins imported, then checked: every command comes through here.

    Raises a KvlabError.
    """
    load_plugins(composed.plugins)
    return cast(RunConfig, OmegaConf.to_object(without_hydra(composed)))


def without_hydra(composed: DictConfig) -> DictConfig:
    """A copy of what Hydra composed without Hydra's own settings."""
    run = deepcopy(composed)
    with read_write(run), open_dict(run):
        run.pop("hydra", None)
    return run


def run_title(config: RunConfig) -> str:
    """The name of a run that was given none."""
    return f"{config.model.name} {config.kv.backend} {config.workload.name}"


def compose_run(overrides: Sequence[str]) -> Composition:
    """Compose the run that `kvlab run <overrides>` would be. Raises ConfigError with Hydra's reason."""
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            composed = compose("run", list(overrides), return_hydra_config=True)
        choices = {group: str(composed.hydra.runtime.choices[group]) for group in GROUPS}
        return Composition(run_config(composed), OmegaConf.to_yaml(without_hydra(composed), resolve=True), choices)
    except (HydraException, OmegaConfBaseException) as error:
        reason: BaseException = error
        while reason.__cause__ is not None and not isinstance(reason, KvlabError):
            reason = reason.__cause__
        if isinstance(reason, KvlabError):
            raise reason from error
        text = " ".join(str(error).split()).partition(" Config search path:")[0]
        raise ConfigError("settings", " ".join(overrides), text) from error
