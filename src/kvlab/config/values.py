"""Values that several groups of settings have: checks, and sizes in bytes."""

import re
from collections.abc import Iterable

from kvlab.errors import ConfigError

MOST = 10**15  # of any number: what is computed from a few of them is a number still
MOST_SEED = 2**64 - 1  # what random generators take
MOST_SECONDS = 366 * 86400  # a year: who waits for longer has mistyped
_MOST_BYTES = 2**60
_PICTURES = (".png", ".svg", ".pdf")
_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", start=1)}
_UNITS |= {f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)}


def one_of(key: str, value: str, known: tuple[str, ...]) -> None:
    """Raise ConfigError, with the known values, unless `value` is one of them."""
    if value not in known:
        raise ConfigError(key, value, f"unknown; known: {', '.join(known)}")


def server_root(url: str) -> str:
    """A server's address without a slash at its end, and without the /v1 that OpenAI's clients have there."""
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def address(host: str, port: int) -> str:
    """Where a server listens, as its clients write it."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def picture_name(key: str, name: str | None) -> None:
    """Raise ConfigError unless `name` is None or the name of a picture."""
    if name is not None and not name.endswith(_PICTURES):
        raise ConfigError(key, name, f"a picture's name ends in {', '.join(_PICTURES)}")


def at_least(key: str, value: float | None, least: float, most: float = MOST) -> None:
    """Raise ConfigError unless `value` is None or a number from `least` to `most`."""
    if value is None or least <= value <= most:
        return
    text = f"at least {least}" if not value > most else f"at most {most}"
    raise ConfigError(key, value, f"must be a number, {text}")


def all_at_least(section: str, settings: object, names: Iterable[str], least: float, most: float = MOST) -> None:
    """The same of several settings of a section."""
    for name in names:
        at_least(f"{section}.{name}", getattr(settings, name), least, most)


def parse_bytes(text: str, *, key: str) -> int:
    """Read a size such as `512MiB`, `1.5 GiB`, `2GB` or a plain number of bytes.

    Raises ConfigError, naming `key`, for anything else.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(text))
    if not match or match[2].lower() not in _UNITS:
        raise ConfigError(key, text, "is not a size; write for example 512MiB, 4GiB or 2GB")
    size = float(match[1]) * _UNITS[match[2].lower()]
    if size > _MOST_BYTES:
        raise ConfigError(key, text, "is more than a million TiB")
    return int(size)


def format_bytes(count: float) -> str:
    """Write a number of bytes for people: `512.0 MiB`."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
