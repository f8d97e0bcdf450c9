"""A session of tests has a home, caches and settings of its own: it neither reads nor changes those of the user.

Nothing of kvlab may be imported before, since some of it reads the environment once.
"""

from __future__ import annotations

import os
import re
import shutil
import site
import tempfile
from collections.abc import MutableMapping
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: Names the home of a session, for processes that it starts: these share it.
SESSION = "KVLAB_TEST_HOME"
#: Stays: by these a developer chooses a processor's path, or how much is tested.
KEPT = frozenset(
    f"KVLAB_{name}"
    for name in (
        *("CPU_ARCH", "CPU_PATHS", "CXXFLAGS"),
        *("EXAMPLES", "KERNEL_CASES", "PARITY", "SANITIZE", "SOAK_REQUESTS", "WHOLE_BURST"),
    )
)
_LOCAL = "localhost,127.0.0.1,::1"
_REMOVED = re.compile(
    r"(AWS|HF|HUGGINGFACE|HUGGING_FACE|HYDRA|KVLAB|MLFLOW|OPENAI|OTEL|TRANSFORMERS|VLLM)_|XDG_\w+_HOME$"
)


def isolate(environment: MutableMapping[str, str]) -> Path | None:
    """Give the session that has this environment an empty home; None where it is part of one that has.

    What is made for the machine (compiled kernels, the published model) stays in `.cache` of the checkout from
    session to session. Where kvlab would not trust that folder, since others may write to it, it is made anew.
    """
    if SESSION in environment:
        return None
    user, home = Path(environment.get("HOME") or Path.home()), Path(tempfile.mkdtemp(prefix="kvlab-home-"))
    found = _tools_of(user, environment)
    for name in [name for name in environment if _REMOVED.match(name) and name not in KEPT]:
        del environment[name]
    cache = ROOT / ".cache"
    if not _is_trusted(cache / "kvlab"):
        cache = home / ".cache"
    environment.update(
        HOME=str(home),
        KVLAB_CACHE=str(cache / "kvlab"),
        MPLCONFIGDIR=str(cache / "matplotlib"),
        TRITON_CACHE_DIR=str(cache / "triton"),
    )
    environment[SESSION] = str(home)
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # set in many containers: each process would compile all anew
    for name in ("NO_PROXY", "no_proxy"):  # servers of tests are on this machine
        environment[name] = ",".join(filter(None, (environment.get(name), _LOCAL)))
    for name, path in found.items():
        environment.setdefault(name, str(path))
    return home


def end(home: Path) -> None:
    """Remove the home of a session."""
    shutil.rmtree(home, ignore_errors=True)


def _tools_of(user: Path, environment: MutableMapping[str, str]) -> dict[str, Path]:
    """Where tools that tests use were installed below a user's home: packages, a browser; and how pip reaches its
    index, for the published model.
    """
    caches = Path(environment.get("XDG_CACHE_HOME") or user / ".cache")
    settings = Path(environment.get("XDG_CONFIG_HOME") or user / ".config")
    mac = user / "Library"
    places = {
        "PYTHONUSERBASE": [Path(site.getuserbase())],
        "PLAYWRIGHT_BROWSERS_PATH": [caches / "ms-playwright", mac / "Caches" / "ms-playwright"],
        "PIP_CONFIG_FILE": [
            folder / "pip.conf" for folder in (settings / "pip", mac / "Application Support" / "pip", user / ".pip")
        ],
    }
    there = {name: next((each for each in found if each.exists()), None) for name, found in places.items()}
    return {name: path for name, path in there.items() if path is not None}


def _is_trusted(folder: Path) -> bool:
    """Whether kvlab keeps code there. Its rules are loaded alone, without the package around them."""
    spec = spec_from_file_location("_kvlab_cache", ROOT / "src" / "kvlab" / "kernels" / "cpu" / "cache.py")
    if spec is None or spec.loader is None:
        raise ImportError("kernels/cpu/cache.py")
    rules = module_from_spec(spec)
    spec.loader.exec_module(rules)
    try:
        rules.check_folder(folder)
    except OSError:
        return False
    return os.access(folder, os.W_OK)
