"""A disk that fails: the n-th of all writes below a folder, or every one from there on, is refused.

Python tells an audit hook of every file that is opened, made or renamed before it does so, whichever library asks.
"""

from __future__ import annotations

import errno
import os
import re
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_active: list[Faults] = []


@dataclass
class Faults:
    """What a disk was asked to write below `folder`, by path; what it refused."""

    folder: Path
    number: int | None = None  # of the write that fails; None: none does
    onwards: bool = False  # so do all that follow
    match: str = ""  # every write of a path in which this expression is found fails
    code: int = errno.ENOSPC
    asked: list[Path] = field(default_factory=list)
    refused: list[Path] = field(default_factory=list)

    def ask(self, path: Path) -> None:
        """Raise OSError if this write fails."""
        if not path.is_relative_to(self.folder):
            return
        self.asked.append(path)
        here = len(self.asked) - 1
        counted = self.number is not None and (here == self.number or (self.onwards and here > self.number))
        if counted or (self.match and re.search(self.match, str(path))):
            self.refused.append(path)
            raise OSError(self.code, os.strerror(self.code), str(path))


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if not _active or event not in ("open", "os.mkdir", "os.rename"):
        return
    target = arguments[1] if event == "os.rename" else arguments[0]
    if isinstance(target, int) or (event == "open" and not arguments[2] & _WRITING):
        return
    faults = _active[-1]
    _active.clear()  # the hook itself may look at files
    try:
        faults.ask(Path(os.path.abspath(os.fsdecode(target))))
    finally:
        _active.append(faults)


@cache
def _listen() -> None:
    """From now on, since a hook cannot be taken out again. Python calls it for each `id()`, too."""
    sys.addaudithook(_hook)


@contextmanager
def disk(
    folder: Path, number: int | None = None, *, onwards: bool = False, match: str = "", code: int = errno.ENOSPC
) -> Iterator[Faults]:
    """Within the block the write with this number below the folder fails, and those that match."""
    _listen()
    faults = Faults(folder, number, onwards, match, code)
    _active.append(faults)
    try:
        yield faults
    finally:
        _active.clear()


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Within the block the system refuses to make a file larger: writes end in the middle, whoever writes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
