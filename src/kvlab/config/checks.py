"""Checks that several groups of settings share."""

from __future__ import annotations

import math

from kvlab.errors import ConfigError
from kvlab.registry import registry


def one_of(key: str, value: str, known: tuple[str, ...]) -> None:
    """Raise ConfigError, with the known values, unless `value` is one of them."""
    if value not in known:
        raise ConfigError(key, value, f"unknown; known: {', '.join(known)}")


def registered(axis: str, name: str, *, key: str | None = None) -> None:
    """Raise ConfigError, with the known names, unless the registry of this axis knows the name. `key`: the setting
    that holds the name, where it is not called as the axis is.
    """
    registry(axis).check(name, key=key)


def at_least(key: str, value: float | None, least: float) -> None:
    """Raise ConfigError unless `value` is None or a finite number of at least `least`."""
    if value is not None and not (value >= least and math.isfinite(value)):
        raise ConfigError(key, value, f"must be a number, at least {least}")
