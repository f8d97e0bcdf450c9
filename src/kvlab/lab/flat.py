"""Nested settings as dotted keys: what a run is tracked, compared and told apart by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, object]:
    """Nested settings as dotted keys; an empty mapping has none."""
    flat: dict[str, object] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        elif value != {}:
            flat[f"{prefix}{key}"] = value
    return flat
