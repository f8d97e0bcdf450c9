"""Composing a run's configuration: what all commands that take the settings of a run share."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import asdict, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict, read_write
from omegaconf.resolvers import oc

from kvlab.cli.groups import write_out_groups
from kvlab.cli.mistakes import explained
from kvlab.cli.overrides import written_out
from kvlab.config import ExecutorConfig, KVConfig, ModelConfig, RunConfig, SchedulerConfig
from kvlab.config.server_defaults import ServerDefaults, server_defaults
from kvlab.errors import ConfigError
from kvlab.lab.settings import Composition, flatten
from kvlab.models.files import read_object
from kvlab.models.published import located
from kvlab.paths import CONF
from kvlab.peers.engines import is_peer
from kvlab.plugins import load_plugins
from kvlab.registry import KEYS, registry
from kvlab.secrets import redacted, take_from_environment

if TYPE_CHECKING:
    from kvlab.lab.results.roofline import MachineRates

GROUPS = ("engine", "model", "kv", "scheduler", "attention", "executor", "workload", "tracking")
SIMULATED_GROUPS = ("hardware", "framework")  # a choice of these there may be


def _mode(repeats: object) -> str | None:
    """The mode of a run: with `repeats` it is a sweep."""
    return "MULTIRUN" if str(repeats).isdigit() and int(str(repeats)) > 1 else None


def _names(plugins: Sequence[str]) -> str:
    """The settings that take the name of an implementation, with what there is for each."""
    load_plugins(plugins)
    return "\n".join(f"{key}: {', '.join(registry(key).names())}" for key in KEYS)


@cache  # so that a configuration that is read twice is the same
def _rates(dtype: str, threads: int | None) -> MachineRates:
    from kvlab.lab.machine_rates import rates_here

    return rates_here(dtype, threads)


def _here(what: str, timing: str = "", dtype: str = "", threads: int | None = None) -> Any:
    """What `hardware=here` is: this machine's memory, and for a roofline its rates."""
    from kvlab.lab.machine import total_memory

    if what == "memory":
        return f"{total_memory()}B"
    if timing not in ("auto", "roofline"):
        return {} if what == "tflops" else 0.0
    rates = _rates(dtype, threads)
    sustained = rates.product_flops_per_s or rates.flops_per_s
    return {dtype: sustained / 1e12} if what == "tflops" else rates.read_bytes_per_s / 1e9


def _default(name: str, *, _root_: DictConfig) -> float:
    """A setting that nobody gave: on a simulated device what the framework's server has there, and the model's own
    context; else kvlab's.
    """
    defaults = _server(_root_)
    if defaults is None:
        kinds = {"max_seq_len": ModelConfig, "block_size": KVConfig, "memory_utilization": ExecutorConfig}
        own: float = getattr(kinds.get(name, SchedulerConfig), name)
        return own
    if name == "max_seq_len":
        return _context(_root_.model)
    if name == "max_batch_size":  # never more than a step's tokens
        return min(defaults.max_batch_size, int(_root_.scheduler.max_batched_tokens))
    value: float = getattr(defaults, name)
    return value


def _server(run: DictConfig) -> ServerDefaults | None:
    """The defaults of the server that a run simulates."""
    hardware = run.get("hardware")
    if hardware is None:
        return None
    framework = run.framework
    return server_defaults(str(framework.name), str(hardware.name), str(hardware.memory), framework.version)


def _context(model: DictConfig) -> int:
    """The tokens that a model has positions for; kvlab's default where that cannot be read before the run."""
    known = model.architecture.get("max_position_embeddings")
    if known is None and model.path is not None:
        with suppress(OSError, ValueError):
            known = read_object(Path(located(model.path)) / "config.json").get("max_position_embeddings")
    return known if isinstance(known, int) else ModelConfig.max_seq_len


def _environment(name: str, *default: Any) -> str | None:
    """OmegaConf's own resolver, which notes what was taken: that is shown as it was written."""
    take_from_environment(name)
    _taken.append(name)
    value: str | None = oc.env(name, *default)
    return value


