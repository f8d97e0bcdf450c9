"""Writing files: each is complete or absent, and a disk that is full, read-only or gone costs a sentence."""

import csv
import errno
import fcntl
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from kvlab.errors import ConfigError, OutputError

_ADVICE = {
    errno.ENOSPC: "free some space there, or choose another directory",
    errno.EDQUOT: "free some space there, or choose another directory",
    errno.EROFS: "choose a directory on a disk that can be written to",
    errno.EACCES: "make the directory writable, or choose another one",
    errno.EPERM: "make the directory writable, or choose another one",
}


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise OutputError, that `path` cannot be written, for what the operating system refuses within the block."""
    try:
        yield
    except OSError as error:
        raise OutputError(path, refusal(error)) from error


def refusal(error: OSError) -> str:
    """That something cannot be written, why, and what would do."""
    reason = os.strerror(error.errno) if error.errno else str(error)
    return f"cannot be written: {reason}; {_ADVICE.get(error.errno or 0, 'choose another directory')}"


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a path beside `path` to write to. At the end of the block it takes the place of `path`, in one step.

    The directory is made. Whatever the block raises, what it wrote is removed and `path` is as it was. Raises
    OutputError for what the operating system refuses. Nothing is flushed to the disk itself (fsync takes 8 ms).
    """
    # Hidden, so that neither uploads nor patterns find it; the extension stays, which some writers go by.
    own = path.with_name(f".{os.getpid()}.{path.name}")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield own
            os.replace(own, path)
        finally:
            with suppress(OSError):
                own.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text in UTF-8. Raises OutputError."""
    with replacing(path) as own:
        own.write_text(text, encoding="utf-8")


def write_csv(path: Path, rows: Iterable[Iterable[object]]) -> None:
    """Write rows as CSV. Raises OutputError."""
    with replacing(path) as own, own.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)


@contextmanager
def attempt(errors: list[OutputError] | None) -> Iterator[None]:
    """Keep an OutputError in `errors` instead of raising it, so that the next file is tried; None: raise it."""
    try:
        yield
    except OutputError as error:
        if errors is None:
            raise
        errors.append(error)


def check_directory(key: str, directory: Path) -> None:
    """Make the directory that a setting names and see that files can be written there. Raises ConfigError."""
    try:
        with writing(directory):
            directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=directory) as file:
                file.write(bytes(4096))
    except OutputError as error:
        raise ConfigError(key, directory, error.reason) from error


@contextmanager
def claimed(key: str, directory: Path) -> Iterator[None]:
    """Have a directory for oneself that was checked: a lock of it ends with the process, whatever becomes of that.
    Raises ConfigError where another process has it.
    """
    check_directory(key, directory)
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                text = "another command writes there; name another directory, or wait until it has ended"
                raise ConfigError(key, directory, text) from error
        yield
    finally:
        os.close(descriptor)


def sentences(errors: Sequence[OutputError]) -> list[str]:
    """What to tell of several files: one sentence for all that failed in a directory for the same reason."""
    groups: dict[tuple[Path, str], list[OutputError]] = {}
    for error in errors:
        groups.setdefault((error.path.parent, error.reason), []).append(error)
    return [
        str(failed[0]) if len(failed) == 1 else f"{folder}: {', '.join(e.path.name for e in failed)}: {reason}"
        for (folder, reason), failed in groups.items()
    ]
