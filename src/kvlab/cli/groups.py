"""Groups of replicas as they are composed: each has the run's settings, but for its own."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import is_dataclass
from itertools import chain, count
from operator import attrgetter
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from kvlab.cli.mistakes import mistake
from kvlab.cli.overrides import check_key
from kvlab.config import HardwareConfig, RunConfig
from kvlab.config.fleet import FleetConfig
from kvlab.config.groups import OWN_KEYS, check_setting, differences
from kvlab.errors import ConfigError, nearest
from kvlab.lab.settings import flatten
from kvlab.paths import CONF


def write_out_groups(run: DictConfig) -> None:
    """Write into `fleet.groups` of a composed run all that each group has in place of the run's settings, its
    hardware and the defaults that follow from that included, and a name for each. A run that has no hardware while
    every group names its own has that of the first.

    Raises ConfigError, for a setting that there is not and for one that a group cannot have.
    """
    written = cast("list[dict[str, Any]]", OmegaConf.to_container(run.fleet.groups, resolve=True))
    groups = [_flat(group, f"fleet.groups[{n}]") for n, group in enumerate(written)]
    if not groups:
        return
    with read_write(run), open_dict(run):
        if run.hardware is None and all("hardware" in group for group in groups):
            run.hardware = _hardware("fleet.groups[0].hardware", groups[0]["hardware"])
        base = _engine(deepcopy(run))
        written_out = [_written_out(run, base, group, number) for number, group in enumerate(groups)]
        run.fleet.groups = _told_apart(written_out, groups)


def _written_out(run: DictConfig, base: RunConfig, group: dict[str, Any], number: int) -> dict[str, Any]:
    key, own = f"fleet.groups[{number}]", deepcopy(run)
    settings = {name: value for name, value in group.items() if name not in OWN_KEYS}
    with read_write(own), open_dict(own):
        for name, value in settings.items():
            if name == "hardware":
                own.hardware = _hardware(f"{key}.hardware", value)
                continue
            try:
                OmegaConf.update(own, name, value, merge=False)
            except Exception as error:
                if isinstance(found := mistake(error, [f"{key}.{name}={value}"]), ConfigError):
                    raise found from error
                raise
        try:
            composed = _engine(own)
        except Exception as error:
            raise _named(key, error) from error
    settings = _as_composed(settings, composed) | differences(base, composed)
    kept = {name: group[name] for name in OWN_KEYS if group.get(name) is not None}
    return {"name": _name(group, run), **kept, **settings}


def _as_composed(settings: Mapping[str, Any], composed: RunConfig) -> dict[str, Any]:
    """A group's settings as they were composed: also what the run has so too, and may have otherwise."""
    found = dict[str, Any]()
    for name in settings:
        section, _, leaf = name.rpartition(".")
        owner = attrgetter(section)(composed) if section else None
        if is_dataclass(owner):  # not a part of a mapping, which is another whole
            found[name] = getattr(owner, leaf)
    return found


def _told_apart(groups: list[dict[str, Any]], given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Groups of different names: those that were given none are numbered where another is called so. Raises
    ConfigError for a name that was given twice.
    """
    names = [group["name"] for group in given if "name" in group]
    for number, (group, own) in enumerate(zip(groups, given, strict=True)):
        name = group["name"]
        if "name" in own and names.count(name) > 1:
            other = next(at for at in range(number + 1, len(given)) if given[at].get("name") == name)
            text = f"is the name of fleet.groups[{other}] too, and their requests could not be told apart"
            raise ConfigError(f"fleet.groups[{number}].name", name, f"{text}; give each its own")
        if "name" not in own:
            numbered = (f"{name} ({again})" for again in count(2))
            group["name"] = next(new for new in chain([name], numbered) if new not in names)
            names.append(group["name"])
    return groups


def _engine(run: DictConfig) -> RunConfig:
    """The run's settings, its fleet aside, which it loses."""
    with read_write(run), open_dict(run):
        run.fleet = OmegaConf.structured(FleetConfig)
    return cast(RunConfig, OmegaConf.to_object(run))


def _flat(group: dict[str, Any], key: str) -> dict[str, Any]:
    """Dotted keys, however they were written; checked."""
    flat = flatten(group)
    for name, value in flat.items():
        if name in OWN_KEYS or name == "hardware":
            continue
        if "." not in name and (text := nearest(name, (*OWN_KEYS, "hardware"), "unknown; did you mean {}?")):
            raise ConfigError(f"{key}.{name}", value, text)
        try:
            check_key(name, str(value))
        except ConfigError as error:
            raise ConfigError(f"{key}.{name}", value, error.reason) from error
        check_setting(f"{key}.{name}", name, value)
    return flat


def _hardware(key: str, name: object) -> DictConfig:
    """The device of a file in `conf/hardware`. Raises ConfigError for one that there is not."""
    files = {file.stem: file for folder in (CONF, Path("conf")) for file in (folder / "hardware").glob("*.yaml")}
    if name not in files:
        hint = nearest(str(name).lower(), files, "; did you mean {}?")
        raise ConfigError(key, name, f"unknown; known: {', '.join(sorted(files))}{hint}")
    return cast(DictConfig, OmegaConf.merge(OmegaConf.structured(HardwareConfig), OmegaConf.load(files[str(name)])))


def _name(group: Mapping[str, Any], run: DictConfig) -> str:
    """What a group is called that was given no name: its role, its devices, and what else it has of its own."""
    given = [name for name in group if name not in (*OWN_KEYS, "hardware", "executor.tensor_parallel")]
    others = [f"{name.rpartition('.')[2]}={group[name]}" for name in given]
    devices = group.get("executor.tensor_parallel", 1)
    hardware = group.get("hardware") or (run.hardware and run.hardware.name)
    shows = hardware and ("hardware" in group or devices > 1 or not others)
    parts = [f"{devices} x {hardware}" if devices > 1 else str(hardware)] if shows else []
    return " ".join([*([group["role"]] if group.get("role") else []), *parts, *others]) or "the run's own"


def _named(key: str, error: Exception) -> Exception:
    """The error of the settings of the group that is `key`, which it names."""
    found = mistake(error, [f"{key}=..."]) or error
    if isinstance(found, ConfigError) and not found.key.startswith(key):
        return ConfigError(f"{key}.{found.key}", found.value, found.reason)
    return found
