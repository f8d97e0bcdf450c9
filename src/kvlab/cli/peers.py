"""kvlab peers: environments for engines that run in a process of their own.

kvlab peers install vllm            in the folder `engines` of KVLAB_CACHE, where engine=vllm then finds it
kvlab peers install vllm folder=$HOME/vllm-env

pip brings the packages, with your own settings; what a failed step has made is removed.
"""

from dataclasses import dataclass

from kvlab.cli.settings import command
from kvlab.errors import ConfigError
from kvlab.lab.settings import setting


@dataclass
class PeersSettings:
    """The settings of the command."""

    folder: str | None = setting(None, "where the environment is made", "<folder>")


@command(__doc__, PeersSettings, bare=False)
def main(settings: PeersSettings, words: list[str]) -> int:
    if len(words) != 2 or words[0] != "install":
        raise ConfigError("peers", " ".join(words), "write: kvlab peers install <engine>")
    from pathlib import Path

    from kvlab.peers.install import environment, install, recipe_of

    name = words[1]
    recipe_of(name)  # raises before anything is said
    folder = environment(name) if settings.folder is None else Path(settings.folder).expanduser().absolute()
    print(f"{name}: an environment in {folder}; this takes minutes", flush=True)
    recipe = install(name, folder)
    given = "" if settings.folder is None else f" engine.python={folder / 'bin' / 'python'}"
    print(f"{recipe.package} {recipe.version}; run it: kvlab run engine={name}{given}")
    return 0
