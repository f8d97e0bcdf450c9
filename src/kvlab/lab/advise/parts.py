"""The groups of unequal replicas that today's fleet has, and how their counts are changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from kvlab.config import RunConfig
from kvlab.config.groups import OWN_KEYS, with_settings

_COUNT = "fleet.groups.{}.count"  # of the group with that number, as on a command line


class Part(NamedTuple):
    """A group: its count of replicas, and the devices of each."""

    name: str
    replicas: int
    devices: int
    hardware: str


def parts_of(config: RunConfig) -> list[Part]:
    """The groups as they were written; none where all replicas are as the run's settings say."""
    found = []
    for group in config.fleet.groups:
        own = with_settings(config, {key: value for key, value in group.items() if key not in OWN_KEYS})
        hardware = own.hardware.name if own.hardware else ""
        found.append(Part(str(group["name"]), group["count"], own.executor.devices, hardware))
    return found


def devices_of(config: RunConfig) -> int:
    """Devices that all replicas have together."""
    if parts := parts_of(config):
        return sum(part.replicas * part.devices for part in parts)
    return config.fleet.replicas * config.executor.devices


def with_counts(counts: Mapping[int, int]) -> dict[str, int]:
    """Settings that give groups, by number, other counts."""
    return {_COUNT.format(number): count for number, count in sorted(counts.items())}


def changed(config: RunConfig, settings: Mapping[str, Any]) -> RunConfig:
    """The configuration with other settings, of which some may be counts of groups. Raises ConfigError."""
    others, groups = dict(settings), [dict(group) for group in config.fleet.groups]
    for number, group in enumerate(groups):
        group["count"] = others.pop(_COUNT.format(number), group["count"])
    if groups:
        has_roles = any(group.get("role") for group in groups)
        others |= {"fleet.groups": groups, "fleet.replicas": 1}  # which follow from the counts
        others |= {"fleet.prefill": 0} if has_roles else {}
    return with_settings(config, others)
