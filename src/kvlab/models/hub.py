"""Files of a model hub, downloaded once into the hub's own cache."""

import logging
import socket
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from kvlab.errors import shown


class HubError(Exception):
    """Why the hub gave nothing, in a few words: callers say what was asked for and what would do."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(shown((str(cause).strip().splitlines() or [type(cause).__name__])[0]))


def no_address() -> OSError | None:
    """Why the hub's name leads nowhere, after which its client would try again for half a minute; None: it does, or
    whoever passes calls on may know it.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or getproxies():
        return None
    name = urlsplit(constants.ENDPOINT).hostname
    try:
        socket.getaddrinfo(name, None)
    except OSError as error:
        return OSError(f"{name}: {error.strerror}")
    return None


def hub_folder(repository: str, patterns: Sequence[str]) -> Path:
    """A folder with the files of a repository that match one of the patterns. Raises HubError."""
    from huggingface_hub import snapshot_download

    return _given(partial(snapshot_download, repository, allow_patterns=list(patterns)))


def hub_file(repository: str, name: str) -> Path:
    """One file of a repository. Raises HubError."""
    from huggingface_hub import hf_hub_download

    return _given(partial(hf_hub_download, repository, name))


def _given(get: Callable[..., str]) -> Path:
    """What the client gets; without an address of the hub, what it got before."""
    # It says each time that it tries again; why it gave up is said once.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    why = no_address()
    try:
        return Path(get(local_files_only=True) if why else get())
    except Exception as error:  # the hub's client raises many kinds: offline, no such id, bad name
        raise HubError(why or error) from error
