"""Groups of a fleet's replicas, each with settings of its own beside the run's."""

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, NamedTuple, TypeVar

from kvlab.config.engine import EngineConfig
from kvlab.config.hardware import HardwareConfig
from kvlab.config.values import at_least, one_of
from kvlab.errors import CapacityError, ConfigError, KvlabError, WorkloadError

ROLES = ("prefill", "decode")
OWN_KEYS = ("count", "name", "role")  # of a group; all others are settings of its replicas
_SECTIONS = ("kv", "scheduler", "attention", "executor", "hardware", "framework")
_OF_RUNS = ("executor.kind", "executor.device", "executor.recording")
Config = TypeVar("Config", bound=EngineConfig)


class ReplicaGroup(NamedTuple):
    """So many replicas, and the settings that they have in place of the run's."""

    name: str
    replicas: int
    role: str | None  # prefill, decode; None: both
    settings: Mapping[str, Any]  # by dotted key
    grows: bool = False  # it was given no count, and has what others leave


def read_groups(groups: Iterable[Mapping[str, Any]], replicas: int, prefill: int) -> list[ReplicaGroup]:
    """The groups of `fleet.groups`: those that prefill come first. One that has no count has what is left of
    `fleet.replicas`; where one that prefills and one that decodes have none, the first has what is left of
    `fleet.prefill`, or one replica. Raises ConfigError.
    """
    read = []
    for number, group in enumerate(groups):
        key, settings = f"fleet.groups[{number}]", {k: v for k, v in group.items() if k not in OWN_KEYS}
        count, role = group.get("count"), group.get("role")
        if count is not None and (not isinstance(count, int) or isinstance(count, bool)):
            text = "needs a count of replicas, a whole number, as {count: 2, hardware: l40s}"
            raise ConfigError(key, dict(group), text)
        at_least(f"{key}.count", count, 1)
        if role is not None:
            one_of(f"{key}.role", role, ROLES)
        for name in settings:
            check_setting(f"{key}.{name}", name, settings[name])
        read.append(
            ReplicaGroup(str(group.get("name", f"group {number}")), count or 0, role, settings, count is None)
        )
    roles = {group.role for group in read}
    if roles - {None} and roles != set(ROLES):
        text = "a role for each group, prefill or decode and both among them; or for none"
        raise ConfigError("fleet.groups", [group.role for group in read], text)
    read.sort(key=lambda group: group.role == "decode")
    growing = [number for number, group in enumerate(read) if group.grows]
    if len({read[number].role for number in growing}) < len(growing):
        text = "have no count of replicas; one group may be without, or one of each role"
        raise ConfigError("fleet.groups", " and ".join(read[number].name for number in growing), text)
    for number in growing:
        prefills = number < growing[-1]
        others = sum(group.replicas for group in read if not prefills or group.role == "prefill")
        key, given = ("fleet.prefill", prefill or others + 1) if prefills else ("fleet.replicas", replicas)
        if given <= others:
            text = f"leaves none for the group {read[number].name} of fleet.groups, which has no count; take more"
            raise ConfigError(key, given, f"{text}, or give it one, as {{count: 2}}")
        read[number] = read[number]._replace(replicas=given - others)
    return read


def check_setting(key: str, name: str, value: object) -> None:
    """Raise ConfigError for a setting that replicas of one fleet have in common."""
    section, _, leaf = name.partition(".")
    if section == "model" and leaf != "max_seq_len":
        text = "replicas behind a router serve one model: set it for the run, not for a group"
        raise ConfigError(key, value, text)
    if name in _OF_RUNS or (name != "model.max_seq_len" and section not in _SECTIONS) or not leaf:
        text = f"is no setting of a group; it has {', '.join(OWN_KEYS)}, model.max_seq_len and those of "
        raise ConfigError(key, value, text + ", ".join(_SECTIONS))


def of_group(error: KvlabError, name: str) -> KvlabError:
    """The error of a group of replicas, which it names; of the only group, which has no name, as it is."""
    if name and isinstance(error, ConfigError):
        return ConfigError(error.key, error.value, f"{error.reason} (the group {name} of fleet.groups)")
    if name and isinstance(error, CapacityError | WorkloadError):
        return type(error)(f"the group {name} of fleet.groups: {error}")
    return error


def with_settings(config: Config, settings: Mapping[str, Any]) -> Config:
    """The configuration with other values, by dotted key, checked. Raises ConfigError."""
    changed: Config = _replaced(config, settings, "")
    return changed


def _replaced(section: Any, settings: Mapping[str, Any], prefix: str) -> Any:
    inner: dict[str, dict[str, Any]] = {}
    known = {field.name for field in fields(section)}
    for key, value in settings.items():
        name, _, rest = key.partition(".")
        if name not in known:
            raise ConfigError(f"{prefix}{name}", value, f"unknown; known: {', '.join(sorted(known))}")
        inner.setdefault(name, {})[rest] = value
    changed = {}
    for name, values in inner.items():
        now = getattr(section, name)
        if now is None and name == "hardware":
            now = HardwareConfig(**{key: value for key, value in values.items() if "." not in key})
        changed[name] = values[""] if "" in values else _replaced(now, values, f"{prefix}{name}.")
    return replace(section, **changed)


def differences(base: Any, other: Any, prefix: str = "") -> dict[str, Any]:
    """What a configuration has in place of another's values, by dotted key."""
    found: dict[str, Any] = {}
    for field in fields(other):
        own, was = getattr(other, field.name), getattr(base, field.name, None)
        if is_dataclass(own):
            found |= differences(was, own, f"{prefix}{field.name}.")
        elif own != was or base is None:
            found[f"{prefix}{field.name}"] = own
    return found
