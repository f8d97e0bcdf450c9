"""What produced a result: who, which command and commit, which packages and machine; as flat text.
And a configuration in one short text: equal where the same would be measured.
"""

import dataclasses
import getpass
import hashlib
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from kvlab.config import RunConfig, format_bytes
from kvlab.lab.machine import processor
from kvlab.lab.settings import flatten, measured
from kvlab.paths import SOURCE
from kvlab.plugins import plugin_code
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


def other_versions(kept: Iterable[Mapping[str, str]]) -> list[str]:
    """A sentence where other versions of kvlab made results that are kept, of each of which these are the facts."""
    try:
        ours = version("kvlab")
    except PackageNotFoundError:  # a checkout that is not installed
        return []
    others = sorted({facts.get("version.kvlab", ours) for facts in kept} - {ours})
    text = f"results of kvlab {', '.join(others)} are kept, and this is {ours}, which may compute others"
    return [text] if others else []


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


def config_digest(config: RunConfig, *, any_repeat: bool = False) -> str:
    """The first 16 digits of a SHA-256 of all settings that a measurement depends on.

    Left out: where it is tracked and under which name and tags, `figures`, `optimize`, `resume`, `repeats`; with
    `any_repeat` also `repeat`, so that the repeats of a point have it in common. A workload file counts with its
    content, and so do plugins.
    """
    kept = measured(flatten(dataclasses.asdict(config)), any_repeat=any_repeat)
    if config.workload.path is not None:
        with suppress(OSError, RuntimeError):  # one that cannot be read is refused later, by who reads it
            file = Path(config.workload.path).expanduser()
            if file.is_file():  # to open a pipe may wait for ever
                kept["workload.path"] = hashlib.sha256(file.read_bytes()).hexdigest()
    if code := plugin_code(config.plugins):
        kept["plugins.code"] = code
    return digest_of(json.dumps(kept, sort_keys=True, default=str))


def sweep_digest(points: Iterable[str]) -> str:
    """The same for a set of points, in whatever order they run."""
    return digest_of("\n".join(sorted(points)))


def digest_of(text: str) -> str:
    """The first 16 digits of a text's SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
