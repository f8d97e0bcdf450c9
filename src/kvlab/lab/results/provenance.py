"""What produced a result: who, which command and commit, which packages and machine; as flat text."""

from __future__ import annotations

import getpass
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from kvlab.config import format_bytes
from kvlab.lab.machine import processor
from kvlab.paths import SOURCE
from kvlab.secrets import redacted_setting

_PACKAGES = ("kvlab", "torch", "triton", "transformers", "mlflow")
_GIT_TIMEOUT_S = 10.0


def provenance(source: Path | None = None) -> dict[str, str]:
    """Describe user, command, machine, package versions and, where `source` is in a git repository, its commit.

    Without `source` that is the checkout that kvlab runs from, or the working directory where it is a wheel.
    Never raises: what cannot be found out is left out. No secret is in it.
    """
    source = source or SOURCE or Path()
    program, root = Path(sys.argv[0] or "python").absolute(), source.absolute()
    facts = {
        "host.name": platform.node(),
        "host.os": platform.platform(),
        "host.cpu": processor(),
        "host.cpus": str(os.cpu_count()),
        "host.memory": format_bytes(psutil.virtual_memory().total),
        "program": str(program.relative_to(root)) if program.is_relative_to(root) else program.name,
        "command": _command(),
    }
    with suppress(OSError, KeyError):  # a container's user may have no name
        facts["user"] = getpass.getuser()
    facts["version.python"] = platform.python_version()
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            facts[f"version.{package}"] = version(package)
    if commit := _git(source, "rev-parse", "--verify", "HEAD"):
        facts["git.commit"] = commit
        if (changes := _git(source, "status", "--porcelain")) is not None:
            facts["git.dirty"] = "true" if changes else "false"
    return facts


def uncommitted(facts: Mapping[str, str]) -> str | None:
    """A note on a run whose commit does not tell what ran, else None."""
    if facts.get("git.dirty") != "true":
        return None
    commit = facts["git.commit"][:10]
    return f"uncommitted changes: commit {commit} alone does not tell what runs here (git.dirty=true)"


def _command() -> str:
    """The command line as it can be typed again, whichever way the interpreter was found."""
    words = ["python", *sys.orig_argv[1:]] if sys.orig_argv else sys.argv
    if Path(words[1] if len(words) > 1 else "").name == "kvlab":  # the installed script
        words = ["kvlab", *words[2:]]
    return shlex.join(map(redacted_setting, words))


def _git(source: Path, *arguments: str) -> str | None:
    try:
        printed = subprocess.check_output(
            ["git", "-C", str(source), *arguments],
            stderr=subprocess.DEVNULL,
            timeout=_GIT_TIMEOUT_S,
            env=os.environ | {"GIT_OPTIONAL_LOCKS": "0"},  # never in the way of another git
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return printed.decode(errors="replace").strip()
