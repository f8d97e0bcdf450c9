"""Programs of the package index that are no part of kvlab's environment: each has its own, in kvlab's cache."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from filelock import FileLock

from kvlab.kernels.cpu.cache import cache_folder


def tools_folder() -> Path:
    """Where they are."""
    return cache_folder() / "tools"


def program(requirement: str, *, torch: bool = False, timeout_s: float = 900) -> Path:
    """The program that a requirement such as `aiperf==0.13.0` brings; its environment is made if it is not there.
    Raises RuntimeError, with a reason, where that is not possible.

    uv fetches in seconds what takes pip minutes, but has settings of its own for the index, and takes the largest
    build of torch: what needs `torch`, and what uv fails on, is left to pip.
    """
    name = requirement.partition("==")[0]
    place = tools_folder() / requirement.replace("==", "-")
    bin = place / "bin"
    place.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{place}.lock"):
        if (place / "made").exists():
            return bin / name
        shutil.rmtree(place, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True)
        pip: list[str | Path] = [sys.executable, "-m", "pip", "--python", bin / "python", "install"]
        pip += ["--quiet", "--disable-pip-version-check", "--no-compile"]  # most of it is never imported
        uv: list[str | Path] = [bin / "uv", "pip", "install", "--quiet", "--python", bin / "python"]
        own = [f"torch=={version('torch').partition('+')[0]}"] if torch else []
        by_uv = not torch and not _fails([*pip, "uv"], timeout_s) and not _fails([*uv, requirement], timeout_s)
        if not by_uv and (reason := _fails([*pip, requirement, *own], timeout_s)):
            shutil.rmtree(place)
            raise RuntimeError(f"no environment for {requirement}: {reason}")
        (place / "made").touch()
    return bin / name


def _fails(command: Sequence[str | Path], timeout_s: float) -> str | None:
    """What a command said if it failed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return f"it took more than {timeout_s:g} s"
    return done.stderr.strip()[-500:] or "no reason was given" if done.returncode else None
