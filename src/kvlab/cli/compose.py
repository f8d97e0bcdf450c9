"""Composing a run's configuration: what all commands that take the settings of a run share."""

import re
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, fields, is_dataclass
from functools import cache
from typing import Any, cast

import yaml
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict, read_write
from omegaconf._utils import OmegaConfDumper

from kvlab.cli.groups import write_out_groups
from kvlab.cli.mistakes import SEVERAL, explained
from kvlab.cli.overrides import written_out
from kvlab.cli.resolvers import TAKEN
from kvlab.config import RunConfig
from kvlab.errors import ConfigError, nearest
from kvlab.lab.settings import Composition, flatten
from kvlab.paths import CONF
from kvlab.peers.engines import is_peer
from kvlab.plugins import load_plugins
from kvlab.secrets import redacted

GROUPS = ("engine", "model", "kv", "scheduler", "attention", "executor", "workload", "tracking")
SIMULATED_GROUPS = ("hardware", "framework")  # a choice of these there may be
# Halves of surrogate pairs are what Python makes of bytes that are no UTF-8.
_NO_TEXT = re.compile("[\0\ud800-\udfff]")


class _Dumper(getattr(yaml, "CDumper", yaml.Dumper)):  # type: ignore[misc]
    """Quotes what OmegaConf quotes, for a tenth of the time of its own, which loses some ends of lines."""


_Dumper.add_representer(str, OmegaConfDumper.str_representer)


def run_config(composed: DictConfig) -> RunConfig:
    """The run's part of what Hydra composed, its plugins imported, then checked: every command comes through here.

    Raises a KvlabError, also for an interpolation that does not resolve and for a key that was added with `+`.
    """
    return _checked(without_hydra(composed))


def _checked(run: DictConfig) -> RunConfig:
    _check_keys(run, _raw(run))
    with explained(lambda: [f"{key}={value}" for key, value in flatten(_raw(run)).items()]):
        load_plugins(run.plugins)
        write_out_groups(run)
        config = cast(RunConfig, OmegaConf.to_object(run))
    for key, value in flatten(asdict(config)).items():
        if isinstance(value, str) and _NO_TEXT.search(value):
            raise ConfigError(key, value, "is no text: files and tracking stores could not keep it")
    return config


def _raw(run: DictConfig) -> dict[str, Any]:
    """As it was written, interpolations not resolved."""
    return cast("dict[str, Any]", OmegaConf.to_container(run, resolve=False))


def _check_keys(node: DictConfig, raw: Mapping[str, Any], prefix: str = "") -> None:
    """Raise ConfigError for a key in `raw` that the schema does not have; Hydra lets `+key=value` add one."""
    kind = OmegaConf.get_type(node)
    if not is_dataclass(kind):
        return  # a dictionary has what it is given
    known = [field.name for field in fields(kind)]
    for key, value in raw.items():
        if key not in known:
            hint = nearest(key, known, f"did you mean {prefix}{{}}? ")
            raise ConfigError(f"{prefix}{key}", value, f"unknown; {hint}known: {', '.join(known)}")
        if isinstance(value, dict):
            _check_keys(node[key], value, f"{prefix}{key}.")


def without_hydra(composed: DictConfig) -> DictConfig:
    """What Hydra composed without Hydra's own settings: a copy, if it has them."""
    if "hydra" not in composed:
        return composed
    run = deepcopy(composed)
    _drop_hydra(run)
    return run


def _drop_hydra(run: DictConfig) -> None:
    with read_write(run), open_dict(run):
        run.pop("hydra")


def composition(composed: DictConfig, choices: dict[str, str]) -> Composition:
    """What Hydra composed, checked, and as it is recorded. Raises a KvlabError."""
    run = without_hydra(composed)
    config = _checked(run)

    @cache
    def recorded() -> tuple[dict[Any, Any], dict[str, str]]:
        written: dict[str, str] = {}
        return _as_written(run, _raw(run), "", written), written

    def text() -> str:
        return cast(str, yaml.dump(recorded()[0], Dumper=_Dumper, sort_keys=False, allow_unicode=True))

    return Composition(config, choices, text, lambda: recorded()[1])


def _as_written(node: Any, raw: Any, prefix: str, written: dict[str, str]) -> dict[Any, Any]:
    """The values of a DictConfig or ListConfig by key or index, without secrets. A text that the environment is
    part of stays as it was written; it is also added to `written`.
    """
    recorded: dict[Any, Any] = {}
    keys: Iterable[Any] = node if isinstance(node, DictConfig) else range(len(node))
    for key in keys:
        text = raw[key]
        if not isinstance(text, dict | list) and not (isinstance(text, str) and "${" in text):
            recorded[key] = redacted(str(key), text)  # the value, which the node takes ten times as long to give
            continue
        before, value = len(TAKEN), node[key]
        if isinstance(value, DictConfig | ListConfig):
            parts = OmegaConf.to_container(value, resolve=False) if isinstance(text, str) else text
            inner = _as_written(value, parts, f"{prefix}{key}.", written)
            recorded[key] = inner if isinstance(value, DictConfig) else list(inner.values())
        elif isinstance(value, str) and len(TAKEN) > before:
            recorded[key] = written[f"{prefix}{key}"] = raw[key]
        else:
            recorded[key] = redacted(str(key), value)
    return recorded


def group_choices(choices: Mapping[str, object]) -> dict[str, str]:
    """What was chosen in each group. Raises ConfigError where that is not one name."""
    for group in GROUPS:
        if not isinstance(choices.get(group), str):
            raise ConfigError(group, choices.get(group), f"a run has one choice of {group}: {group}=name")
    chosen = {group: choices.get(group) for group in (*GROUPS, *SIMULATED_GROUPS)}
    return {group: choice for group, choice in chosen.items() if isinstance(choice, str)}


def compose_run(overrides: Sequence[str]) -> Composition:
    """Compose the run that `kvlab run <overrides>` would be. Raises ConfigError with Hydra's reason."""
    with explained(overrides):
        with initialize_config_dir(str(CONF), version_base="1.3"):
            composed = compose("run", written_out(overrides), return_hydra_config=True)
        choices = group_choices(composed.hydra.runtime.choices)
        _drop_hydra(composed)
        return composition(composed, choices)


def compose_one(overrides: Sequence[str], command: str, *, fleets: str = "none") -> RunConfig:
    """The configuration of that run, for a `command` without sweeps, and of one engine, unless it takes "all"
    `fleets`, or those of "simulated" devices. Raises ConfigError with Hydra's reason.
    """
    try:
        config = compose_run(overrides).config
    except ConfigError as error:
        if error.reason.startswith(SEVERAL):
            raise ConfigError(error.key, error.value, f"{command} does not sweep: give one value") from error
        raise
    is_one = fleets == "none" or (fleets == "simulated" and config.hardware is None and not config.fleet.groups)
    if config.fleet.replicas > 1 and is_one:
        text = f"{command} is of one engine; kvlab run serves from several"
        raise ConfigError("fleet.replicas", config.fleet.replicas, text)
    if is_peer(config.engine.kind):
        raise ConfigError("engine", config.engine.kind, f"{command} has kvlab's own engine; leave engine= out")
    return config
