"""Plugins: modules outside of kvlab that register implementations (see registry.py).

A run imports those that its setting `plugins` names, and those that installed packages declare as entry points of
group `kvlab`, before its configuration is checked; so their names are as good as kvlab's own.
"""

import os
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache, partial
from hashlib import sha256
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from traceback import walk_tb
from types import FrameType

from kvlab.errors import ConfigError, KvlabError

_loaded: dict[str, None] = {}  # in the order in which they were loaded
_installed: set[str] = set()  # modules of entry points, which are named by their distributions there

FULL_ERROR = "HYDRA_FULL_ERROR"  # which has Hydra raise what it would print a part of
SET_HERE = "KVLAB_FULL_ERROR"  # by `kvlab run`


def load_plugins(modules: Iterable[str] = ()) -> None:
    """Import the entry points of installed packages, then these modules; what is imported already stays as it is.

    Modules are found as Python finds them, and in the working directory. Raises ConfigError, naming the plugin, for
    one that does not exist, raises an exception, or registers a name that is taken.
    """
    _load_entry_points()
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # an installed command does not have it there
    for module in modules:
        if module.endswith(".py"):
            name = os.path.basename(module).removesuffix(".py")
            text = f"is a file; write {name}, in the working directory, on PYTHONPATH or installed"
            raise ConfigError("plugins", module, text)
        _load(module, partial(import_module, module))
        _loaded[module] = None


def loaded_plugins() -> tuple[str, ...]:
    """The plugins of this process: module names, and `<distribution> <version>` of entry points."""
    return tuple(_loaded)


def raised_in(error: BaseException) -> str:
    """Where in a plugin an error was raised, to be put behind it: the last line that is a plugin's; "": none is."""
    files = {str(getattr(sys.modules.get(name), "__file__", None)) for name in (*_loaded, *_installed)}
    packages = tuple(file.removesuffix("__init__.py") for file in files if file.endswith(f"{os.sep}__init__.py"))
    return _last_line(
        error, lambda frame: frame.f_code.co_filename in files or frame.f_code.co_filename.startswith(packages)
    )


def reason_of(error: Exception) -> str:
    """What an error says: kvlab's own in its words, others with their type and where a plugin raised them."""
    return str(error) if isinstance(error, KvlabError) else f"{type(error).__name__}: {error}{raised_in(error)}"


def asks_for_traceback() -> bool:
    """Whether a user does, by `HYDRA_FULL_ERROR`: not where a command set it, whose children have it, too."""
    return FULL_ERROR in os.environ and SET_HERE not in os.environ


def told(error: Exception) -> str | None:
    """The sentence for an error that a plugin raised, in place of a traceback; None: no plugin did."""
    if not raised_in(error):
        return None
    return f"{reason_of(error)}; HYDRA_FULL_ERROR=1 in the environment shows Python's traceback"


def plugin_code(modules: Iterable[str]) -> dict[str, str]:
    """The first 8 digits of a SHA-256 of each module's source, of a package of all its sources: as long as they are
    the same, so is what it does. What is not imported, or has no source, is left out.
    """
    found = {}
    for name in modules:
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is None or not file.endswith(".py"):
            continue
        path = Path(file)
        sources = sorted(path.parent.rglob("*.py")) if path.name == "__init__.py" else [path]
        with suppress(OSError):  # one that is gone since
            found[name] = sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:8]
    return found


@cache
def _load_entry_points() -> None:
    for point in entry_points(group="kvlab"):
        distribution = f"{point.dist.name} {point.dist.version}" if point.dist is not None else point.value
        _load(f"{point.value} (entry point {point.name} of {distribution})", point.load)
        _installed.update((point.module, point.module.partition(".")[0]))
        _loaded[distribution] = None


def _load(plugin: str, load: Callable[[], object]) -> None:
    try:
        load()
    except ModuleNotFoundError as error:
        itself = error.name is not None and f"{plugin}.".startswith(f"{error.name}.")
        advice = "; name one in the working directory, on PYTHONPATH or installed" if itself else ""
        raise ConfigError("plugins", plugin, f"cannot be imported: {error}{advice}") from error
    except Exception as error:
        said = str(error) if isinstance(error, KvlabError) else f"{type(error).__name__}: {error}"
        raise ConfigError("plugins", plugin, f"cannot be imported: {said}{_place(error)}") from error


def _place(error: Exception) -> str:
    """Where a plugin's own code has raised an error: the last line that is neither Python's import nor kvlab's."""
    if isinstance(error, SyntaxError):
        return ""
    others = ("importlib", "_frozen_importlib", "kvlab.")
    return _last_line(error, lambda frame: not str(frame.f_globals.get("__name__")).startswith(others))


def _last_line(error: BaseException, is_plugins: Callable[[FrameType], bool]) -> str:
    """The file and line of the last frame that is a plugin's, in brackets; "": none is."""
    lines = [(frame, number) for frame, number in walk_tb(error.__traceback__) if is_plugins(frame)]
    return f" ({os.path.basename(lines[-1][0].f_code.co_filename)}, line {lines[-1][1]})" if lines else ""
