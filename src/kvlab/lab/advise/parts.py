"""The groups of unequal replicas that today's fleet has, and how their counts and settings are changed."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from kvlab.config import KVConfig, RunConfig, SchedulerConfig
from kvlab.config.groups import OWN_KEYS, with_settings
from kvlab.planning.devices import usual_server

_KEY = "fleet.groups.{}.{}"  # of the group with that number, as on a command line
_EQUAL = "kv.merge_equal"
_SHARE, _BLOCK, _UNIT = "executor.memory_utilization", "kv.block_size", "scheduler.chunk_unit"
_OF_BATCHES = "order", "reserve_prompt", "reserve_output", "conservativeness"  # which static batches have as kvlab


class Part(NamedTuple):
    """A group: its count of replicas, the devices of each, and what they have in place of the run's settings."""

    name: str
    replicas: int
    devices: int
    hardware: str
    scheduler: SchedulerConfig
    kv: KVConfig
    own: frozenset[str]  # keys of settings


def parts_of(config: RunConfig) -> list[Part]:
    """The groups as they were written; none where all replicas are as the run's settings say."""
    found = []
    for group in config.fleet.groups:
        settings = _settings_of(group)
        own = with_settings(config, settings)
        hardware = own.hardware.name if own.hardware else ""
        name, devices = str(group["name"]), own.executor.devices
        found.append(Part(name, group["count"], devices, hardware, own.scheduler, own.kv, frozenset(settings)))
    return found


def devices_of(config: RunConfig) -> int:
    """Devices that all replicas have together."""
    if parts := parts_of(config):
        return sum(part.replicas * part.devices for part in parts)
    return config.fleet.replicas * config.executor.devices


def of_part(number: int, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings, or a count, of the group with that number."""
    return {_KEY.format(number, key): value for key, value in settings.items()}


def setting_of(key: str) -> str:
    """Without the group whose setting it is."""
    return re.sub(_KEY.format(r"\d+", ""), "", key)


def changed(config: RunConfig, settings: Mapping[str, Any]) -> RunConfig:
    """The configuration with other settings, of which some may be of groups. It and each group have what the
    simulated server takes with them where they had the server's own, as a command that gives these settings has it.
    Raises ConfigError.
    """
    of_groups = [_KEY.format(number, "") for number in range(len(config.fleet.groups))]
    others = {key: value for key, value in settings.items() if not key.startswith(tuple(of_groups))}
    other = _with_usual(config, _with_equal(config, others), others)
    groups = []
    for group, prefix in zip(config.fleet.groups, of_groups, strict=True):
        given = {key.removeprefix(prefix): settings[key] for key in settings if key.startswith(prefix)}
        own = _settings_of(group) | _settings_of(given)
        usual = _usual(with_settings(config, _settings_of(group)), with_settings(other, own), given)
        groups.append(group | given | {key: usual[key] for key in usual if key in own or key not in others})
    if groups:
        has_roles = any(group.get("role") for group in groups)
        counts = {"fleet.replicas": 1} | ({"fleet.prefill": 0} if has_roles else {})  # which follow from the groups
        other = with_settings(other, {"fleet.groups": groups} | counts)
    return other


def _settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in OWN_KEYS}


def _with_equal(config: RunConfig, settings: Mapping[str, Any]) -> RunConfig:
    """The configuration with other settings, and with equal blocks kept or merged as the simulated server does with
    these, unless today's are not as it has them.
    """
    usual, kv = usual_server(config), config.kv
    is_own = usual is None or usual.merge_equal or _EQUAL in settings
    if is_own or kv.merge_equal == kv.may_keep_equal(kv.eviction, kv.retention):
        return with_settings(config, settings)
    merged = with_settings(config, {**settings, _EQUAL: True})
    may_keep = merged.kv.may_keep_equal(merged.kv.eviction, merged.kv.retention)
    return with_settings(merged, {_EQUAL: not may_keep})


def _with_usual(config: RunConfig, other: RunConfig, given: Mapping[str, Any]) -> RunConfig:
    return with_settings(other, _usual(config, other, given))


def _usual(config: RunConfig, other: RunConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    """What the simulated server takes with other settings where it had its own, but for those that are `given`:
    SGLang's share of the memory follows from its steps and devices, vLLM's blocks of latent attention from the type
    of K and V, TensorRT-LLM's chunks from its blocks, and how it decides its steps from its forming no static
    batches.
    """
    before, after = usual_server(config), usual_server(other)
    usual: dict[str, Any] = {}
    if before is None or after is None:
        return usual
    if config.executor.memory_utilization == before.memory_utilization:
        usual[_SHARE] = after.memory_utilization
    if config.kv.block_size == before.block_size:
        usual[_BLOCK] = after.block_size
    if config.scheduler.policy == "static" != other.scheduler.policy:
        own = SchedulerConfig()
        unset = (name for name in _OF_BATCHES if getattr(config.scheduler, name) == getattr(own, name))
        usual |= {f"scheduler.{name}": getattr(after, name) for name in unset}
    if config.scheduler.chunk_unit == before.chunk_unit(config.kv.block_size, config.scheduler):
        usual[_UNIT] = after.chunk_unit(other.kv.block_size, other.scheduler)
    return {key: value for key, value in usual.items() if key not in given}
