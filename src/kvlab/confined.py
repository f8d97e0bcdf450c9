"""Work on strangers' data in a process of its own, with limits of memory and time.

A `Confined` asks. The process runs a module of kvlab that calls `serve`.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from typing import NamedTuple

_NO_MEMORY = 77  # exit code


class ConfinedError(Exception):
    """The process ended before it answered; the text says why."""


class _Process(NamedTuple):
    running: subprocess.Popen[bytes]
    connection: Connection
    owner: int  # the process that started it: a fork of that one must not use its connection
    ending: weakref.finalize[[subprocess.Popen[bytes], Connection, int], Confined]


class Confined:
    """A process that runs `module` and answers one question at a time, from any thread. It starts with the first
    question, again after its end, and ends with this object.

    `memory`: bytes of address space that the process may have. `seconds`: that an answer may take.
    """

    def __init__(self, module: str, *, memory: int, seconds: float) -> None:
        self._module = module
        self._memory = memory
        self._seconds = seconds
        self._one = threading.Lock()
        self._process: _Process | None = None

    def ask(self, question: bytes) -> bytes:
        """The answer. Raises ConfinedError where there is none within the limits."""
        with self._one:
            if self._process is None or self._process.owner != os.getpid():
                self._process = self._start()
            running, connection, _, ending = self._process
            try:
                connection.send_bytes(question)
                return connection.recv_bytes()
            except (EOFError, OSError):
                self._process = None
                code = running.wait()
                ending()
                raise ConfinedError(self._reason(code)) from None

    def _start(self) -> _Process:
        running, mine = start_module(self._module, str(self._memory), str(self._seconds))
        owner = os.getpid()
        return _Process(running, mine, owner, weakref.finalize(self, end_module, running, mine, owner))

    def _reason(self, code: int) -> str:
        if code == -signal.SIGALRM:
            return f"takes more than {self._seconds:g} seconds"
        if code in (_NO_MEMORY, -signal.SIGABRT):
            return f"takes more than {self._memory >> 20} MiB of memory"
        return f"ended its process, with code {code}"


def start_module(module: str, *arguments: str) -> tuple[subprocess.Popen[bytes], Connection]:
    """A process that runs a module of kvlab, its first argument the descriptor of the connection's end."""
    mine, its = Pipe()
    # -P: no module of the folder that kvlab was started in.
    running = subprocess.Popen(
        [sys.executable, "-P", "-m", module, str(its.fileno()), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=[its.fileno()],
        process_group=0,  # Ctrl-C is for the one that asks; this one ends with it
    )
    its.close()
    return running, mine


def end_module(running: subprocess.Popen[bytes], connection: Connection, owner: int) -> None:
    """End that process, in the process `owner` which started it; a fork of that one only forgets it."""
    connection.close()
    if owner == os.getpid():
        running.kill()
        running.wait()


def serve(answer: Callable[[bytes], bytes]) -> None:
    """Answer the questions of the process that started this one, within the limits of its arguments."""
    descriptor, memory, seconds = sys.argv[1:]
    resource.setrlimit(resource.RLIMIT_AS, (int(memory), int(memory)))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with Connection(int(descriptor)) as connection:
        while True:
            try:
                question = connection.recv_bytes()
                signal.setitimer(signal.ITIMER_REAL, float(seconds))  # then a signal ends this process
                connection.send_bytes(answer(question))
                signal.setitimer(signal.ITIMER_REAL, 0)
            except EOFError:
                return
            except MemoryError:
                os._exit(_NO_MEMORY)
