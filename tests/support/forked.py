"""Commands in processes of their own, forked from one that has their imports behind it: these take seconds."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib import import_module
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_IMPORTED = [
    *(f"kvlab.cli.{name}" for name in ("run", "sweep_points", "tune")),
    *(
        f"kvlab.lab.{name}"
        for name in ("campaigns.sweep.sweep", "campaigns.tune.search", "run.execute", "tracking")
    ),
    *("kvlab.engine.executors.torch", "kvlab.lab.results.quality", "pandas"),
    *("mlflow.tracking", "mlflow.store.tracking.sqlalchemy_store", "tests.support.killer"),
]
# What an interpreter does at its end and multiprocessing leaves out: pools of processes are closed in it.
ENDINGS: tuple[Callable[[], None], ...] = (getattr(threading, "_shutdown"), atexit._run_exitfuncs)  # noqa: B009
_ENVIRONMENT = {"COLUMNS": "200", "OMP_NUM_THREADS": "1", "MLFLOW_DISABLE_TELEMETRY": "true"}


class Forked:
    """A call of `main` with arguments and environment, much as a Popen; `stdout` has its errors too. It runs in
    `folder`, whose modules it can import, and in a session of its own.
    """

    def __init__(
        self, main: Callable[[list[str]], object], arguments: list[str], folder: Path = ROOT, /, **environment: str
    ) -> None:
        context = _context()
        reader, writer = context.Pipe(duplex=False)
        settings = {**os.environ, **_ENVIRONMENT, **environment}
        self._process = context.Process(target=_call, args=(writer, settings, folder, main, arguments))
        self._process.start()
        writer.close()
        self.stdout = os.fdopen(os.dup(reader.fileno()), errors="replace")
        reader.close()

    @property
    def pid(self) -> int:
        """Its number, which is that of its session."""
        return self._process.pid or 0

    @property
    def returncode(self) -> int | None:
        """None while it runs; below 0 where a signal ended it."""
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Unless it has ended."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def finish(self, timeout_s: float = 400) -> str:
        """What else it prints up to its end. It is killed when that takes too long."""
        timer = threading.Timer(timeout_s, self._process.kill)
        timer.start()
        with self.stdout:
            printed = self.stdout.read()
        self._process.join()
        timer.cancel()
        return printed


@cache
def _context() -> ForkServerContext:
    for name in _IMPORTED:  # the server goes on without one that it cannot import
        import_module(name)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in _ENVIRONMENT.items():
            patch.setenv(name, value)
        forkserver.ensure_running()
    return context


def _call(
    writer: Connection,
    environment: dict[str, str],
    folder: Path,
    main: Callable[[list[str]], object],
    arguments: list[str],
) -> None:
    os.setsid()
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    for target in (1, 2):
        os.dup2(writer.fileno(), target)
    writer.close()
    os.environ.clear()
    os.environ.update(environment)
    try:
        main(arguments)
    finally:
        sys.stdout.flush()
        for end in ENDINGS:
            end()
