"""Standard output and standard error: on a full disk, a pipe that nobody reads, in a locale of few characters."""

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from io import TextIOWrapper
from typing import Any, TextIO, cast


@contextmanager
def lasting_output() -> Iterator[None]:
    """Go on where nothing can be printed: results are in files too. At the end the exit code is then at least 1."""
    out, err = _Lasting(sys.stdout), _Lasting(sys.stderr)
    with redirect_stdout(cast(TextIO, out)), redirect_stderr(cast(TextIO, err)):
        yield
        with suppress(OSError):
            out.flush()
    if out.lost:
        sys.exit(1)


class _Lasting:
    """A text stream whose errors end nothing: the first is told on standard error, what follows goes nowhere."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream or open(os.devnull, "w")  # noqa: SIM115  None: closed before Python began
        self._is_closed = stream is None
        if isinstance(self._stream, TextIOWrapper):  # a locale without the characters of a table or of a name
            with suppress(OSError):  # of a stream that became a pipe behind Python's back
                self._stream.reconfigure(errors="replace")
        self.lost = False

    def write(self, text: str) -> int:
        """Write, or lose, a text."""
        try:
            if self._is_closed:
                raise OSError(errno.EBADF, "it is closed")
            self._stream.write(text)
        except OSError as error:
            self._give_up(error)
        return len(text)

    def flush(self) -> None:
        """Write, or lose, what is waiting to be written."""
        try:
            self._stream.flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        if self.lost:
            return
        self.lost = True
        with suppress(OSError, ValueError):  # or Python itself fails as it ends; ValueError: no file of the system
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
        if not isinstance(error, BrokenPipeError):  # that one was meant
            name = "output" if self._is_closed else getattr(self._stream, "name", "output").strip("<>")
            print(f"warning: {name} cannot be written: {error.strerror}; the rest is not printed", file=sys.stderr)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