_taken: list[str] = []
_NO_TEXT = re.compile(
    "[\0\ud800-\udfff]"
)  # halves of surrogate pairs are what Python makes of bytes that are no UTF-8
# What conf/run.yaml refers to, so that no YAML names a Python object.
ConfigStore.instance().store(name="schema", node=RunConfig)
OmegaConf.register_new_resolver("kvlab_mode", _mode, replace=True)
OmegaConf.register_new_resolver("kvlab_names", _names, replace=True)
OmegaConf.register_new_resolver("kvlab_here", _here, replace=True)
OmegaConf.register_new_resolver("kvlab_default", _default, replace=True)
OmegaConf.register_new_resolver("oc.env", _environment, replace=True)


def run_config(composed: DictConfig) -> RunConfig:
    """The run's part of what Hydra composed, its plugins imported, then checked: every command comes through here.

    Raises a KvlabError, also for an interpolation that does not resolve and for a key that was added with `+`.
    """
    return _checked(without_hydra(composed))


def _checked(run: DictConfig) -> RunConfig:
    _check_keys(run, _raw(run))
    with explained(lambda: _texts(run)):
        load_plugins(run.plugins)
        write_out_groups(run)
        config = cast(RunConfig, OmegaConf.to_object(run))
    for key, value in flatten(asdict(config)).items():
        if isinstance(value, str) and _NO_TEXT.search(value):
            raise ConfigError(key, value, "is no text: files and tracking stores could not keep it")
    return config


def recorded_config(directory: Path) -> RunConfig:
    """The configuration of the run that is recorded in `directory`. Raises a KvlabError."""
    recorded = cast(DictConfig, OmegaConf.load(directory / "config.yaml"))
    names = ("run_name", "tags", "tracking")  # which may refer to an environment that is no more
    recorded = OmegaConf.masked_copy(recorded, [str(key) for key in recorded if key not in names])
    return run_config(cast(DictConfig, OmegaConf.merge(OmegaConf.structured(RunConfig), recorded)))


def _texts(run: DictConfig) -> list[str]:
    """Every setting as it was written."""
    return [f"{key}={value}" for key, value in flatten(_raw(run)).items()]


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
            near = get_close_matches(key, known, n=1)
            hint = f"did you mean {prefix}{near[0]}? " if near else ""
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

    return Composition(config, choices, lambda: _yaml(recorded()[0]), lambda: recorded()[1])


def _yaml(recorded: dict[Any, Any]) -> str:
    return OmegaConf.to_yaml(OmegaConf.create(recorded))


def _as_written(node: Any, raw: Any, prefix: str, written: dict[str, str]) -> dict[Any, Any]:
    """The values of a DictConfig or ListConfig by key or index, without secrets. A text that the environment is
    part of stays as it was written; it is also added to `written`.
    """
    recorded: dict[Any, Any] = {}
    keys: Iterable[Any] = node if isinstance(node, DictConfig) else range(len(node))
    for key in keys:
        before = len(_taken)
        value, text = node[key], raw[key]
        if isinstance(value, DictConfig | ListConfig):
            text = OmegaConf.to_container(value, resolve=False) if isinstance(text, str) else text
            inner = _as_written(value, text, f"{prefix}{key}.", written)
            recorded[key] = inner if isinstance(value, DictConfig) else list(inner.values())
        elif isinstance(value, str) and len(_taken) > before:
            recorded[key] = written[f"{prefix}{key}"] = text
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
        if "Ambiguous value" in str(error):
            text = f"{command} does not sweep: give one value"
            raise ConfigError("settings", " ".join(overrides), text) from error
        raise
    is_one = fleets == "none" or (fleets == "simulated" and config.hardware is None and not config.fleet.groups)
    if config.fleet.replicas > 1 and is_one:
        text = f"{command} is of one engine; kvlab run serves from several"
        raise ConfigError("fleet.replicas", config.fleet.replicas, text)
    if is_peer(config.engine.kind):
        raise ConfigError("engine", config.engine.kind, f"{command} has kvlab's own engine; leave engine= out")
    return config
