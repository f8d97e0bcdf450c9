"""Optional packages: how to install what an extra of kvlab names."""

from __future__ import annotations

import re
import shlex
from importlib.metadata import PackageNotFoundError, requires


def install_command(extra: str) -> str:
    """The pip command for the packages of an extra, by their own names: kvlab itself is on no package index."""
    try:
        found = requires("kvlab") or []
    except PackageNotFoundError:
        found = []
    own = re.compile(rf"extra\s*==\s*['\"]{extra}['\"]")
    names = [each.partition(";")[0].strip() for each in found if own.search(each)]
    return "pip install " + (" ".join(map(shlex.quote, names)) or f"-e '.[{extra}]'")
