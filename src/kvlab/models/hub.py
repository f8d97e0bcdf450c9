"""Files of a model hub, downloaded once into the hub's own cache."""

import logging
from collections.abc import Sequence
from pathlib import Path

from kvlab.errors import shown


class HubError(Exception):
    """Why the hub gave nothing, in a few words: callers say what was asked for and what would do."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(shown((str(cause).strip().splitlines() or [type(cause).__name__])[0]))


def _quieten() -> None:
    """The client says each time that it tries again; why it gave up is said once."""
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)


def hub_folder(repository: str, patterns: Sequence[str]) -> Path:
    """A folder with the files of a repository that match one of the patterns. Raises HubError."""
    from huggingface_hub import snapshot_download

    _quieten()
    try:
        return Path(snapshot_download(repository, allow_patterns=list(patterns)))
    except Exception as error:  # the hub's client raises many kinds: offline, no such id, bad name
        raise HubError(error) from error


def hub_file(repository: str, name: str) -> Path:
    """One file of a repository. Raises HubError."""
    from huggingface_hub import hf_hub_download

    _quieten()
    try:
        return Path(hf_hub_download(repository, name))
    except Exception as error:  # as above
        raise HubError(error) from error
