"""What produced a result: who, which program and commit, which packages and machine; as flat text."""

from __future__ import annotations

import getpass
import os
import platform
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = ("kvlab", "torch", "transformers")
_GIT_TIMEOUT_S = 10.0


def provenance(root: Path) -> dict[str, str]:
    """Describe user, program, machine, package versions and, where `root` is in a git repository, its commit.

    Never raises: what cannot be found out is left out.
    """
    facts = {"host.name": platform.node(), "host.cpus": str(os.cpu_count()), "program": _program(root)}
    with suppress(OSError, KeyError):  # a container's user may have no name
        facts["user"] = getpass.getuser()
    facts["version.python"] = platform.python_version()
    for package in _PACKAGES:
        try:
            facts[f"version.{package}"] = version(package)
        except PackageNotFoundError:
            continue
    if commit := _git(root, "rev-parse", "--verify", "HEAD"):
        facts["git.commit"] = commit
        changes = _git(root, "status", "--porcelain")
        if changes is not None:
            facts["git.dirty"] = "true" if changes else "false"
    return facts


def _program(root: Path) -> str:
    program = Path(sys.argv[0] or "python").absolute()
    return str(program.relative_to(root.absolute())) if program.is_relative_to(root.absolute()) else program.name


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_GIT_TIMEOUT_S,
            env=os.environ | {"GIT_OPTIONAL_LOCKS": "0"},  # never in the way of someone else's git
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
