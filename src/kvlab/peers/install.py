"""Environments for engines that run in a process of their own, made by recipe with the user's own pip."""

import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from kvlab.errors import ConfigError, FetchError, nearest, shown
from kvlab.kernels.cpu.cache import cache_folder
from kvlab.peers.engines import ENGINES
from kvlab.peers.engines.base import Recipe

TRANSFORMERS = Recipe("transformers", "5.23.0", before=("torch==2.13.0",))  # of both of its engines


def environment(name: str) -> Path:
    """Where the environment of an engine is, once it is installed. Raises ConfigError for an unsafe folder."""
    try:
        return cache_folder() / "engines" / name
    except OSError as error:
        raise ConfigError("KVLAB_CACHE", "...", str(error)) from error


def installed_python(name: str) -> Path | None:
    """The interpreter of that environment; None where there is none."""
    python = environment(name) / "bin" / "python"
    return python if python.is_file() else None


def recipe_of(name: str) -> Recipe:
    """How the environment of an engine is made. Raises ConfigError for one that has none, or that is unknown."""
    recipes = {engine: ENGINES.get(engine).recipe for engine in ENGINES.names()}
    if (recipe := recipes.get(name)) is not None:
        return recipe
    known = [engine for engine in recipes if recipes[engine] is not None]
    why = "needs no environment of its own" if name in recipes else "unknown"
    hint = nearest(name, known, "; did you mean {}?")
    raise ConfigError("engine", name, f"{why}; those that have one: {', '.join(known)}{hint}")


def install(name: str, folder: Path) -> Recipe:
    """Make the environment of an engine in a folder that is not there. Raises ConfigError for an engine without a
    recipe or a folder that is there; FetchError, and leaves nothing, where a step fails.
    """
    recipe = recipe_of(name)
    if folder.exists():
        raise ConfigError("folder", folder, "is there already; remove it, or name another one")
    try:
        _run([sys.executable, "-m", "venv", str(folder)])
        pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--no-input", "-q"]
        if recipe.before:
            _run([*pip, "install", *recipe.before])
        wheel = f"{recipe.package}=={recipe.version}"
        if recipe.is_built:  # anew, as pip's cache may have one that another processor's flags were for
            _run([*pip, "install", "--no-cache-dir", wheel])
            return recipe
        with tempfile.TemporaryDirectory(prefix="kvlab-") as wheels:
            _run([*pip, "download", "--no-deps", "--only-binary=:all:", "--dest", wheels, wheel])
            (file,) = Path(wheels).glob("*.whl")
            if needed := requirements(file, recipe.left_out):
                _run([*pip, "install", *needed])
            _run([*pip, "install", "--no-deps", str(file)])
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return recipe


def requirements(wheel: Path, left_out: Sequence[str]) -> list[str]:
    """What a wheel needs, without its extras and what begins with one of `left_out`."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(entry for entry in archive.namelist() if entry.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().partition("\n\n")[0].splitlines()
    needs = [line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist: ")]
    return [need for need in needs if not re.search(r";.*\bextra\b", need) and not need.startswith(tuple(left_out))]


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    if done.returncode:
        lines = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        what = " ".join([Path(command[0]).name, *command[1:]][:9])
        raise FetchError(f"{shown(what)} failed: {shown(_reason(lines), most=400)}")


def _reason(lines: list[str]) -> str:
    """What a failed step says: of a build, which pip quotes, what its tools said first."""
    begins = next((at for at, line in enumerate(lines) if line.endswith("lines of output]")), None)
    if begins is not None:
        built = lines[begins + 1 : lines.index("[end of output]", begins)]
        first = next((at for at, line in enumerate(built) if re.search(r"\b[Ee]rror\b", line)), len(built) - 1)
        return " ".join(built[first : first + (3 if built[first].endswith(":") else 1)])
    errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:] or ["no reason was given"]
    return errors[-1].removeprefix("ERROR: ")
