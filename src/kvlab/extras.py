"""Optional packages: how to install what an extra of kvlab names."""

import re
import shlex
from importlib.metadata import PackageNotFoundError, requires
from importlib.util import find_spec

from kvlab.errors import ConfigError


def install_command(extra: str) -> str:
    """The pip command for the packages of an extra, by their own names: kvlab itself is on no package index."""
    try:
        found = requires("kvlab") or []
    except PackageNotFoundError:
        found = []
    own = re.compile(rf"extra\s*==\s*['\"]{extra}['\"]")
    names = [line.partition(";")[0].strip() for line in found if own.search(line)]
    return "pip install " + (" ".join(map(shlex.quote, names)) or f"-e '.[{extra}]'")


def need_events(key: str, value: object) -> None:
    """Raise ConfigError where a setting needs KV events, and what hears them is not installed."""
    if not all(map(find_spec, ("zmq", "msgspec"))):
        text = f"needs pyzmq and msgspec, of which one is not installed: {install_command('events')}"
        raise ConfigError(key, value, text)
