"""Sizes in bytes, read and written for people."""

from __future__ import annotations

import re

from kvlab.errors import ConfigError

_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", start=1)}
_UNITS |= {f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)}


def parse_bytes(text: str, *, key: str) -> int:
    """Read a size such as `512MiB`, `1.5 GiB`, `2GB` or a plain number of bytes.

    Raises ConfigError, naming `key`, for anything else.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(text))
    if not match or match[2].lower() not in _UNITS:
        raise ConfigError(key, text, "is not a size; write for example 512MiB, 4GiB or 2GB")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def format_bytes(count: float) -> str:
    """Write a number of bytes for people: `512.0 MiB`."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
